"""Evaluation computes the held-out loss, samples and DPO's reference, while a run trains and after it."""
