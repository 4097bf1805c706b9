"""Dispatch: a token goes once to each rank along ep that has some of its experts, and one sum of theirs comes back.

A row a rank in place of a row an expert: of 128 experts and eight choices on eight ranks that is 5.3 rows, on two 2.0.
A router's weights travel beside, 8 bytes a choice, so that the rank of the experts adds up what is weighted, and their
gradients come back. Invariant: rows are added up in a fixed order, without atomics, so sums are deterministic; and the
host waits for the device once, where it reads the counts.
"""

from math import comb
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardbook.comm.collectives import RanksOfTokens, all_to_all
from shardbook.comm.torch_private import has_values
from shardbook.model.expert_products import count_rows, sort_by_expert

COUNT_BYTES = 8  # of the number of an expert's choices, and of a rank's tokens
CHOICE_BYTES = 8  # of a choice: the place of its token among those that are sent to its rank, and its weight
WEIGHT_BYTES = 4  # of the gradient of a choice's weight


class Splits(NamedTuple):
    """Splits count the rows that a rank sends to each rank along ep, and receives from each: tokens, and choices of
    experts."""

    tokens_sent: list[int]
    tokens_received: list[int]
    choices_sent: list[int]
    choices_received: list[int]


class Segments(NamedTuple):
    """Segments say which rows belong together: the copies of a token, or its choices."""

    ids: Tensor  # [rows]: the segment of each row
    order: Tensor  # [rows]: the rows, those of the first segment first
    starts: Tensor  # [segments]: where in `order` each one's begin


class Routing(NamedTuple):
    """A routing says where the tokens of a forward go, and which experts they chose."""

    splits: Splits
    copies: Segments  # of the rows that this rank sends: whose copy each is
    order: Tensor  # [choices]: this rank's choices, by expert
    inverse: Tensor  # and its inverse
    places: Tensor  # int32 [choices], by expert: the place of its token among those that are sent to its rank
    local_ids: Tensor  # [choices received]: which of this rank's experts each is
    starts: Tensor  # [choices received]: where the tokens of the rank that sent it begin among those received


def make_segments(ids: Tensor, count: int) -> Segments:
    """Returns the segments of rows whose segments are `ids` [rows], of so many."""
    in_order, order = ids.sort(stable=True)
    return Segments(ids, order, torch.searchsorted(in_order, torch.arange(count, device=ids.device)))


def sum_segments(rows: Tensor, segments: Segments) -> Tensor:
    """Returns the sum of the `rows` [rows, D] of each segment, [segments, D], added in fp32 in their order."""
    if not len(rows):
        return rows.new_zeros(len(segments.starts), rows.shape[1])
    # the kernel of a bag of embeddings: one thread adds a number of all rows of a bag
    return F.embedding_bag(segments.order, rows, segments.starts, mode="sum")


class CopyRows(torch.autograd.Function):
    """Takes tokens [segments, D] to the rows [rows, D] of their segments. Backward is `SumRows`."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, *segments: Tensor) -> Tensor:
        ctx.save_for_backward(*segments)
        return tokens[segments[0]]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return sum_segments(grad_output, Segments(*ctx.saved_tensors)), None, None, None


class SumRows(torch.autograd.Function):
    """Takes rows [rows, D] to the sums [segments, D] of their segments. Backward is `CopyRows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *segments: Tensor) -> Tensor:
        ctx.save_for_backward(segments[0])
        return sum_segments(rows, Segments(*segments))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        return grad_output[ids], None, None, None


class ExchangeChoices(torch.autograd.Function):
    """Sends `weights` fp32 [choices sent] and `places` int32 [choices sent] to the ranks of their experts, in one
    exchange. Backward sends the gradients of weights the other way."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, places: Tensor, splits: Splits, ranks: RanksOfTokens) -> Any:
        ctx.set_materialize_grads(False)  # places have none
        ctx.splits, ctx.ranks = splits, ranks
        both = torch.stack([places, weights.view(torch.int32)], 1)
        received = all_to_all(both, splits.choices_sent, splits.choices_received, ranks)
        places = received[:, 0].long()
        ctx.mark_non_differentiable(places)
        return received[:, 1].contiguous().view(torch.float32), places

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor, _: Any) -> Any:
        sent, received = ctx.splits.choices_sent, ctx.splits.choices_received
        return all_to_all(grad_weights, received, sent, ctx.ranks), None, None, None


def route(ids: Tensor, experts: int, ranks: RanksOfTokens, load: float) -> Routing:
    """Returns where tokens go that chose the experts `ids` [tokens, chosen], of so many in a block. `load`: of tensors
    without values, `plan_splits`'s. Collective along ep; it waits for the device once, for the numbers of rows."""
    (tokens, chosen), each = ids.shape, experts // ranks.size
    flat = ids.flatten()
    order, inverse = sort_by_expert(flat)  # which is by rank
    is_sent = flat.new_zeros(tokens, ranks.size).scatter_(1, ids // each, 1)
    places = (is_sent.cumsum(0) - 1)[order // chosen, flat[order] // each]
    counts = torch.cat([count_rows(flat, experts).view(-1, each), is_sent.sum(0)[:, None]], 1)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=ranks.process_group)
    # copies by rank, in the order of tokens, and behind them the pairs of a rank and a token that are none
    by_rank = (1 - is_sent).to(torch.uint8).T.flatten().argsort(stable=True)  # asked for before the host waits
    of_ranks = [of for both in (counts, received) for of in (both[:, -1], both[:, :-1].sum(1))]
    if has_values(counts):
        tokens_sent, choices_sent, tokens_received, choices_received = torch.stack(of_ranks).tolist()
        splits = Splits(tokens_sent, tokens_received, choices_sent, choices_received)
    else:
        splits = plan_splits(tokens, chosen, experts, ranks.size, load)
    rows, of_tokens = sum(splits.choices_received), received[:, -1]
    local_ids = torch.arange(each, device=ids.device).repeat(ranks.size)
    return Routing(
        splits,
        make_segments(by_rank[: sum(splits.tokens_sent)] % tokens, tokens),
        order,
        inverse,
        places.to(torch.int32),
        local_ids.repeat_interleave(received[:, :-1].flatten(), output_size=rows),
        (of_tokens.cumsum(0) - of_tokens).repeat_interleave(of_ranks[3], output_size=rows),
    )


def mean_ranks(experts: int, ranks: int, chosen: int) -> float:
    """Returns to how many of `ranks` a token goes on average that chooses so many of a block's `experts` at random."""
    return ranks * (1 - comb(experts - experts // ranks, chosen) / comb(experts, chosen))


def plan_splits(tokens: int, chosen: int, experts: int, ranks: int, load: float) -> Splits:
    """Returns the splits of so many tokens of each of `ranks` where each expert is chosen as often, but this rank's
    `load` times that."""

    def split(rows: int) -> list[int]:
        part, more = divmod(rows, ranks)
        return [part + (rank < more) for rank in range(ranks)]

    copies = round(tokens * mean_ranks(experts, ranks, chosen))
    received = min(ranks * tokens, round(load * copies))
    return Splits(split(copies), split(received), split(tokens * chosen), split(round(load * tokens * chosen)))
