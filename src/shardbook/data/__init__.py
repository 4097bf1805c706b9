"""Data: from a named source to the micro-batches of a rank. Never imports model or stages."""
