"""Memory: activations that a rank keeps or recomputes, and state that it offloads to the host or a disk.
Never changes a number."""
