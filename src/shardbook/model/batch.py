"""The batch of a model: the one argument of its forward."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B rows of L tokens, and n positions in them that predict a trained token; integers are int64. Other positions are
    in no list, so nothing needs an ignore_index (-100).

    fully_shard casts the floats of a dataclass that a model is called with. The model reads none, so a float that a
    subclass adds for a loss keeps its dtype where the loss reads it: in the caller's batch.
    """

    input_ids: Tensor  # [B, L]
    position_ids: Tensor  # [B, L], from 0 in every document
    # as FlashAttention's: [m] int32, ascending offsets into the flat [B * L], the start of each document and of
    # each row's padding; filled up with B * L, so that m is the same in every micro-batch
    cu_seqlens: Tensor
    positions: Tensor  # [n] indices into the flat [B * L] that predict a trained token
    targets: Tensor | None  # [n] the trained tokens; None: logits are wanted, not losses
    packed: bool  # whether a row may hold several documents; False: one a row, padding only at its end
    # as FlashAttention's: no document has more tokens, nor a whole row's padding. It is a power of two from 128 on, or
    # the row's length, so that there are few values
    max_seqlen: int

    @property
    def full_shape(self) -> torch.Size:
        """The shape [B, L] of whole rows, which documents and masks are of."""
        return self.input_ids.shape
