"""Models: a Hugging Face config becomes a causal LM, and its weights go in and out as safetensors, shard by shard.
It never gathers, reduces or reads a row of data."""
