"""Data: from a named source to the micro-batches of one data-parallel rank.
Never knows models, stages or processes."""
