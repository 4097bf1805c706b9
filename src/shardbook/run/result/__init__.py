"""The result of a run: weights or adapters as files, and on the Hub. Nothing here needs a step."""
