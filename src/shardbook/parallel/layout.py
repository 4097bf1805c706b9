"""The layout: how a run lies on its ranks, as one frozen value, which all read that apply, count, print or predict.

Invariant: built without a process group, from what was asked for, a model's shapes (it may lie on the meta device) and
a number of ranks, so a laptop has the layout of a cluster. A later axis is one more size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from shardbook.axes import CP, DATA_AXES, DP_REPLICATE, DP_SHARD, PP, PP_BACKWARD, PP_ENDS, PP_FORWARD, TP
from shardbook.comm.collectives import ZeroppSwitches
from shardbook.parallel.mesh import (
    DataRank,
    axis_groups,
    fold_sizes,
    rank_along,
    ranks_along,
    resolve_sizes,
    unfold_sizes,
)
from shardbook.parallel.schedule import Pipeline
from shardbook.parallel.switches import read_switches
from shardbook.parallel.units import Unit, backward_order, choose_units
from shardbook.recipe import Offload, Parallel, Precision, RecipeError, Stage, find_stage

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # by the names that a recipe has for them
ON_DEVICE, WHOLE_MODEL = Offload(), Pipeline()
BUCKET_BYTES = 25 * 2**20  # torch DDP's bucket_cap_mb: a sum of less takes its latency, not its bytes


@dataclass(frozen=True)
class Layout:
    """Stage, mesh axes, units, dtypes and ZeRO++'s switches of a run, and how many of its ranks share a node.

    Ranks are numbered within it, from 0, the last axis fastest: those of a run are the global ones.
    """

    stage: Stage
    sizes: dict[str, int]  # of every mesh axis that parameters lie on, outermost first
    units: tuple[Unit, ...]  # of this rank, in forward order, the root last; of several chunks one after another
    parallel: Parallel  # the knobs between the table's rows: prefetch, wrap
    precision: Precision  # without `auto`
    switches: ZeroppSwitches
    ranks_per_node: int
    offload: Offload = ON_DEVICE  # where what is kept lies
    teacher: Any = None  # config of the model that runs beside, forward only
    context: int = 1  # ranks that split rows (context.py): a part of those that hold parts, or copies, of the model
    pipeline: Pipeline = WHOLE_MODEL  # the layers that this rank has, where others have others
    chunk_units: tuple[int, ...] = ()  # of each chunk of layers, how many units are its own; empty: there is one

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    @property
    def mesh(self) -> dict[str, int]:
        """The size of every axis, for people: of the data's, and of cp beside them."""
        return unfold_sizes(self.sizes, self.stage.shards, self.context)

    @property
    def context_axis(self) -> str:
        """What traffic along cp goes by: the name of the axis that it is a part of, where it is all of that."""
        joined = DP_SHARD if self.stage.shards else DP_REPLICATE
        return joined if self.sizes[joined] == self.context else CP

    @property
    def shards(self) -> int:
        """Ranks that split one copy."""
        return self.sizes[DP_SHARD]

    @property
    def replicas(self) -> int:
        """Ranks that hold copies of each other."""
        return self.sizes[DP_REPLICATE]

    @property
    def alike(self) -> int:
        """Ranks that see the same tokens: they share the model's matrices (tensor.py), of which units have this rank's
        parts."""
        return self.sizes.get(TP, 1)

    @property
    def shared(self) -> dict[str, int]:
        """Ranks that have one micro-batch together, by axis: its matrices, rows or layers."""
        return {TP: self.alike, CP: self.context, PP: self.pipeline.ranks}

    def dtype(self, what: Literal["params", "reduce", "output", "master"]) -> torch.dtype:
        """Of gathered parameters and compute; of gradients on the wire and their sum; of what the model returns; of
        parameters at rest, reduced gradients and optimizer state."""
        return DTYPES[getattr(self.precision, what)]

    @property
    def copies(self) -> bool:
        """Whether ranks hold the whole model on their devices (copies.py): nothing is gathered, nothing away."""
        return self.shards == 1 and self.alike == 1 and self.offload.optimizer == "none"

    @cached_property
    def casts(self) -> bool:
        """Whether a parameter lies at rest in another dtype than it computes in."""
        return any(unit.cast_numel(self.dtype("params").itemsize) for unit in self.units)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of the sums of gradients that a rank holds through a step where one shard is all (copies.py): what it sends,
        or what they are kept in, where it sends and casts nothing or its stage would reduce at each micro-batch."""
        sends = self.replicas > 1 or (self.casts and not self.stage.reduce_every_micro)
        return self.dtype("reduce" if sends else "master")

    @cached_property
    def buckets(self) -> list[list[Unit]]:
        """Returns the units whose gradients one all-reduce sums over replicas, where one shard is all, in the order in
        which they are sent. Neighbours that are small are joined; one above BUCKET_BYTES is alone, and where nothing
        is sent every one."""
        joined, room = list[list[Unit]](), 0
        for unit in sorted(backward_order(self.units), key=lambda unit: unit.spans):
            if not (size := unit.padded_numel(1, trained_only=True) * self.sum_dtype.itemsize):
                continue
            if joined and size <= room:
                joined[-1].append(unit)
                room -= size
            else:
                joined.append([unit])
                room = (BUCKET_BYTES - size) * (self.replicas > 1)
        return joined

    @property
    def forward_prefetch(self) -> int:
        """Units gathered ahead of the running one in forward."""
        return max(0, self.parallel.forward_prefetch)

    @property
    def backward_prefetch(self) -> int:
        """Units gathered ahead in backward: what was asked for, else one where the stage gathers there at all."""
        asked = self.parallel.backward_prefetch
        return asked if asked >= 0 else int(self.stage.reshard_after_forward)

    @property
    def hops(self) -> list[tuple[str, int, int]]:
        """qgZ's exchanges, in order: mesh axis, ranks along it, bits."""
        return self.switches.hops(self.shards)

    @property
    def uncut_numel(self) -> int:
        """Elements whose gradients are summed over the ranks that share matrices, of this rank's shards, padded."""
        return sum(unit.uncut_numel(self.shards) for unit in self.units) * (self.alike > 1)

    @property
    def chunks(self) -> "list[Layout]":
        """Of each chunk of layers, whose units are gathered and reduced by themselves."""
        if len(self.chunk_units) < 2:
            return [self]
        starts = [sum(self.chunk_units[:number]) for number in range(len(self.chunk_units))]
        parts = [self.units[start : start + count] for start, count in zip(starts, self.chunk_units, strict=True)]
        return [replace(self, units=units, chunk_units=()) for units in parts]

    def blocks(self, whole: int) -> list[int]:
        """Which of a model's `whole` blocks this rank has."""
        own = self.pipeline
        chunks = [own.own_layers(chunk) for chunk in range(own.chunks)] if own.layers else [range(whole)]
        return [number for chunk in chunks for number in chunk]

    def residual_numel(self, unit: Unit) -> int:
        """Elements that error feedback keeps on a rank for `unit`: what its last exchange sends."""
        if not (self.switches.error_feedback and self.switches.quantizes(unit.numel) and self.hops):
            return 0
        earlier = prod(ranks for _, ranks, _ in self.hops[:-1])
        return unit.padded_numel(self.shards, trained_only=True) // earlier

    def data_rank(self, rank: int) -> DataRank:
        number, count = 0, 1
        for axis in DATA_AXES:
            number, count = number * self.sizes[axis] + rank_along(self.sizes, axis, rank), count * self.sizes[axis]
        number, place = divmod(number, self.context)
        return DataRank(number, count // self.context, self.alike, place, self.context, self.pipeline.ranks)

    def groups(self, rank: int) -> dict[str, list[int]]:
        """The ranks that `rank` talks to along each axis."""
        groups = axis_groups(self.sizes, rank, self.switches.inside)
        groups |= {CP: ranks_along(self.mesh, CP, rank)} if self.context > 1 else {}
        return groups | (pipeline_groups(groups[PP], rank) if PP in groups else {})


def build_layout(
    parallel: Parallel,
    precision: Precision,
    model: nn.Module,
    parts: Sequence[Sequence[nn.Module]],
    blocks: Sequence[nn.Module],
    world_size: int,
    ranks_per_node: int,
    offload: Offload = ON_DEVICE,
) -> Layout:
    """The layout of `model` over `world_size` ranks, `ranks_per_node` of them on each node. `parts`: groups of modules
    to gather together, in forward order; `blocks`: those of them that are blocks (see choose_units).

    `parallel` is of a recipe that loaded, or went through `check_parallel`. Raises RecipeError where what is asked for
    fits neither the ranks nor the model.
    """
    stage = find_stage(parallel.stage)
    sizes = fold_sizes(resolve_sizes(parallel, stage.axes, world_size), stage.shards)
    switches = read_switches(parallel, sizes[DP_SHARD], ranks_per_node)
    views: Any = getattr(model, "chunks", None) or [model]
    own = [(parts, blocks)] if len(views) == 1 else [(view.parts, view.blocks) for view in views]
    chunks = [
        choose_units(view, *each, stage.reshard_after_forward, parallel) for view, each in zip(views, own, strict=True)
    ]
    units = tuple(unit for chunk in chunks for unit in chunk)
    largest = max(unit.numel for unit in units)
    if (switches.weights_bits or switches.gradients_bits) and not switches.quantizes(largest):
        raise RecipeError(
            f"parallel.quantize_min_params = {switches.min_params}: leaves every unit unquantised (the largest has "
            f"{largest:,} parameters); must be less"
        )
    beside = getattr(getattr(model, "teacher", None), "config", None)
    found = (stage, sizes, units, parallel, precision, switches, ranks_per_node, offload, beside, parallel.cp_size)
    return Layout(*found, getattr(model, "pipeline", WHOLE_MODEL), tuple(map(len, chunks)))


def pipeline_groups(along: list[int], rank: int) -> dict[str, list[int]]:
    """Of the ranks `along` pp, those that `rank` sends activations to, and gradients, and its ends; itself first. The
    last stage of a chunk of layers is followed by the first of the next."""
    place = along.index(rank)
    following, before = along[(place + 1) % len(along)], along[place - 1]
    return {PP_ENDS: [along[0], along[-1]], PP_FORWARD: [rank, following], PP_BACKWARD: [rank, before]}
