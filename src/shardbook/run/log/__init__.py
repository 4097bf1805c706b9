"""The log of a run: measures its steps, and writes a row of each to metrics.jsonl, the trackers and the console.
Never changes a number of the run."""
