"""The device mesh: how many ranks each axis has, and which of them talk to each other. (The names: axes.py.)

Invariant: the product of the axes is the world size. All but building the mesh is arithmetic of sizes, so it needs no
process group. Ranks along cp split rows, and shard or replicate parameters like data-parallel ranks: cp is a part of
the axis that parameters lie on, as ZeRO++'s nodes are. `fold_sizes` returns the axes that parameters lie on.
"""

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from shardbook.axes import (
    ACROSS,
    CP,
    DATA_AXES,
    DP_REPLICATE,
    DP_SHARD,
    EP,
    INSIDE,
    OF_EXPERTS,
    PP,
    PP_BACKWARD,
    PP_ENDS,
    PP_FORWARD,
    TP,
    ranks_along,
)
from shardbook.recipe import Parallel, RecipeError

if TYPE_CHECKING:  # a launcher resolves sizes, and starts its ranks before it would have imported torch
    from torch.distributed.device_mesh import DeviceMesh


def resolve_sizes(parallel: Parallel, free_axes: tuple[str, ...], world_size: int | None) -> dict[str, int]:
    """Returns the size of every axis, in order; of pp, cp and tp only where it is more than 1. `free_axes`: the axes
    that the stage may make larger than 1. At most one of them is -1, and is inferred from `world_size`; with
    `world_size` None it stays -1. Raises RecipeError."""
    sizes = {axis: getattr(parallel, f"{axis}_size") if axis in free_axes else 1 for axis in DATA_AXES}
    sizes |= {axis: size for axis, size in ((CP, parallel.cp_size), (TP, parallel.tp_size)) if size > 1}
    sizes = {PP: parallel.pp_size} | sizes if parallel.pp_size > 1 else sizes
    inferred = [axis for axis, size in sizes.items() if size == -1]
    if world_size is None:
        return sizes
    fixed = prod(size for size in sizes.values() if size != -1)
    if inferred:
        if world_size % fixed:
            sizes_that_fit = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
            given = ", ".join(f"parallel.{axis}_size = {size}" for axis, size in sizes.items() if size > 1)
            raise RecipeError(
                f"{given}: {fixed} does not divide the world of {world_size} ranks; "
                f"it may be {sizes_that_fit}, or start a multiple of {fixed} ranks"
            )
        sizes[inferred[0]] = world_size // fixed
    elif fixed != world_size:
        needs = f"mesh {describe_sizes(sizes)} needs {fixed} ranks, the world has {world_size}"
        raise RecipeError(f"{needs}: start {fixed} ranks, or set parallel.{free_axes[-1]}_size=-1")
    return sizes


class DataRank(NamedTuple):
    """A rank's numbers among the ranks that read data: they decide which rows it sees (data/loader.py), and which slice
    of each."""

    dp_rank: int = 0  # its number among the ranks that see different rows
    dp_size: int = 1
    tp_size: int = 1  # these ranks see the same tokens and compute the same loss
    cp_rank: int = 0  # the number of its slice of each row's tokens
    cp_size: int = 1
    pp_size: int = 1  # ranks of every stage see the same tokens, only the last computes the loss

    @property
    def copies(self) -> int:
        """Returns the number of ranks that see the same tokens: tp x pp."""
        return self.tp_size * self.pp_size

    @property
    def row_ranks(self) -> int:
        """Returns the number of ranks that share each row: tp x cp (Parallel.row_ranks)."""
        return self.tp_size * self.cp_size

    @property
    def slice_of_rows(self) -> tuple[int, int]:
        """Returns the number of the slice of each row that this rank sees, and how many slices a row has."""
        return self.cp_rank, self.cp_size


def fold_sizes(sizes: dict[str, int], shards: bool) -> dict[str, int]:
    """Returns the sizes of the axes on which parameters lie: cp becomes a part of dp_shard or, where the stage does not
    shard (`shards`), of dp_replicate."""
    joined = DP_SHARD if shards else DP_REPLICATE
    folded = sizes | {joined: sizes[joined] * sizes.get(CP, 1)}
    return {axis: size for axis, size in folded.items() if axis != CP}


def unfold_sizes(sizes: dict[str, int], shards: bool, context: int) -> dict[str, int]:
    """Returns the inverse of `fold_sizes`, for `context` ranks along cp."""
    if context == 1:
        return sizes
    joined = DP_SHARD if shards else DP_REPLICATE
    every = sizes | {joined: sizes[joined] // context, CP: context}
    return {axis: every[axis] for axis in (PP, *DATA_AXES, CP, TP) if axis in every}


def expert_sizes(sizes: dict[str, int], shards: bool, ep_size: int) -> dict[str, int]:
    """Returns the sizes of the axes on which experts lie, over the same ranks as `sizes`: ep is the innermost part of
    dp_shard or, where the stage does not shard (`shards`), of dp_replicate; dp_shard and dp_replicate are the rest.
    Raises RecipeError where `ep_size` does not divide that axis."""
    split = DP_SHARD if shards else DP_REPLICATE
    if sizes[split] % ep_size:
        fits = ", ".join(str(size) for size in range(1, sizes[split] + 1) if sizes[split] % size == 0)
        raise RecipeError(
            f"parallel.ep_size = {ep_size}: does not divide the {sizes[split]} ranks of {split}; it may be {fits}"
        )
    return sizes | {split: sizes[split] // ep_size, EP: ep_size}


def axes_of_experts(groups: dict[str, list[int]]) -> dict[str, str]:
    """Returns, by axis of the mesh on which experts lie, the axis under which its traffic is counted: the first of
    `groups` that joins the same ranks."""
    first = {tuple(ranks): axis for axis, ranks in reversed(groups.items())}
    return {axis: first[tuple(groups[name])] for axis, name in OF_EXPERTS.items()}


def describe_sizes(sizes: dict[str, int]) -> str:
    """Returns `sizes` in words, such as `dp_replicate 2 x dp_shard 4`."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def build_mesh(sizes: dict[str, int], device_type: str) -> "DeviceMesh":
    """Returns the mesh over all ranks with every axis of `sizes`, axes of size 1 too. Collective.

    The last axis counts fastest. Eight ranks as dp_replicate 2 x dp_shard 2 x tp 2:

                          dp_shard 0     dp_shard 1     ranks that differ along one axis alone talk to each other:
        dp_replicate 0    ranks 0 1      ranks 2 3      tp 01 23 45 67, dp_shard 02 13 46 57,
        dp_replicate 1    ranks 4 5      ranks 6 7      dp_replicate 04 15 26 37
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def build_node_mesh(mesh: "DeviceMesh", inside: int) -> "DeviceMesh":
    """Returns `mesh` with dp_shard split into nodes of `inside` ranks."""
    return regroup_mesh(mesh, split_sizes(axis_sizes(mesh), inside))


def regroup_mesh(mesh: "DeviceMesh", sizes: dict[str, int]) -> "DeviceMesh":
    """Returns a mesh over the ranks of `mesh`, in their order, with the axes of `sizes`. Collective."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(mesh.device_type, mesh.mesh.view(tuple(sizes.values())), mesh_dim_names=tuple(sizes))


def split_sizes(sizes: dict[str, int], inside: int) -> dict[str, int]:
    return {DP_REPLICATE: sizes[DP_REPLICATE], ACROSS: sizes[DP_SHARD] // inside, INSIDE: inside}


def axis_sizes(mesh: "DeviceMesh") -> dict[str, int]:
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def axis_groups(sizes: dict[str, int], rank: int, inside: int) -> dict[str, list[int]]:
    """Returns the global ranks that `rank` talks to along each axis, and in parts of dp_shard where it spans nodes."""
    groups = {axis: ranks_along(sizes, axis, rank) for axis in sizes}
    if 1 < inside < sizes[DP_SHARD]:
        groups |= {axis: ranks_along(split_sizes(sizes, inside), axis, rank) for axis in (INSIDE, ACROSS)}
    return groups


def pipeline_groups(along: list[int], rank: int) -> dict[str, list[int]]:
    """Returns, of the ranks `along` pp, the two ends; `rank` and the rank that it sends activations to; `rank` and the
    rank that it sends gradients to. The first rank follows the last: it goes on with the next chunk of layers."""
    pp_rank = along.index(rank)
    following, before = along[(pp_rank + 1) % len(along)], along[pp_rank - 1]
    return {PP_ENDS: [along[0], along[-1]], PP_FORWARD: [rank, following], PP_BACKWARD: [rank, before]}
