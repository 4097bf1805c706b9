"""Context parallel: the tokens of each row split over neighbouring ranks, and inside attention the heads.

DeepSpeed Ulysses (Jacobs et al., arXiv 2309.14509, section 3.1): around attention a rank has its slice of each row and
all heads; inside it all of the row and its share of heads, so the kernel, and what it is told of documents, are as
without. Two all-to-alls forward, two backward. Invariant: ranks of the axis see slices of the same rows, hold parts of
one copy of the model as data-parallel ranks do, and what each makes of the loss is of its own tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardbook.axes import CP
from shardbook.parallel.layout import Layout
from shardbook.parallel.mesh import ranks_along


@dataclass(eq=False)
class ContextAxis:
    """The ranks that split rows, and the place of this one. Attention modules hold it; the group is there when the mesh
    is. Heads of queries are dealt out in their order, `key_heads` may serve several ranks."""

    place: int
    heads: list[int]  # of queries: how many each rank computes
    key_heads: list[list[int]]  # which keys and values each computes with
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.heads)

    @property
    def spread(self) -> list[int]:
        """The heads of keys that are sent, in the order of ranks."""
        return [head for own in self.key_heads for head in own]

    def give_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values [B, heads, L / size, D] of all heads -> [B, heads, L, D] of this rank's."""
        shape = query.shape
        counts = [len(own) for own in self.key_heads]
        parts = [query.transpose(1, 2).split(self.heads, 2)]
        parts += [pick_heads(whole, self.spread).transpose(1, 2).split(counts, 2) for whole in (key, value)]
        own = [self.heads[self.place], counts[self.place], counts[self.place]]
        to = [sum(part.numel() for part in each) for each in zip(*parts, strict=True)]
        sent = torch.cat([torch.cat(each, 2).flatten() for each in zip(*parts, strict=True)])
        got = _Exchange.apply(sent, to, [to[self.place]] * self.size, self)
        got = got.view(self.size, shape[0], shape[2], sum(own), shape[3]).transpose(0, 1).flatten(1, 2)
        return [part.transpose(1, 2) for part in got.split(own, 2)]

    def take_heads(self, made: Tensor) -> Tensor:
        """What attention made of this rank's heads, [B, L, heads, D] -> [B, L / size, heads, D] of all."""
        rows, length, own, dim = made.shape
        each = rows * length // self.size * dim
        sent = made.view(rows, self.size, -1, own, dim).transpose(0, 1).flatten()
        by = [each * heads for heads in self.heads]
        got = _Exchange.apply(sent, [each * own] * self.size, by, self)
        return torch.cat([part.view(rows, length // self.size, -1, dim) for part in got.split(by)], 2)


def pick_heads(whole: Tensor, heads: list[int]) -> Tensor:
    """[B, heads, ...] -> those `heads` of it, by the plainest operations: an index would be sent to the device."""
    if heads == list(range(whole.shape[1])):
        return whole
    return torch.cat([whole[:, head : head + 1] for head in heads], 1)


class _Exchange(torch.autograd.Function):
    """Flat [sum of `to`] -> flat [sum of `by`], elements to and by each rank; backward sends slopes back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, to: list[int], by: list[int], axis: ContextAxis) -> Tensor:
        ctx.to, ctx.by, ctx.axis = to, by, axis
        return exchange(sent, to, by, axis)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        return exchange(slope, ctx.by, ctx.to, ctx.axis), None, None, None


def exchange(sent: Tensor, to: list[int], by: list[int], axis: ContextAxis) -> Tensor:
    assert axis.group is not None, "the axis has no group yet"
    received = sent.new_empty(1, sum(by))
    dist.all_to_all_single(received[0], sent.contiguous(), by, to, group=axis.group)
    return received.view(-1)  # torch 2.11's compiler loses the gradient of the very tensor that was written


def lend_group(model: nn.Module, layout: Layout) -> None:
    """Give what splits rows in `model` its ranks. Collective."""
    if layout.context == 1:
        return
    every = dict.fromkeys(tuple(ranks_along(layout.mesh, CP, rank)) for rank in range(layout.world_size))
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in every])
    for module in model.modules():
        if isinstance(axis := getattr(module, "context", None), ContextAxis):
            axis.group = group
