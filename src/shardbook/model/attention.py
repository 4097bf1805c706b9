"""Which positions a token attends to: earlier ones of its own document."""

import torch
from torch import Tensor


def attention_mask(
    documents: Tensor | None, input_ids: Tensor, dtype: torch.dtype, implementation: str
) -> Tensor | None:
    """[B, 1, L, L]: causal and within a document. None for plain causal rows under sdpa: it has a kernel for them."""
    if documents is None and implementation == "sdpa":
        return None
    length = input_ids.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None]
    if documents is not None:
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])
    if implementation == "sdpa":
        return allowed[:, None]
    # eager attention ADDS the mask to its scores: a boolean one would add 1 where it should forbid
    return torch.zeros(allowed.shape, dtype=dtype, device=input_ids.device).masked_fill(
        ~allowed, torch.finfo(dtype).min
    )[:, None]
