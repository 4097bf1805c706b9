"""Clipping of gradients, and their norm over all ranks.

Invariant: the norm is that of the full gradient, the same on every rank and in every layout.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardbook.comm.torch_private import norms_of, scale_together
from shardbook.local_tensors import local_values
from shardbook.parallel.units import PartParameters

CHUNK = 2**20  # elements of a tensor that are summed at once: a CPU copies as many to fp64


class Clips(Protocol):
    """An optimizer that holds the gradients itself, as an offloaded one does, and scales them when it uses them."""

    def clip(self, max_norm: float) -> Tensor: ...


@torch.no_grad()
def clip_gradients(parameters: "Iterable[nn.Parameter] | Clips", max_norm: float) -> Tensor:
    """Scales the gradients of `parameters` so that their norm is at most `max_norm` (0: does not scale). Returns the
    norm before, an fp32 scalar on their device, without a host sync. Collective."""
    if not isinstance(parameters, Iterable):
        return parameters.clip(max_norm)
    parameters = parameters if isinstance(parameters, PartParameters) else [*parameters]  # an iterator is read twice
    norm, gradients = parameters_norm(parameters), [p.grad for p in parameters if p.grad is not None]
    if max_norm and gradients:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        scale_together([local_values(gradient) for gradient in gradients], scale)
    return norm


def parameters_norm(parameters: Iterable[nn.Parameter], known: Mapping[nn.Parameter, Tensor] | None = None) -> Tensor:
    """Returns the `gradient_norm` of `parameters`, and of those of which they are a part. `known`: by parameter.
    Collective."""
    part = parameters if isinstance(parameters, PartParameters) else None
    counted_elsewhere = set(part.tied) if part else ()
    gradients = {p: p.grad for p in parameters if p.grad is not None and p not in counted_elsewhere}
    squares = [known[p] for p in gradients] if known is not None else None
    return gradient_norm([*gradients.values()], known=squares, group=part.group if part else None)


def gradient_norm(
    gradients: list[Tensor], known: list[Tensor] | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Returns the 2-norm of all gradients together, sharded or not, as an fp32 scalar, the same on every rank. `known`:
    their sums of squares in fp64, where these were computed already; `group`: the ranks that have other layers.
    Collective.

    It is summed in fp64: in fp32 a tensor of 28M elements already has another norm whole than in halves (1.4e-5 on
    SmolLM2), so that clipping would differ between layouts.
    """
    pieces: dict[Any, list[Tensor]] = {}
    for number, gradient in enumerate(gradients):
        where, local = None, gradient
        if isinstance(gradient, DTensor):
            where, local = (gradient.device_mesh, gradient.placements), gradient.to_local()
        pieces.setdefault(where, []).append(known[number] if known else local)
    squares = {where: torch.stack(parts) if known else squares_of(parts) for where, parts in pieces.items()}
    device = next((parts.device for parts in squares.values()), None)
    # Sums by the ranks that they are to be added over, outermost axis first; along axes that replicate they are equal
    # already. Not is_shard: for a dim that is sharded twice, torch's placement returns False. Not by groups: torch
    # takes meshes of the same ranks for one mesh, and returns the groups of either.
    sums: dict[tuple[tuple[int, ...], ...], Tensor] = {(): torch.zeros((), dtype=torch.float64, device=device)}
    group_of: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for where, parts in squares.items():
        shared: tuple[tuple[int, ...], ...] = ()
        if where is not None:
            mesh, placements = where
            dims = [dim for dim, placed in enumerate(placements) if not placed.is_replicate() and mesh.size(dim) > 1]
            groups = [mesh.get_group(dim) for dim in dims]
            shared = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
            group_of |= dict(zip(shared, groups, strict=True))
        sums[shared] = sums.get(shared, 0) + parts.sum()
    while len(sums) > 1:
        inner = max(sums, key=len)
        part = sums.pop(inner)
        dist.all_reduce(part, group=group_of[inner[-1]])
        sums[inner[:-1]] = sums.get(inner[:-1], 0) + part
    if group is not None:
        dist.all_reduce(sums[()], group=group)
    return sums[()].sqrt().float()


def squares_of(parts: list[Tensor]) -> Tensor:
    """Returns the sums of squares of the chunks of `parts`, which lie on one device, in fp64, in few launches."""
    chunks = [chunk for part in parts for chunk in part.flatten().split(CHUNK)]
    return torch.stack(norms_of(chunks, torch.float64)).square()
