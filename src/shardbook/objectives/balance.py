"""Balance of experts: the auxiliary loss of a micro-batch of all ranks, and metrics of its routers.

transformers' `load_balancing_loss_func` (Switch Transformer, Fedus et al., arXiv 2101.03961, equations 4 to 6): for E
experts, n tokens in each of l layers, C[e] tokens that chose expert e and S[e] the sum of its probabilities, both over
all layers, it is E * sum_e(C[e] / (l n) * S[e] / (l n)). Invariant: C and n are of all ranks, and padding is not in
them, so a step has the value of one process. A rank adds the share of its own S, through which alone a gradient flows;
a micro-batch counts by its share of the step's trained tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.data.loader import MicroBatch
from shardbook.data.tokenized import Totals
from shardbook.model.flops import experts_per_token
from shardbook.model.routers import BALANCE_NUMBERS

METRICS = ("router_aux_loss", "router_entropy")


class Balance(NamedTuple):
    """A rank's shares of what a step logs of its routers, fp32 scalars."""

    aux_loss: Tensor  # has the gradient
    entropy: Tensor  # of a token's probabilities, in nats, as the mean over tokens and layers


def measure_balance(router_logits: Sequence[Tensor], micro: MicroBatch, totals: Totals, chosen: int) -> Balance:
    """Returns a rank's shares of the balance of `micro`, from the logits [tokens, experts] of each layer; a token goes
    to `chosen` experts. Collective of all ranks."""
    assert micro.is_token is not None, "nothing says which tokens are padding"
    is_token, trained = micro.is_token.flatten().float(), sum(micro.trained)
    weights = is_token.repeat_interleave(chosen)
    sums, counts, entropy = list[Tensor](), list[Tensor](), is_token.new_zeros(())
    for logits in router_logits:
        probabilities = logits.flatten(0, -2).float().softmax(-1)
        sums.append(is_token @ probabilities)
        with torch.no_grad():
            ids = probabilities.topk(chosen).indices.flatten()
            counts.append(torch.zeros_like(probabilities[0]).scatter_add_(0, ids, weights))
            entropy += torch.special.entr(probabilities).sum(-1) @ is_token
    with torch.no_grad():
        layers, experts = len(counts), len(counts[0])
        summed = torch.cat([*counts, torch.stack([is_token.sum(), is_token.new_full((), float(trained))])])
        if dist.is_initialized():
            dist.all_reduce(summed)  # looked up at each call: the ledger replaces it while it is open
        tokens, share = summed[-BALANCE_NUMBERS].clamp(min=1), summed[-1] / totals.tokens
        of_experts = summed[:-BALANCE_NUMBERS].view(layers, experts).sum(0)
    aux_loss = share * experts * (of_experts @ sum(sums)) / (layers * tokens) ** 2
    return Balance(aux_loss, share * entropy / (layers * tokens))


def balanced_terms(coefficient: float, model: Any, micro: MicroBatch, totals: Totals) -> Tensor:
    """Returns the terms of supervised fine-tuning with an auxiliary loss, [1 + METRICS]. Without a gradient, as in an
    evaluation, the loss is that of the tokens alone."""
    negative_log_likelihood, router_logits = model(micro, with_routers=True)
    balance = measure_balance(router_logits, micro, totals, experts_per_token(model.config))
    loss = negative_log_likelihood / totals.tokens
    if torch.is_grad_enabled():
        loss = loss + coefficient * balance.aux_loss
    return torch.stack([loss, *(each.detach() for each in balance)])
