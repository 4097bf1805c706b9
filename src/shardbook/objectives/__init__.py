"""What is minimised: an objective takes the model, a micro-batch and the counts of the whole step, and returns shares.

Invariant: the shares of all micro-batches of all ranks add up to the value of the step, however it was split: each is a
SUM over tokens or examples, divided by what the step has of these. Never a mean of means.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from shardbook.data.loader import MicroBatch
from shardbook.data.tokenized import Totals
from shardbook.objectives.distill import NLL_AND_KL, distill_shares
from shardbook.objectives.preference import METRICS, preference_shares
from shardbook.objectives.reward import METRICS as OF_REWARDS
from shardbook.objectives.reward import reward_shares
from shardbook.objectives.sft import sft_shares
from shardbook.recipe import Distill, Preference


@dataclass(frozen=True)
class Objective:
    """`shares`: [1 + metrics] fp32, of which the first has the gradient: the loss; then the metrics, in their order."""

    shares: Callable[[nn.Module, MicroBatch, Totals], Tensor]
    metrics: tuple[str, ...] = ()
    reference: bool = False  # whether micro-batches hold what the model says of them before the first step

    def of(self, totals: Totals) -> Callable[[nn.Module, MicroBatch], Tensor]:
        """`shares` of a step that has so many."""
        return lambda model, micro: self.shares(model, micro, totals)

    def names(self, what: str) -> list[str]:
        """What shares are logged as; `what`: train or eval."""
        return [f"{what}/{name}" for name in ("loss", *self.metrics)]


def build_objective(method: str, preference: Preference, teaching: Distill | None = None) -> Objective:
    """The objective of a recipe's `method`."""
    if method == "sft":
        return Objective(sft_shares)
    if method == "reward":
        return Objective(reward_shares, OF_REWARDS)
    if method == "distill":
        return Objective(partial(distill_shares, teaching or Distill()), NLL_AND_KL)
    shares = partial(preference_shares, method, preference)
    return Objective(shares, METRICS, method == "dpo" and preference.precompute_ref_log_probs)
