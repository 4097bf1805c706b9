"""The plan: what a layout will keep, send and take, in closed formulas that a run is measured against; and which layout
to choose on a cluster. Never needs a process group, a GPU or memory."""
