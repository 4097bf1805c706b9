"""Objectives: each takes the model, a micro-batch and the counts of the whole step, and returns terms of the loss.

Invariant: the terms of all micro-batches of all ranks add up to the value of the step, however it was split: each is a
SUM over tokens or examples, divided by the number of these in the whole step. Never a mean of means.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shardbook.data.loader import MicroBatch
from shardbook.data.tokenized import Totals
from shardbook.objectives.balance import METRICS as OF_ROUTERS
from shardbook.objectives.balance import balanced_terms
from shardbook.objectives.distill import NLL_AND_KL, distill_terms
from shardbook.objectives.preference import METRICS, preference_terms
from shardbook.objectives.reward import METRICS as OF_REWARDS
from shardbook.objectives.reward import reward_terms
from shardbook.objectives.sft import sft_terms
from shardbook.objectives.slices import SumSlices, of_one_slice
from shardbook.recipe import Distill, Preference


@dataclass(frozen=True)
class Objective:
    """A loss. `terms` returns [1 + metrics] fp32: the loss, which alone has a gradient, then the metrics, in order."""

    terms: Callable[..., Tensor]  # (model, micro-batch, totals) and, where it is of `sequences`, sum_slices
    metrics: tuple[str, ...] = ()
    reference: bool = False  # micro-batches hold log-probabilities of the model before the first step
    sequences: bool = False  # its terms are of whole sequences, not of tokens

    def with_totals(
        self, totals: Totals, sum_slices: SumSlices = of_one_slice
    ) -> Callable[[nn.Module, MicroBatch], Tensor]:
        """Returns `terms` with the `totals` of a step filled in, and the sum over slices of rows."""
        more = {"sum_slices": sum_slices} if self.sequences else {}
        return partial(self.terms, totals=totals, **more)

    def add_up(self, terms: Iterable[Tensor], device: torch.device) -> Tensor:
        """Returns the sum of the `terms` of micro-batches, [1 + metrics] fp32."""
        sums = torch.zeros(1 + len(self.metrics), device=device)
        for each in terms:
            sums += each
        return sums

    def names(self, what: str) -> list[str]:
        """Returns the names under which terms are logged; `what`: train or eval."""
        return [f"{what}/{name}" for name in ("loss", *self.metrics)]


def build_objective(
    method: str, preference: Preference, teaching: Distill | None = None, router_aux_loss_coef: float = 0.0
) -> Objective:
    """Returns the objective of a recipe's `method`."""
    if method == "sft" and router_aux_loss_coef:
        return Objective(partial(balanced_terms, router_aux_loss_coef), OF_ROUTERS)
    if method == "sft":
        return Objective(sft_terms)
    if method == "reward":
        return Objective(reward_terms, OF_REWARDS, sequences=True)
    if method == "distill":
        return Objective(partial(distill_terms, teaching or Distill()), NLL_AND_KL)
    terms = partial(preference_terms, method, preference)
    return Objective(terms, METRICS, method == "dpo" and preference.precompute_ref_log_probs, sequences=True)
