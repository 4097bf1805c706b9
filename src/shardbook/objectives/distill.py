"""Distillation: a loss against the teacher's distribution at each trained token, beside the loss against the token.

Invariant: sums over trained tokens, as in sft. The loss is (1 - kd_ratio) * nll + kd_ratio * temperature^2 * kl.
"""

import torch
from torch import Tensor, nn

from shardbook.data.loader import MicroBatch
from shardbook.data.tokenized import Totals
from shardbook.recipe import Distill

NLL_AND_KL = ("nll", "kl")  # the metrics


def distill_terms(of: Distill, model: nn.Module, micro: MicroBatch, totals: Totals) -> Tensor:
    """Returns the terms of the loss and of NLL_AND_KL; kl is at the temperature, not multiplied by its square."""
    sums: Tensor = model(micro, distill=of)
    return torch.cat([sums[:1], sums[1:].detach()]) / totals.tokens
