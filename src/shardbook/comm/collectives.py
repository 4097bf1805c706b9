"""The two collectives that torch 2.13 has renamed, by one name each; both over a batch's tokens, each as the other
one's backward; all-to-alls of rows; and sums over ranks: in forward, in backward, and of what may lie on the host.

Invariant: torch's function is looked up at each call, since the ledger replaces it while it is open.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class RanksOfTokens(Protocol):
    """Ranks each of which has a share of a batch's tokens; `process_group` is set once there is a mesh."""

    size: int
    process_group: dist.ProcessGroup | None


def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Gathers the `shard` [n] of each rank of `group` into `output` [ranks * n]."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch before 2.13
    gather(output, shard, group=group)


def reduce_scatter(output: Tensor, full: Tensor, group: dist.ProcessGroup) -> None:
    """Sums `full` [ranks * n] over the ranks of `group` and leaves this rank's part in `output` [n]."""
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch before 2.13
    reduce(output, full, group=group)


def sum_in_place(tensor: Tensor, group: dist.ProcessGroup, device_type: str) -> None:
    """Sums `tensor` over the ranks of `group`, on their devices of `device_type`. One that lies on a GPU's host is
    copied there and back, over the fast network, and this thread waits for it."""
    on_device = tensor.to(device_type)
    dist.all_reduce(on_device, group=group)
    tensor.copy_(on_device)


def all_gather_tokens(part: Tensor, ranks: RanksOfTokens) -> Tensor:
    """Gathers [1, n, ...] of each rank as [1, size * n, ...], without autograd. Collective."""
    assert ranks.process_group is not None, "there is no mesh yet"
    full = part.new_empty(1, ranks.size * part.shape[1], *part.shape[2:])
    all_gather(full[0], part.contiguous()[0], ranks.process_group)
    return full


def reduce_scatter_tokens(full: Tensor, ranks: RanksOfTokens) -> Tensor:
    """Sums [..., hidden] over ranks, without autograd, and returns this rank's share of the tokens, [1, n, hidden].
    Collective."""
    assert ranks.process_group is not None, "there is no mesh yet"
    tokens = full.shape[:-1].numel()
    part = full.new_empty(1, tokens // ranks.size, full.shape[-1])
    reduce_scatter(part[0], full.contiguous().view(tokens, -1), ranks.process_group)
    return part


class AllGatherTokens(torch.autograd.Function):
    """`all_gather_tokens`, whose backward is `reduce_scatter_tokens`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: RanksOfTokens) -> Tensor:
        ctx.ranks = ranks
        return all_gather_tokens(part, ranks)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return reduce_scatter_tokens(grad_output, ctx.ranks), None


class ReduceScatterTokens(torch.autograd.Function):
    """`reduce_scatter_tokens`, whose backward is `all_gather_tokens`."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, ranks: RanksOfTokens) -> Tensor:
        ctx.ranks, ctx.shape = ranks, full.shape
        return reduce_scatter_tokens(full, ranks)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return all_gather_tokens(grad_output, ctx.ranks).view(ctx.shape), None


class AllToAll(torch.autograd.Function):
    """An all-to-all of rows `sent` [sum of `input_splits`, ...] into [sum of `output_splits`, ...]: splits count the
    rows that are sent to, and received from, each rank. Backward sends gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, sent: Tensor, input_splits: list[int], output_splits: list[int], ranks: RanksOfTokens
    ) -> Tensor:
        ctx.input_splits, ctx.output_splits, ctx.ranks = input_splits, output_splits, ranks
        return all_to_all(sent, input_splits, output_splits, ranks)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return all_to_all(grad_output, ctx.output_splits, ctx.input_splits, ctx.ranks), None, None, None


def all_to_all(sent: Tensor, input_splits: list[int], output_splits: list[int], ranks: RanksOfTokens) -> Tensor:
    """Sends rows as `AllToAll` does, without autograd. Collective."""
    assert ranks.process_group is not None, "there is no mesh yet"
    received = sent.new_empty(1, sum(output_splits), *sent.shape[1:])
    dist.all_to_all_single(received[0], sent.contiguous(), output_splits, input_splits, group=ranks.process_group)
    # a view: torch 2.11's compiler loses the gradient of the very tensor that was written
    return received.view(received.shape[1:])


def all_reduced(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums the `part` that each rank of `group` has, without autograd. Collective."""
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class SumOverRanks(torch.autograd.Function):
    """`all_reduced`, whose backward passes the gradient on as it is: every rank computes the same loss of the sum,
    and goes backward into its own part alone."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduced(part, group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output, None


class SumGradients(torch.autograd.Function):
    """A tensor that the ranks of `group` have alike, and of which each computes something else: its backward is
    `all_reduced`."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return all_reduced(grad_output, ctx.group), None
