"""Memory: what a rank keeps from forward to backward, and what it computes again.
Never changes a number."""
