"""The dtypes of a model's numbers, by their names in a recipe."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
