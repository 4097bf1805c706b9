"""Distillation: what a teacher says of each trained token, beside the token that is there.

Invariant: sums over trained tokens, as of sft. The loss is (1 - kd_ratio) * nll + kd_ratio * temperature^2 * kl.
"""

import torch
from torch import Tensor, nn

from shardbook.data.loader import MicroBatch
from shardbook.data.tokenized import Totals
from shardbook.recipe import Distill

NLL_AND_KL = ("nll", "kl")  # the metrics


def distill_shares(of: Distill, model: nn.Module, micro: MicroBatch, totals: Totals) -> Tensor:
    """Shares of the loss and of NLL_AND_KL, of which the second is at the temperature, not times its square."""
    sums: Tensor = model(*micro.inputs, distill=of)
    return torch.cat([sums[:1], sums[1:].detach()]) / totals.tokens
