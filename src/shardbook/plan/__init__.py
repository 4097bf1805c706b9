"""The plan: bytes that a layout keeps and sends, and seconds of its step, in closed formulas that runs are measured
against; and advice on the layout for a cluster. It never needs a process group, a GPU or memory."""
