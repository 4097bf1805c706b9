"""Parallelism: which ranks hold what of a model, and when it is gathered and reduced: mesh, stages, units, layout.
Never reads a config, a row or a file."""
