"""The layout: how a run lies on its ranks, as one frozen value, read by all code that applies, counts or predicts it.

Invariant: it is built without a process group, from a recipe's settings, a model's shapes (it may lie on the meta
device) and a number of ranks, so a laptop has the layout of a cluster. A later axis is one more size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from shardbook.arithmetic import ceil_div
from shardbook.axes import CP, DATA_AXES, DP_REPLICATE, DP_SHARD, EP, OF_EXPERTS, PP, TP, WORLD, rank_along, ranks_along
from shardbook.comm.zeropp_collectives import ZeroppSwitches
from shardbook.model.dtypes import DTYPES
from shardbook.model.marks import NOT_STORED
from shardbook.model.weights import file_shapes
from shardbook.parallel.mesh import (
    DataRank,
    axes_of_experts,
    axis_groups,
    expert_sizes,
    fold_sizes,
    pipeline_groups,
    resolve_sizes,
    unfold_sizes,
)
from shardbook.parallel.schedule import Pipeline
from shardbook.parallel.units import Placement, Unit, backward_order, choose_units, place_whole
from shardbook.parallel.zeropp import read_switches
from shardbook.recipe import Offload, Parallel, Precision, Stage, find_stage

ON_DEVICE, WHOLE_MODEL = Offload(), Pipeline()
UNIT_KEYS = ("reshard_min_params", "forward_prefetch", "backward_prefetch")  # what choose_units reads of Parallel


@dataclass(frozen=True)
class Layout:
    """Stage, mesh axes, units, dtypes and ZeRO++'s switches of a run, and how many of its ranks share a node.

    Ranks are numbered within it, from 0, the last axis fastest; in a run these are the global ranks.
    """

    stage: Stage
    sizes: dict[str, int]  # of every mesh axis that parameters lie on, outermost first
    units: tuple[Unit, ...]  # this rank's, chunk of layers after chunk, each in forward order, its root last
    parallel: Parallel  # the knobs between the table's rows: prefetch
    precision: Precision  # without `auto`
    switches: ZeroppSwitches
    ranks_per_node: int
    offload: Offload = ON_DEVICE  # which state lies on the device, on the host or on disk
    teacher: Any = None  # config of the teacher, which runs forward only
    cp_size: int = 1  # context-parallel size (context.py): these ranks are a part of dp_shard or dp_replicate
    pipeline: Pipeline = WHOLE_MODEL  # this rank's pipeline stage and layers
    chunk_units: tuple[int, ...] = ()  # the number of units in each chunk of layers; empty: there is one chunk
    # of every parameter of the whole model by its name, in order, also of those on other ranks
    placements: dict[str, Placement] = field(default_factory=dict)
    experts: int = 0  # of each block that has some, where ranks along ep share them
    expert_width: int = 0  # of the rows that experts take
    chosen_share: float = 1.0  # of these experts a token meets so many
    expert_load: float = 1.0  # of a plan: the rows that this rank's experts receive, as a multiple of the mean
    balanced: tuple[int, ...] = ()  # the experts of each router whose choices an auxiliary loss balances
    counted: tuple[int, ...] = ()  # of each block of the whole model the experts whose choices a run counts
    # the shapes of the whole model's biases of routers, by name (router_bias.py), and by how much a step moves them
    biases: dict[str, list[int]] = field(default_factory=dict)
    bias_update_rate: float = 0.0

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    @property
    def mesh(self) -> dict[str, int]:
        """The size of every axis, to be shown: with cp as an axis of its own."""
        return unfold_sizes(self.sizes, self.stage.shards, self.cp_size)

    @property
    def context_axis(self) -> str:
        """The axis under which traffic along cp is counted: cp, or dp_shard or dp_replicate where cp spans it."""
        joined = DP_SHARD if self.stage.shards else DP_REPLICATE
        return joined if self.sizes[joined] == self.cp_size else CP

    @property
    def axis_of_all(self) -> str:
        """The axis under which traffic of all ranks is counted: one that spans them, where there is such an axis."""
        return next((axis for axis, size in self.sizes.items() if size == self.world_size), WORLD)

    @property
    def shards(self) -> int:
        """The number of ranks that shard one copy of the model."""
        return self.sizes[DP_SHARD]

    @property
    def replicas(self) -> int:
        """The number of copies of the model, each sharded over `shards` ranks."""
        return self.sizes[DP_REPLICATE]

    @property
    def tp_size(self) -> int:
        """The tensor-parallel size: the number of ranks that see the same tokens and shard the model's matrices
        (tensor.py). Units have the shapes of this rank's parts."""
        return self.sizes.get(TP, 1)

    @property
    def ep_size(self) -> int:
        """The expert-parallel size (experts.py): ranks that share a block's experts; units have this rank's."""
        return self.parallel.ep_size

    @property
    def most_expert_load(self) -> float:
        """The most rows that a rank's experts can receive, as a multiple of the mean: where each token of all ranks
        along ep chooses as many of them as it can."""
        return min(self.ep_size, 1 / self.chosen_share)

    @cached_property
    def meshes(self) -> list[dict[str, int]]:
        """The sizes of every mesh over this layout's ranks on which parameters lie; under ep the last one is that of
        experts, with ep, and with what it leaves of dp_replicate and dp_shard."""
        return [self.sizes] + [expert_sizes(self.sizes, self.stage.shards, self.ep_size)] * (self.ep_size > 1)

    @property
    def expert_units(self) -> list[Unit]:
        """The units of experts that ranks along ep share, in forward order."""
        return [unit for unit in self.units if unit.is_experts]

    def sizes_of(self, unit: Unit) -> dict[str, int]:
        """Returns the sizes of the axes on which `unit` lies."""
        return self.meshes[-1 if unit.is_experts else 0]

    def shards_of(self, unit: Unit) -> int:
        """Returns the number of ranks that shard `unit`."""
        return self.sizes_of(unit)[DP_SHARD]

    def replicas_of(self, unit: Unit) -> int:
        """Returns the number of ranks that each have the same shard of `unit`."""
        return self.sizes_of(unit)[DP_REPLICATE]

    def counted_axis(self, unit: Unit, axis: str) -> str:
        """Returns the axis under which traffic of `unit` along `axis` is counted: the first that joins these ranks."""
        return self._axes_of_experts[axis] if unit.is_experts else axis

    @cached_property
    def _axes_of_experts(self) -> dict[str, str]:
        return axes_of_experts(self.groups(0))

    def share_of(self, count: int) -> int:
        """Returns the most that a rank has of `count` rows of a head, or heads of keys, which ranks share."""
        return ceil_div(count, self.tp_size)

    @property
    def block_sizes(self) -> dict[str, int]:
        """Returns the sizes, by their keys in a recipe, of the axes along which ranks share blocks."""
        return {"tp_size": self.tp_size, "cp_size": self.cp_size, "ep_size": self.ep_size}

    @property
    def steady_micros(self) -> int:
        """Returns the number of micro-batches after which a step only repeats its moments."""
        return 3 * self.pipeline.ranks

    def term_copies(self, of_sequences: bool) -> int:
        """Returns how many ranks compute the same terms of a loss: those along tp and, where the terms are of whole
        sequences, those along cp."""
        return self.tp_size * (self.cp_size if of_sequences else 1)

    @property
    def token_parts(self) -> int:
        """Returns the number of ranks that share the tokens of hidden states between blocks."""
        return self.tp_size

    @property
    def matrix_parts(self) -> int:
        """Returns the number of shards of a matrix, along dp_shard and tp together."""
        return self.shards * self.tp_size

    @property
    def shared(self) -> dict[str, int]:
        """The number of ranks, by axis, that split what one rank would do: matrices, rows, experts or layers."""
        return {TP: self.tp_size, CP: self.cp_size, EP: self.ep_size, PP: self.pipeline.ranks}

    def dtype(self, what: Literal["params", "reduce", "master"]) -> torch.dtype:
        """Returns a dtype. params: of gathered parameters and compute; reduce: of gradients on the network and their
        sum; master: of parameters at rest, reduced gradients and optimizer state."""
        return DTYPES[getattr(self.precision, what)]

    @property
    def steps_on_host(self) -> bool:
        """Returns whether optimizer state lies on the host or a disk, and the host runs its step."""
        return self.offload.optimizer != "none"

    @property
    def is_replicated(self) -> bool:
        """Returns whether each rank holds all parameters on its device (replicated.py): no gather, no offload."""
        return self.shards == self.tp_size == self.ep_size == 1 and not self.steps_on_host

    @cached_property
    def cache(self) -> dict[Any, Any]:
        """Holds what `cached_per_layout` (per_layout.py) has computed of this layout, by function and arguments."""
        return {}

    @cached_property
    def casts(self) -> bool:
        """Returns whether a parameter has another dtype at rest than in compute."""
        return any(unit.cast_numel(self.dtype("params").itemsize) for unit in self.units)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed through a step where there is one shard (replicated.py): the dtype of
        the reduction. It is the master's where a rank sends nothing and casts nothing, or its stage reduces at each
        micro-batch."""
        sends = self.replicas > 1 or (self.casts and not self.stage.reduce_every_micro)
        return self.dtype("reduce" if sends else "master")

    @cached_property
    def full_shapes(self) -> dict[str, torch.Size]:
        """Returns the shape of every parameter of the whole model, in order, without those of a teacher beside it."""
        return {name: each.shape for name, each in self.placements.items() if not name.startswith(NOT_STORED)}

    @property
    def trained_shapes(self) -> dict[str, torch.Size]:
        """Returns the shapes of the trained parameters of the whole model, in order."""
        return {name: shape for name, shape in self.full_shapes.items() if self.placements[name].trained}

    @cached_property
    def file_shapes(self) -> dict[str, torch.Size]:
        """Returns the shape of every weight of the whole model in its files, by its name there, in order."""
        return file_shapes(self.full_shapes, {name: each.numel for name, each in self.placements.items()})

    @property
    def forward_prefetch(self) -> int:
        """The number of units gathered ahead of the running one in forward."""
        return max(0, self.parallel.forward_prefetch)

    @property
    def backward_prefetch(self) -> int:
        """The number of units gathered ahead in backward: as asked for, else one block where the stage gathers there.
        Under ep that is two units: experts come first in the backward of their block, so both are needed at once."""
        asked, a_block = self.parallel.backward_prefetch, 1 + (self.ep_size > 1)
        return asked if asked >= 0 else a_block * self.stage.reshard_after_forward

    def run_order(self, is_forward: bool) -> list[tuple[Unit, list[Unit]]]:
        """Returns the units in the order in which forward, or backward, reaches them, each with the units that are
        prefetched when it runs: none where one rank has all shards, since fully_shard then gathers nothing ahead."""
        *inner, root = self.units
        units = [root, *inner] if root.shapes else inner
        run, depth = (units, self.forward_prefetch) if is_forward else (backward_order(units), self.backward_prefetch)
        ahead = [run[number + 1 : number + 1 + depth] for number in range(len(run))]
        is_gathered = {unit: self.shards_of(unit) > 1 for unit in run}
        gathered = ([each for each in units if is_gathered[each]] for units in ahead)
        return list(zip(run, gathered, strict=True))

    @property
    def hops(self) -> list[tuple[str, int, int]]:
        """The exchanges of qgZ, in order: mesh axis, ranks along it, bits."""
        return self.switches.hops(self.shards)

    @cached_property
    def replicated_numel(self) -> int:
        """The elements of this rank's shards, padded, whose gradients are summed over tensor-parallel ranks."""
        return sum(unit.replicated_numel(self.shards) for unit in self.units) * (self.tp_size > 1)

    @cached_property
    def trains_tp_sharded(self) -> bool:
        """Returns whether a trained parameter is sharded along tp: then the gradient norm is summed along it too."""
        pairs = (zip(unit.trained, unit.tp_sharded, strict=True) for unit in self.units)
        return any(trained and is_sharded for each in pairs for trained, is_sharded in each)

    @property
    def chunks(self) -> "list[Layout]":
        """The layout of each chunk of layers, whose units are gathered and reduced by themselves."""
        if len(self.chunk_units) < 2:
            return [self]
        left = iter(self.units)
        return [replace(self, units=tuple(islice(left, count)), chunk_units=()) for count in self.chunk_units]

    def blocks(self, total: int) -> list[int]:
        """Returns the numbers of the blocks that this rank has, of a model of `total` blocks."""
        return [number for chunk in range(self.pipeline.chunks) for number in self.pipeline.own_layers(chunk, total)]

    def data_rank(self, rank: int) -> DataRank:
        replica, shard = (rank_along(self.sizes, axis, rank) for axis in DATA_AXES)
        dp_rank, cp_rank = divmod(replica * self.shards + shard, self.cp_size)
        dp_size = self.replicas * self.shards // self.cp_size
        return DataRank(dp_rank, dp_size, self.tp_size, cp_rank, self.cp_size, self.pipeline.ranks)

    def groups(self, rank: int) -> dict[str, list[int]]:
        """Returns the ranks that `rank` talks to along each axis."""
        groups = axis_groups(self.sizes, rank, self.switches.inside)
        groups |= {CP: ranks_along(self.mesh, CP, rank)} if self.cp_size > 1 else {}
        if self.ep_size > 1:
            groups |= {name: ranks_along(self.meshes[-1], axis, rank) for axis, name in OF_EXPERTS.items()}
        return groups | (pipeline_groups(groups[PP], rank) if PP in groups else {})


def read_sizes(parallel: Parallel, world_size: int) -> dict[str, int]:
    """Returns the size of every mesh axis that parameters lie on, outermost first. Raises RecipeError where `parallel`
    does not fit the ranks."""
    stage = find_stage(parallel.stage)
    sizes = fold_sizes(resolve_sizes(parallel, stage.axes, world_size), stage.shards)
    expert_sizes(sizes, stage.shards, parallel.ep_size)  # raises where ep does not divide them
    return sizes


def build_layout(
    parallel: Parallel,
    precision: Precision,
    model: nn.Module,
    parts: Sequence[Sequence[nn.Module]],
    blocks: Sequence[nn.Module],
    world_size: int,
    ranks_per_node: int,
    offload: Offload = ON_DEVICE,
    chosen: dict[Any, tuple[Unit, ...]] | None = None,
    placements: dict[str, Placement] | None = None,
    pipeline: Pipeline = WHOLE_MODEL,
    chunks: Sequence[Any] = (),
    teacher: Any = None,
) -> Layout:
    """Returns the layout of `model` over `world_size` ranks, `ranks_per_node` of them on each node. `parts`: groups of
    modules to gather together, in forward order; `blocks`: the blocks among them (see choose_units). `chosen`: the
    units of other layouts of the same models, to which this one's are added. Of a model that tensor or pipeline
    parallel split, `placements` (None: nothing did), `pipeline`, and its `chunks` of layers, each with parts and blocks
    of its own, where there are several. `teacher`: the config of a teacher in it.

    `parallel` comes from a recipe that loaded, or went through `check_parallel`. Raises RecipeError where the settings
    do not fit the ranks or the model.
    """
    stage, sizes = find_stage(parallel.stage), read_sizes(parallel, world_size)
    switches = read_switches(parallel, sizes[DP_SHARD], ranks_per_node)
    groups = [(each, each.parts, each.blocks) for each in chunks] if len(chunks) > 1 else [(model, parts, blocks)]
    placements = place_whole(model) if placements is None else placements
    reshards, chosen, units = stage.reshard_after_forward, {} if chosen is None else chosen, list[tuple[Unit, ...]]()
    for root, root_parts, root_blocks in groups:
        key = root, reshards, *(getattr(parallel, name) for name in UNIT_KEYS)
        if key not in chosen:
            chosen[key] = choose_units(root, root_parts, root_blocks, reshards, parallel, placements)
        units.append(chosen[key])
    every = tuple(unit for each in units for unit in each)
    facts = (stage, sizes, every, parallel, precision, switches, ranks_per_node, offload, teacher, parallel.cp_size)
    return Layout(*facts, pipeline, tuple(map(len, units)), placements)
