"""The loss of a reward model, which learns a score of an answer from pairs (Bradley-Terry; Ouyang et al., arXiv
2203.02155, section 3.5, equation 1). Names are TRL's."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardbook.data.loader import MicroBatch
from shardbook.data.tokenized import Totals
from shardbook.objectives.slices import SumSlices, of_one_slice

METRICS = ("accuracy", "margin", "mean_reward")


def reward_terms(model: nn.Module, micro: MicroBatch, totals: Totals, sum_slices: SumSlices = of_one_slice) -> Tensor:
    """Returns the terms of the loss and of METRICS, over the pairs of the step. A sequence's score is read at its last
    token, as transformers' sequence classification reads it; a slice without that token adds zero."""
    ends = micro.ends
    assert ends is not None, "rows hold no sequences"
    scores: Tensor = model(replace(micro, positions=ends.clamp(min=0)))
    scores = sum_slices(scores.masked_fill(ends < 0, 0.0)) if micro.trained else scores
    chosen, rejected = scores[0::2], scores[1::2]
    margins = chosen - rejected
    shown = margins.detach()
    metrics = -F.logsigmoid(margins), (shown > 0).float(), shown, (chosen + rejected).detach() / 2
    return torch.stack([each.sum() / totals.examples for each in metrics])
