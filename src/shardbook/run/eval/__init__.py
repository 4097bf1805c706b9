"""What a model is worth between steps and after a run: held-out loss, samples, and DPO's reference. Trains nothing."""
