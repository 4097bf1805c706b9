"""A run: its directory, checkpoints, metrics, trackers and console.
Never decides what is computed."""
