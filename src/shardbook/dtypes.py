"""The dtypes that a recipe can name."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
