"""Parallelism: which ranks hold which parameters of a model, and when these are gathered and reduced.
It never reads a config, a row or a file."""
