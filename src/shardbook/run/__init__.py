"""A run: its directory, checkpoints, metrics and trackers, and what the console says of it.
Never decides what is computed."""
