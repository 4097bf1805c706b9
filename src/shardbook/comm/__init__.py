"""Communication: who sends how many bytes."""
