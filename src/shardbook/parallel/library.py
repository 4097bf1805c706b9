"""The stages for anyone's module, without a recipe: `shard_model`, in a loop of one's own. See docs/library.md.

Invariant: the same layout, units and hooks as a recipe's run, built by the same functions. Never starts processes,
reads files or touches the optimizer; of the environment it reads LOCAL_WORLD_SIZE, the ranks of a node.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardbook.axes import DATA_AXES, DP_SHARD, TP
from shardbook.comm.zeropp_collectives import ZeroppSwitches
from shardbook.model.dtypes import DTYPES
from shardbook.parallel.layout import Layout, build_layout, read_sizes
from shardbook.parallel.mesh import axis_sizes, build_mesh
from shardbook.parallel.replicated import COPIED
from shardbook.parallel.same_on_ranks import FirstSteps, check_outputs, check_same_weights, run_example
from shardbook.parallel.sharding import ShardedModel, apply_stage
from shardbook.parallel.tensor_plan import apply_tp_plan, has_whole_gradient, read_tp_plan
from shardbook.parallel.units import note_shards, place_whole
from shardbook.parallel.zeropp import read_switches
from shardbook.recipe import Parallel, Precision, RecipeError, check_parallel, find_stage

NOT_OF_A_MODULE = {
    "cp": "ranks that share rows exchange heads inside attention, and which code of a module is attention is not known",
    "ep": "ranks that share experts send them tokens, and which modules are experts of a block is not known",
    "pp": "a pipeline runs the micro-batches of a step in an order of its own, and the loop here is yours",
}
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # nobody calls their forward


def shard_model(
    model: nn.Module,
    *,
    blocks: Iterable[nn.Module],
    stage: str | Parallel = "zero3",
    mesh: DeviceMesh | None = None,
    precision: Precision | None = None,
    tp_plan: Mapping[str, str] | None = None,
    example: Any = None,
) -> ShardedModel:
    """Put `model` under a named stage, in place. Collective: every rank calls it with the same model and weights.

    `blocks`: the modules to gather one at a time, in the order in which they run; what is in none of them is gathered
    together. `stage`: a name, or a `Parallel` section with ZeRO++'s switches, tp_size and the other knobs. `mesh`: with
    the axes dp_replicate, dp_shard or both, and tp; None: all ranks. `precision`: None computes in bf16 on a GPU and in
    fp32 on a CPU, reduces in fp32, and returns floats as fp32. Parameters keep their dtype, one for all of them, fp32
    or bf16. `tp_plan`: beside tp_size the layers that ranks share, by name, in the words of transformers' `tp_plan`
    (tensor_plan.py); None: the model's own. Ranks along tp must be given the same data. `example`: a batch (a tuple:
    arguments of the model, a mapping: its named ones) on which the model, in eval mode, must compute the same before
    and after: what tells a tp_plan that does not fit the model's code. Its weights must then be there, whole.

    Afterwards parameters are DTensors (plain tensors where a rank has all of them), so make the optimizer afterwards;
    gradients are SUMS over data-parallel ranks: divide the loss by what the whole step counts. Raises RecipeError (a
    ValueError) where something does not fit.
    """
    blocks, parallel, precision = read_arguments(model, blocks, stage, mesh, precision)
    words = read_tp_plan(model, tp_plan, parallel.tp_size)
    if not dist.is_initialized():
        raise RecipeError("shard_model: no process group; call torch.distributed.init_process_group first")
    if mesh is not None and axis_sizes(mesh).get(TP) == 1:
        mesh = mesh[tuple(axis for axis in axis_sizes(mesh) if axis != TP)]
    device_type = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    ranks = list(range(dist.get_world_size()))
    if mesh is not None:
        device_type, ranks = mesh.device_type, mesh.mesh.flatten().tolist()
    sizes, node = read_sizes(parallel, len(ranks)), _ranks_of_this_node(ranks, parallel)
    mesh = _with_every_axis(mesh, sizes, read_switches(parallel, sizes[DP_SHARD], node), device_type)
    check_same_weights(model, mesh)
    expected = None if example is None else run_example(model, example)
    tp_rank = mesh.get_local_rank(TP) if words else 0
    layout = place_module(model, blocks, words, parallel, precision.on(device_type), len(ranks), node, tp_rank)
    sharded = apply_stage(model, layout, mesh, ours=False)
    if expected is not None:
        check_outputs(expected, run_example(model, example), mesh, layout.dtype("params"))
        sharded.reshard()
    if words:
        unshared = {name: each for name, each in layout.placements.items() if each.trained and each.tp_dim is None}
        is_whole = {name: each.tp_whole_gradient for name, each in unshared.items()}
        sharded.check_first_gradients = FirstSteps(model, is_whole, mesh, mesh[TP]).check
    return sharded


def place_module(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    words: Mapping[str, str],
    parallel: Parallel,
    precision: Precision,
    world_size: int,
    ranks_per_node: int,
    tp_rank: int = 0,
) -> Layout:
    """Returns the layout of `model`, of which the part of rank `tp_rank` along tp is kept where `words`
    (`read_tp_plan`'s) say how. Raises RecipeError where sizes do not fit."""
    placements = place_whole(model)
    if words:
        apply_tp_plan(model, words, blocks, parallel.tp_size, tp_rank)
        placements = {
            name: replace(each, tp_whole_gradient=each.tp_dim is None and has_whole_gradient(name, words))
            for name, each in note_shards(placements, model).items()
        }
    parts, facts = [[block] for block in blocks], (world_size, ranks_per_node)
    return build_layout(parallel, precision, model, parts, blocks, *facts, placements=placements)


def read_arguments(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    stage: str | Parallel,
    mesh: DeviceMesh | None,
    precision: Precision | None,
) -> tuple[list[nn.Module], Parallel, Precision]:
    """Return blocks, settings and dtypes that `shard_model`'s arguments ask for. Raises RecipeError for what fits on no
    ranks; a plan asks the same."""
    for what, given, fits, words in (
        ("model", model, isinstance(model, nn.Module), "a module"),
        ("blocks", blocks, isinstance(blocks, Iterable), "several modules"),
        ("stage", stage, isinstance(stage, str | Parallel), "a name or a Parallel"),
        ("mesh", mesh, isinstance(mesh, DeviceMesh | None), "a DeviceMesh"),
        ("precision", precision, isinstance(precision, Precision | None), "a Precision"),
    ):
        if not fits:
            raise RecipeError(f"shard_model: {what} = {given!r}: must be {words}")
    blocks = list(blocks)
    check_blocks(model, blocks)
    check_parameters(model)
    parallel = stage if isinstance(stage, Parallel) else Parallel(stage=stage)
    if mesh is not None:
        parallel = _with_sizes_of(mesh, parallel)
    check_parallel(parallel)
    for axis, lacks in NOT_OF_A_MODULE.items():
        if (size := getattr(parallel, f"{axis}_size")) > 1:
            raise RecipeError(f"shard_model: parallel.{axis}_size = {size}: {lacks}; a recipe has it, so leave it out")
    return blocks, parallel, _with_master_of(model, precision or Precision())


def check_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise RecipeError where a block is not inside `model`, is named twice or lies inside another, or where one of its
    parameters can be reached from outside it too."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    block_at: dict[str, int] = {}
    for number, block in enumerate(blocks):
        for wrong, what in (
            (not isinstance(block, nn.Module), "is no module"),
            (block is model, "is the model itself"),
            (isinstance(block, nn.Module) and block not in names, "is not inside the model"),
            (isinstance(block, CONTAINERS), "is never run itself; name the modules in it"),
        ):
            if wrong:
                raise RecipeError(f"shard_model: blocks[{number}], a {type(block).__name__}, {what}")
        for name in names[block]:
            if name in block_at:
                raise RecipeError(f"shard_model: {name} is blocks[{block_at[name]}] and blocks[{number}]; name it once")
            block_at[name] = number

    def around(name: str) -> str:
        """The outermost block around a module or parameter, by name, or nothing."""
        words = name.split(".")
        return next((outer for end in range(1, len(words)) if (outer := ".".join(words[:end])) in block_at), "")

    for name in block_at:
        if outer := around(name):
            raise RecipeError(f"shard_model: block {name} is inside block {outer}; name one of the two")
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        earlier = first_names.setdefault(parameter, name)
        one, other = around(earlier), around(name)
        if block_at.get(one) != block_at.get(other):
            where = [f"block {block}" if block else "no block" for block in (one, other)]
            raise RecipeError(
                f"shard_model: {earlier} (in {where[0]}) and {name} (in {where[1]}) are one parameter, and what is in "
                "a block is gathered with that block alone; leave both in no block, or both in one"
            )


def check_parameters(model: nn.Module) -> None:
    """Raise RecipeError for what fully_shard would refuse half-way through, or count twice."""
    if isinstance(model, (*CONTAINERS, nn.parallel.DistributedDataParallel)):
        kind = type(model).__name__
        raise RecipeError(f"shard_model: a {kind} cannot be sharded; pass the module whose forward you call")
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) or module in COPIED:
            raise RecipeError(f"shard_model: {name or 'the model'} is sharded already; shard a model once")
    for name, parameter in model.named_parameters():
        for wrong, what in (
            (isinstance(parameter, DTensor), "is a DTensor already; models that are split otherwise it cannot take"),
            (not parameter.ndim, "is a scalar; give it the shape [1]"),
            (not parameter.numel(), f"has no elements, shape {list(parameter.shape)}; leave it out"),
            (not parameter.is_contiguous(), "is not contiguous; assign a contiguous parameter"),
        ):
            if wrong:
                raise RecipeError(f"shard_model: {name} {what}")


def _ranks_of_this_node(ranks: list[int], parallel: Parallel) -> int:
    """Returns the number of `ranks` on this rank's node. Raises RecipeError where ZeRO++ needs it and LOCAL_WORLD_SIZE
    is not set."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    by_node = parallel.secondary_shard == "node" or (parallel.quantize_gradients and not parallel.secondary_shard)
    if by_node and not size:
        raise RecipeError(
            "shard_model: LOCAL_WORLD_SIZE is not set, and ZeRO++ asks how many ranks share a node; torchrun and "
            "accelerate set it; else set it, or parallel.secondary_shard to a number"
        )
    return sum(rank // size == dist.get_rank() // size for rank in ranks) if size else len(ranks)


def _with_master_of(model: nn.Module, precision: Precision) -> Precision:
    """`precision` with the dtype that the parameters have. Raises RecipeError where that is not one, or another."""
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        dtypes.setdefault(parameter.dtype, name)
    master = next((name for name, dtype in DTYPES.items() if dtypes.keys() == {dtype}), None)
    if master is None:
        shown = ", ".join(f"{name} of {dtype}" for dtype, name in dtypes.items()) or "none"
        raise RecipeError(f"shard_model: parameters must be all fp32 or all bf16; there are {shown}")
    if "master" in precision.model_fields_set and precision.master != master:
        raise RecipeError(
            f"shard_model: precision.master = {precision.master!r}, and the parameters are {master}; leave it out, or "
            "convert the model first"
        )
    return precision.model_copy(update={"master": master})


def _with_sizes_of(mesh: DeviceMesh, parallel: Parallel) -> Parallel:
    """`parallel` with the sizes of `mesh`. Raises RecipeError where axes or sizes are not the stage's."""
    stage = find_stage(parallel.stage)
    sizes = axis_sizes(mesh) if mesh.mesh_dim_names else {}
    shown = f"the mesh has {' and '.join(sizes) or 'axes without names'}"
    if absent := [axis for axis in stage.axes if axis not in sizes]:
        raise RecipeError(f"shard_model: stage {stage.name} needs the mesh axis {' and '.join(absent)}; {shown}")
    if other := [axis for axis in sizes if axis not in (*DATA_AXES, TP)]:
        raise RecipeError(f"shard_model: {shown}; {' and '.join(other)} it does not know: pass mesh[{stage.axes}]")
    if TP not in sizes and parallel.tp_size > 1:
        raise RecipeError(f"shard_model: parallel.tp_size = {parallel.tp_size} needs the mesh axis {TP}; {shown}")
    for axis, size in sizes.items():
        key = f"{axis}_size"
        if (asked := getattr(parallel, key)) not in (-1, size) and key in parallel.model_fields_set:
            raise RecipeError(f"shard_model: parallel.{axis}_size = {asked}, and the mesh has {size}; leave one out")
    return parallel.model_copy(update={f"{axis}_size": size for axis, size in sizes.items()})


def _with_every_axis(
    mesh: DeviceMesh | None, sizes: dict[str, int], switches: ZeroppSwitches, device_type: str
) -> DeviceMesh:
    """Returns `mesh`, or one of all ranks, with all axes of `sizes`. Raises RecipeError for a part of the ranks that
    needs a group which it lacks: making one would take a collective of all."""
    if mesh is None:
        return build_mesh(sizes, device_type)
    names, is_full = tuple(axis_sizes(mesh)), mesh.mesh.flatten().tolist() == list(range(dist.get_world_size()))
    hops = len(switches.hops(sizes[DP_SHARD]))
    if not is_full and (switches.secondary or hops > 1):
        raise RecipeError(
            "shard_model: ZeRO++'s groups inside a node need a mesh of all ranks, in order; leave out secondary_shard, "
            "and quantize_gradients over several nodes"
        )
    wanted = tuple(sizes)
    if names == wanted or (names == wanted[1:] and hops < 2):
        return mesh
    if is_full and names == tuple(axis for axis in wanted if axis in names):
        return build_mesh(sizes, device_type)
    raise RecipeError(
        f"shard_model: the mesh must have {' and '.join(wanted)}, in this order, one of them perhaps of size 1; it has "
        f"{' and '.join(names)} (fewer are enough where it has all ranks)"
    )
