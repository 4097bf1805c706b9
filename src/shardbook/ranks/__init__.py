"""Ranks: processes that are started, find each other, notice who is lost, and end with an exit code.
Never computes anything itself."""
