"""The plan: what a layout will keep and send, in closed formulas that a run is measured against.
Never needs a process group, a GPU or memory."""
