"""Preference: losses that make the chosen one of two answers to a prompt likelier than the rejected one.

Invariant: a loss is a function of one pair's log-probabilities, the reference's, and its numbers of trained tokens,
never of other pairs, so any split of the same pairs gives the same numbers. Names are TRL's.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from shardbook.data.loader import MicroBatch
from shardbook.data.tokenized import Totals
from shardbook.model.adapters import adapters_off
from shardbook.objectives.slices import SumSlices, of_one_slice
from shardbook.recipe import Preference

METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


class Pairs(NamedTuple):
    """The scores of P pairs, fp32 [P]: each answer's log-probability less the reference's (without a reference: its
    log-probability for each token), and its number of trained tokens."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def delta(self) -> Tensor:
        return self.chosen - self.rejected

    @property
    def delta_of_averages(self) -> Tensor:
        """The difference of the two scores, each divided by its answer's trained tokens."""
        return self.chosen / self.chosen_tokens - self.rejected / self.rejected_tokens


Score = Callable[[Pairs, Preference], Tensor]  # returns the loss of each pair, [P]


def _robust(pairs: Pairs, of: Preference) -> Tensor:
    delta, flipped = of.beta * pairs.delta, of.label_smoothing
    clean = -(1 - flipped) * F.logsigmoid(delta) + flipped * F.logsigmoid(-delta)
    return clean / (1 - 2 * flipped)


def _orpo(pairs: Pairs, of: Preference) -> Tensor:
    """Returns the odds-ratio term; preference_terms adds the likelihood of the chosen answers."""
    odds = pairs.delta - (_log_one_minus_exp(pairs.chosen) - _log_one_minus_exp(pairs.rejected))
    return -of.beta * F.logsigmoid(odds)


def _log_one_minus_exp(value: Tensor) -> Tensor:
    """Returns log(1 - exp(value)) of `value` < 0, exact near 0 and far from it (Maechler, 2012, equation 7)."""
    near = value > -0.6931472
    return torch.where(near, torch.log(-torch.expm1(value)), torch.log1p(-torch.exp(value)))


LOSSES: dict[str, Score] = {
    # DPO, Rafailov et al., arXiv 2305.18290, equation 7
    "sigmoid": lambda pairs, of: -F.logsigmoid(of.beta * pairs.delta),
    # SLiC-HF, Zhao et al., arXiv 2305.10425, equation 1, on DPO's differences
    "hinge": lambda pairs, of: torch.relu(1 - of.beta * pairs.delta),
    # Azar et al., arXiv 2310.12036, equation 17; averaged over tokens, as its authors do
    "ipo": lambda pairs, of: (pairs.delta_of_averages - 1 / (2 * of.beta)) ** 2,
    # DPO averaged over tokens: Lambert et al. (Tülu 3), arXiv 2411.15124, equation 6
    "sigmoid_norm": lambda pairs, of: -F.logsigmoid(of.beta * pairs.delta_of_averages),
    # Chowdhury et al., arXiv 2403.00409, equation 8
    "robust": _robust,
    # APO, D'Oosterlinck et al., arXiv 2408.06266, equations 7 and 8
    "apo_zero": lambda pairs, of: 1 - torch.sigmoid(of.beta * pairs.chosen) + torch.sigmoid(of.beta * pairs.rejected),
    "apo_down": lambda pairs, of: torch.sigmoid(of.beta * pairs.chosen) + 1 - torch.sigmoid(of.beta * pairs.delta),
}
FREE: dict[str, Score] = {  # without a reference: they compare each answer's log-probability for each of its tokens
    # Hong et al., arXiv 2403.07691, equation 6
    "orpo": _orpo,
    # Meng et al., arXiv 2405.14734, equation 6
    "simpo": lambda pairs, of: -F.logsigmoid(of.beta * pairs.delta - of.simpo_gamma),
}


def log_probabilities(
    model: nn.Module, micro: MicroBatch, sum_slices: SumSlices = of_one_slice
) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each sequence's trained tokens and the number of these, both fp32 [sequences].
    Without a sequence nothing is summed over slices."""
    losses, counts = model(micro), micro.counts
    assert counts is not None, "rows hold no pairs"
    if not micro.trained:
        return -losses.float(), counts
    # One row a sequence: so its sum has only its own numbers, and the same bits on a GPU every time.
    return sum_slices(-pad_sequence(losses.float().split(micro.trained), batch_first=True).sum(1)), counts


def preference_terms(
    method: str,
    of: Preference,
    model: nn.Module,
    micro: MicroBatch,
    totals: Totals,
    sum_slices: SumSlices = of_one_slice,
) -> Tensor:
    """Returns the terms of the loss and of METRICS, over the pairs of the step."""
    policy, counts = log_probabilities(model, micro, sum_slices)
    if method in FREE:
        score, scores = FREE[method], policy / counts
    else:
        score, scores = LOSSES[of.loss_type], policy - _reference(of, model, micro, sum_slices)
    pairs = Pairs(scores[0::2], scores[1::2], counts[0::2], counts[1::2])
    loss = score(pairs, of).sum() / totals.examples
    if likelihood := 1.0 if method == "orpo" else of.rpo_alpha:
        loss = loss - likelihood * policy[0::2].sum() / totals.chosen_tokens
    shown = scores.detach() if method in FREE else policy.detach()
    chosen, rejected = (of.beta * scores[side::2].detach() for side in (0, 1))
    metrics = chosen, rejected, (chosen > rejected).float(), chosen - rejected, shown[0::2], shown[1::2]
    return torch.stack([loss, *(each.sum() / totals.examples for each in metrics)])


def _reference(of: Preference, model: nn.Module, micro: MicroBatch, sum_slices: SumSlices) -> Tensor:
    """Returns the reference's log-probabilities: computed before the first step, or by the base without adapters."""
    if micro.reference is not None:
        return micro.reference
    assert not of.precompute_ref_log_probs, "the reference was not computed"
    with torch.no_grad(), adapters_off(model):
        return log_probabilities(model, micro, sum_slices)[0]
