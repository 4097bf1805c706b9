"""The stages for anyone's module, without a recipe: `shard_model`, in a loop of one's own. See docs/library.md.

Invariant: the same layout, units and hooks as a recipe's run, built by the same functions. Never starts processes,
reads files or touches the optimizer.
"""

import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardbook.axes import AXES, DP_SHARD
from shardbook.parallel.layout import DTYPES, Layout, build_layout
from shardbook.parallel.mesh import axis_sizes, build_mesh
from shardbook.parallel.sharding import ShardedModel, apply_stage
from shardbook.parallel.stages import Stage, check_stage
from shardbook.recipe import Parallel, Precision, RecipeError


def shard_model(
    model: nn.Module,
    *,
    blocks: Iterable[nn.Module],
    stage: str | Parallel = "zero3",
    mesh: DeviceMesh | None = None,
    precision: Precision | None = None,
) -> ShardedModel:
    """Put `model` under a named stage, in place. Collective: every rank calls it with the same model and weights.

    `blocks`: the modules to gather one at a time, in the order in which they run; what is in none of them is gathered
    together. `stage`: a name, or a `Parallel` section with ZeRO++'s switches and the other knobs. `mesh`: with the axes
    dp_replicate, dp_shard or both; None: all ranks. `precision`: None computes in bf16 on a GPU and in fp32 on a CPU,
    and reduces in fp32. Parameters keep their dtype, one for all of them, fp32 or bf16.

    Afterwards parameters are DTensors, so make the optimizer afterwards; gradients are SUMS over ranks: divide the loss
    by what the whole step counts. Raises RecipeError (a ValueError) where something does not fit.
    """
    blocks = list(blocks)
    check_blocks(model, blocks)
    parallel = stage if isinstance(stage, Parallel) else Parallel(stage=stage)
    row = check_stage(parallel)
    if not dist.is_initialized():
        raise RecipeError("shard_model: no process group; call torch.distributed.init_process_group first")
    if mesh is None:
        device_type, ranks = "cuda" if "nccl" in dist.get_backend_config() else "cpu", dist.get_world_size()
    else:
        parallel, device_type, ranks = _with_sizes_of(mesh, parallel, row), mesh.device_type, mesh.size()
    settled = _with_master_of(model, precision or Precision()).on(device_type)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    layout = build_layout(parallel, settled, model, [[block] for block in blocks], blocks, ranks, ranks_per_node)
    mesh = _with_every_axis(mesh, layout, device_type)
    check_same_weights(model, mesh)
    return apply_stage(model, layout, mesh)


def check_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise RecipeError where a block is not inside `model`, one is inside another, a parameter of one is reachable
    from outside it, or `model` is sharded already."""
    names = {module: name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise RecipeError(f"shard_model: {name or 'the model'} is sharded already; shard a model once")
    block_of: dict[nn.Module, nn.Module] = {}
    for number, block in enumerate(blocks):
        if block is model or block not in names:
            what = "is the model itself" if block is model else "is not inside the model"
            raise RecipeError(f"shard_model: blocks[{number}], a {type(block).__name__}, {what}")
        for module in block.modules():
            if module in block_of:
                one, other = names[block_of[module]], names[block]
                raise RecipeError(
                    f"shard_model: {names[module]} is in two blocks, {one} and {other}; name each module once"
                )
            block_of[module] = block
    found: dict[nn.Parameter, tuple[str, nn.Module | None]] = {}
    for module, prefix in names.items():
        for leaf, parameter in module.named_parameters(prefix=prefix, recurse=False):
            here = block_of.get(module)
            earlier, there = found.setdefault(parameter, (leaf, here))
            if here is not there:
                where = [f"block {names[at]}" if at else "no block" for at in (there, here)]
                raise RecipeError(
                    f"shard_model: {earlier} (in {where[0]}) and {leaf} (in {where[1]}) are one parameter, and what is "
                    "in a block is gathered with that block alone; leave both in no block, or both in one"
                )


def check_same_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise RecipeError, on every rank of `mesh`, where ranks hold different weights: each keeps only its own part, so
    a model of parts of unlike models would train without a word. A model on the meta device has no weights yet."""
    named = {name: p for name, p in model.named_parameters() if not p.is_meta}
    if not named:
        return
    sums = torch.stack([_fingerprint(p) for p in named.values()]).to(mesh.device_type)
    least, most = sums.clone(), sums.clone()
    for axis in range(mesh.ndim):
        dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group(axis))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if differ := [name for name, same in zip(named, (least == most).tolist(), strict=True) if not same]:
        raise RecipeError(
            f"shard_model: {len(differ)} of {len(named)} parameters are not the same on every rank, {differ[0]} first; "
            "load the same weights, or call torch.manual_seed with the same seed before the model is made"
        )


def _fingerprint(parameter: Tensor) -> Tensor:
    """The sum of the parameter's bits as whole numbers, modulo 2**64: exact, in any order."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    return parameter.detach().contiguous().view(whole).sum(dtype=torch.int64)


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


def _with_sizes_of(mesh: DeviceMesh, parallel: Parallel, stage: Stage) -> Parallel:
    """`parallel` with the sizes of `mesh`. Raises RecipeError where axes or sizes are not the stage's."""
    sizes = axis_sizes(mesh) if mesh.mesh_dim_names else {}
    shown = f"the mesh has {' and '.join(sizes) or 'axes without names'}"
    if absent := [axis for axis in stage.axes if axis not in sizes]:
        raise RecipeError(f"shard_model: stage {stage.name} needs the mesh axis {' and '.join(absent)}; {shown}")
    if other := [axis for axis in sizes if axis not in AXES]:
        raise RecipeError(f"shard_model: {shown}; {' and '.join(other)} it does not know: pass mesh[{stage.axes}]")
    for axis, size in sizes.items():
        if (asked := getattr(parallel, f"{axis}_size")) not in (-1, size):
            raise RecipeError(f"shard_model: parallel.{axis}_size = {asked}, and the mesh has {size}; leave one out")
    return parallel.model_copy(update={f"{axis}_size": size for axis, size in sizes.items()})


def _with_every_axis(mesh: DeviceMesh | None, layout: Layout, device_type: str) -> DeviceMesh:
    """`mesh`, or one of all ranks, with the axes of AXES. Raises RecipeError for a part of the ranks that lacks one
    which is needed: making it would take a collective of all."""
    if mesh is None:
        return build_mesh(layout.sizes, device_type)
    names = tuple(axis_sizes(mesh))
    if names == AXES or (names == (DP_SHARD,) and len(layout.hops) < 2):
        return mesh
    if len(names) == 1 and mesh.mesh.tolist() == list(range(dist.get_world_size())):
        return build_mesh(layout.sizes, device_type)
    raise RecipeError(
        f"shard_model: the mesh must have {' and '.join(AXES)}, in this order, one of them perhaps of size 1; it has "
        f"{' and '.join(names)} (one alone is enough where it has all ranks)"
    )
