"""Ranks: starts processes, joins them, ends them when one is lost or hangs, and keeps their exit codes.
Never computes anything itself."""
