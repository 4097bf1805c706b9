"""The stages: what a data-parallel rank keeps and when it gathers, as rows of one table.

Everything that tells one stage from another is a field of its row; code below reads fields, never names.
Invariant: gradients are SUMS over ranks (the loss is already divided by the global token count), so every divide
factor is 1. Sources: ZeRO, arXiv 1910.02054, sections 5.1 to 5.3 (P_os, P_os+g, P_os+g+p); hybrid shard: PyTorch
FSDP, arXiv 2304.11277, section 3.2.2.
"""

from dataclasses import dataclass
from itertools import compress
from math import prod
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardbook.comm.collectives import QuantizedAllGather, QuantizedReduceScatter, Switches, share_secondary_mesh
from shardbook.dtypes import DTYPES
from shardbook.parallel.mesh import DP_REPLICATE, DP_SHARD, axis_sizes, build_node_mesh, describe_sizes
from shardbook.parallel.units import Unit, backward_order
from shardbook.recipe import Parallel, Precision, RecipeError, nearest


@dataclass(frozen=True)
class Stage:
    """One row. N ranks along dp_shard, k micro-batches in a step."""

    name: str
    axes: tuple[str, ...]  # mesh axes that this stage may make larger than 1
    reshard_after_forward: bool  # parameters at rest: 1/N (True), or gathered from first forward to optimizer step
    reduce_every_micro: bool  # gradients while accumulating: 1/N, reduce-scattered k times (True), or unsharded, once
    switches: Literal["no", "may", "must"]  # be on, of ZeRO++'s three
    source: str

    @property
    def shards(self) -> bool:
        """Whether a rank may keep less than everything."""
        return DP_SHARD in self.axes

    def syncs(self, is_last_micro: bool) -> bool:
        """Whether this micro-batch's backward reduce-scatters."""
        return self.reduce_every_micro or is_last_micro


# fmt: off
STAGES = {row.name: row for row in (
    #     name      mesh axes                 reshard after forward   reduce every micro   switches
    Stage("ddp",    (DP_REPLICATE,),          False,                  True,                "no",     "baseline"),
    Stage("zero1",  (DP_SHARD,),              False,                  False,               "no",     "ZeRO P_os"),
    Stage("zero2",  (DP_SHARD,),              False,                  True,                "no",     "ZeRO P_os+g"),
    Stage("zero3",  (DP_SHARD,),              True,                   True,                "no",     "ZeRO P_os+g+p"),
    Stage("hsdp",   (DP_REPLICATE, DP_SHARD), True,                   True,                "may",    "hybrid shard"),
    Stage("zeropp", (DP_SHARD,),              True,                   True,                "must",   "ZeRO++"),
)}
# fmt: on
ALIASES = {"fsdp": "zero3"}
PLAIN = Switches()


def find_stage(name: str) -> Stage:
    """The row of a stage's name or alias. Raises RecipeError with the nearest spelling."""
    known = [*STAGES, *ALIASES]
    if name not in known:
        raise RecipeError(f"parallel.stage = {name!r}: must be one of {', '.join(known)}{nearest(name, known)}")
    return STAGES[ALIASES.get(name, name)]


def check_stage(parallel: Parallel) -> Stage:
    """The stage that `[parallel]` names. Raises RecipeError where a knob contradicts it: none is silently ignored."""
    stage = find_stage(parallel.stage)
    resharding = " or ".join(row.name for row in STAGES.values() if row.reshard_after_forward)
    wrong = []
    if not stage.reshard_after_forward:
        why = f"{stage.name} keeps every parameter gathered through a step; leave it out, or set parallel.stage to "
        if parallel.reshard_min_params:
            wrong.append(f"parallel.reshard_min_params = {parallel.reshard_min_params}: {why}{resharding}")
        if not parallel.reshard_root:
            wrong.append(f"parallel.reshard_root = false: {why}{resharding}")
        if parallel.backward_prefetch >= 0:
            wrong.append(
                f"parallel.backward_prefetch = {parallel.backward_prefetch}: {stage.name} gathers nothing in backward; "
                f"leave it out, or set parallel.stage to {resharding}"
            )
    if not stage.shards and parallel.forward_prefetch >= 0:
        wrong.append(
            f"parallel.forward_prefetch = {parallel.forward_prefetch}: {stage.name} gathers nothing; leave it out, "
            "or choose a stage that shards"
        )
    switches = {
        key: value
        for key in ("quantize_weights", "quantize_gradients", "secondary_shard")
        if (value := getattr(parallel, key))
    }
    if stage.switches == "no":
        for key, value in switches.items():
            wrong.append(
                f"parallel.{key} = {value!r}: {stage.name} does not have it; set parallel.stage to zeropp or hsdp"
            )
    elif stage.switches == "must" and not switches:
        wrong.append(
            f"parallel.stage = {stage.name!r} with none of its switches is zero3; set parallel.quantize_weights=8, "
            "parallel.quantize_gradients=[8,4] or parallel.secondary_shard=node, or parallel.stage=zero3"
        )
    if parallel.quantize_gradients and len(parallel.quantize_gradients) != 2:
        wrong.append(
            f"parallel.quantize_gradients = {parallel.quantize_gradients}: two numbers, bits inside a node and across, "
            "like [8, 4]"
        )
    if parallel.quantize_error_feedback and not parallel.quantize_gradients:
        wrong.append(
            "parallel.quantize_error_feedback = true: no gradient is quantised; leave it out, or set "
            "parallel.quantize_gradients=[8,4]"
        )
    if not (parallel.quantize_weights or parallel.quantize_gradients):
        for key in ("quantize_min_params", "quantize_block"):
            if (value := getattr(parallel, key)) != Parallel.model_fields[key].default:
                wrong.append(f"parallel.{key} = {value}: nothing is quantised; leave it out")
    if wrong:
        raise RecipeError("; ".join(wrong))
    return stage


def read_switches(parallel: Parallel, shards: int, ranks_per_node: int) -> Switches:
    """ZeRO++'s switches for `shards` ranks along dp_shard. Raises RecipeError where secondary shards, or nodes, do not
    fit into them."""
    named = parallel.secondary_shard
    secondary = min(ranks_per_node, shards) if named == "node" else int(named)
    if secondary and (secondary > shards or shards % secondary or secondary == 1 < shards):
        raise RecipeError(
            f"parallel.secondary_shard = {named!r}: {secondary} ranks; must be more than 1 and divide the {shards} "
            "ranks of dp_shard" + ("; for one rank set parallel.stage=zero2" if secondary == 1 else "")
        )
    bits, inside = parallel.quantize_gradients, secondary or min(ranks_per_node, shards)
    by_node = named == "node" or (bits and not secondary)
    if by_node and (shards % inside or ranks_per_node % inside):
        raise RecipeError(
            f"parallel.quantize_gradients = {bits}, parallel.secondary_shard = {named!r}: nodes of {ranks_per_node} "
            f"ranks and dp_shard's {shards} do not fit into each other; set parallel.secondary_shard to a number"
        )
    return Switches(
        weights_bits=parallel.quantize_weights,
        gradients_bits=(bits[0], bits[1]) if bits else None,
        secondary=secondary if secondary < shards else 0,  # one node: every gather is inside it already
        inside=inside if shards % inside == 0 else shards,
        block=parallel.quantize_block,
        min_params=parallel.quantize_min_params,
        error_feedback=parallel.quantize_error_feedback,
    )


def apply_stage(
    units: list[Unit], mesh: DeviceMesh, parallel: Parallel, precision: Precision, switches: Switches = PLAIN
) -> dict[str, QuantizedReduceScatter]:
    """Wrap each unit with fully_shard, in place, inner before outer, the root last.

    Afterwards every parameter is a DTensor: Shard(0) along dp_shard, Replicate along dp_replicate.
    `precision.params` is the dtype of gathered parameters and of compute, `precision.reduce` that of gradients on the
    wire and of their sum, `precision.output` that of what the root returns. Returns the reductions with error feedback,
    by what they carry: see start_carrying.
    """
    if (switches.weights_bits or switches.gradients_bits) and not any(switches.quantizes(unit.numel) for unit in units):
        raise RecipeError(
            f"parallel.quantize_min_params = {switches.min_params}: leaves every unit unquantised (the largest has "
            f"{max(unit.numel for unit in units):,} parameters); must be less"
        )
    sizes, hops, carriers = axis_sizes(mesh), build_hops(mesh, switches), dict[str, QuantizedReduceScatter]()
    shards = sizes[DP_SHARD]
    # A 2-D mesh makes fully_shard all-reduce along the first axis, with one replica in a group of one.
    mesh = mesh[DP_REPLICATE, DP_SHARD] if mesh[DP_REPLICATE].size() > 1 else mesh[DP_SHARD]
    order = [*units[-2::-1], units[-1]]
    with share_secondary_mesh():
        for unit in order:
            policy = MixedPrecisionPolicy(
                param_dtype=DTYPES[precision.params],
                reduce_dtype=DTYPES[precision.reduce],
                output_dtype=DTYPES[precision.output] if unit is units[-1] else None,
            )
            modules = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            reshards = unit.reshards and (switches.secondary or True)
            fully_shard(modules, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    for number, unit in enumerate(order):
        # SUM with factor 1: the default divides by the number of ranks, which would divide twice; forcing the plain
        # sum matters because gloo knows no pre-multiplied one.
        unit.handle.set_gradient_divide_factor(1.0)
        unit.handle.set_force_sum_reduction_for_comms(True)
        if hasattr(unit.handle, "set_reduce_scatter_unused_params"):  # torch >= 2.13
            # a parameter that only some ranks used: the others reduce zeros, else ranks would sum unlike buffers
            unit.handle.set_reduce_scatter_unused_params(True, recurse=False)
        if unit.shapes and shards > 1 and switches.quantizes(unit.numel):
            if switches.weights_bits:
                unit.handle.set_custom_all_gather(QuantizedAllGather(shards, switches.weights_bits, switches.block))
            if hops:
                reduction = QuantizedReduceScatter(hops, switches.block, unsent_numel(unit, shards, switches))
                unit.handle.set_custom_reduce_scatter(reduction)
                if reduction.carries:
                    shapes = " ".join("x".join(map(str, shape)) for shape in compress(unit.shapes, unit.trained))
                    carriers[f"{number}: {shapes} over {describe_sizes(sizes)}, {switches.hops(shards)}"] = reduction
    apply_prefetch([units[-1], *units[:-1]] if units[-1].shapes else units[:-1], parallel)
    return carriers


def start_carrying(carriers: dict[str, QuantizedReduceScatter], device: torch.device) -> dict[str, Tensor]:
    """Make the memory of error feedback, which holds zeros at first. Returns it under the same names, flat fp32: state
    that a checkpoint must hold, and that fits only where the name is the same."""
    for carrier in carriers.values():
        carrier.unsent = torch.zeros(carrier.carries, device=device)
    return {name: carrier.unsent for name, carrier in carriers.items() if carrier.unsent is not None}


def unsent_numel(unit: Unit, shards: int, switches: Switches) -> int:
    """Elements that error feedback keeps on a rank for `unit`: what its last exchange sends."""
    if not (switches.error_feedback and switches.quantizes(unit.numel) and switches.hops(shards)):
        return 0
    earlier = prod(ranks for _, ranks, _ in switches.hops(shards)[:-1])
    return unit.padded(shards, trained_only=True) // earlier


def build_hops(mesh: DeviceMesh, switches: Switches) -> list[tuple[ProcessGroup, int]]:
    """The process group and bits of each exchange of a quantised reduction."""
    hops = switches.hops(mesh[DP_SHARD].size())
    where = build_node_mesh(mesh, switches.inside) if len(hops) > 1 else mesh
    return [(where.get_group(axis), bits) for axis, _, bits in hops]


def apply_prefetch(units: list[Unit], parallel: Parallel) -> None:
    """Gather so many units ahead of the running one. `units` in forward order.

    Always explicit in backward: torch's own order is the reverse of the forwards since the last backward, so the first
    backward after an evaluation would gather, for nothing, a unit that the evaluation ran. A list that names only the
    unit itself, which is gathered already, stands for none.
    """
    for run, depth, is_forward in (
        (units, parallel.forward_prefetch, True),
        (backward_order(units), backward_depth(parallel), False),
    ):
        handles = [unit.handle for unit in run]
        for number, handle in enumerate(handles):
            ahead = handles[number + 1 : number + 1 + max(0, depth)] or [handle]
            if not is_forward:
                handle.set_modules_to_backward_prefetch(ahead)
            elif depth >= 0:
                handle.set_modules_to_forward_prefetch(ahead)


def backward_depth(parallel: Parallel) -> int:
    """Units gathered ahead in backward: the recipe's number, else one where the stage gathers there at all."""
    if parallel.backward_prefetch >= 0:
        return parallel.backward_prefetch
    return int(find_stage(parallel.stage).reshard_after_forward)


def set_schedule(units: list[Unit], stage: Stage, is_last_micro: bool) -> None:
    """Prepare for one micro-batch: what its backward reduces and which parameters it frees."""
    root = units[-1].handle
    root.set_requires_gradient_sync(stage.syncs(is_last_micro))
    root.set_requires_all_reduce(is_last_micro)  # across replicas gradients are summed once a step, in every stage
    for unit in units:
        # after the last micro-batch always: the optimizer makes gathered parameters stale
        unit.handle.set_reshard_after_backward(unit.reshards or is_last_micro, recurse=False)


def reshard(units: list[Unit]) -> None:
    """Free every gathered parameter. Needed after an evaluation: a forward without backward leaves them gathered."""
    for unit in units:
        unit.handle.reshard()
