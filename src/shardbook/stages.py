"""The stages: what a data-parallel rank keeps and when it gathers, as rows of one table.

Everything that tells one stage from another is a field of its row; code below reads fields, never names.
Invariant: gradients are SUMS over ranks (the loss is already divided by the global token count), so every divide
factor is 1. Sources: ZeRO, arXiv 1910.02054, sections 5.1 to 5.3 (P_os, P_os+g, P_os+g+p); hybrid shard: PyTorch
FSDP, arXiv 2304.11277, section 3.2.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardbook.mesh import DP_REPLICATE, DP_SHARD
from shardbook.recipe import RecipeError, nearest


@dataclass(frozen=True)
class Stage:
    """One row. N ranks along dp_shard, k micro-batches in a step."""

    name: str
    axes: tuple[str, ...]  # mesh axes that this stage may make larger than 1
    reshard_after_forward: bool  # parameters at rest: 1/N (True), or gathered from first forward to optimizer step
    reduce_every_micro: bool  # gradients while accumulating: 1/N, reduce-scattered k times (True), or unsharded, once
    source: str

    def syncs(self, is_last_micro: bool) -> bool:
        """Whether this micro-batch's backward reduce-scatters."""
        return self.reduce_every_micro or is_last_micro

    def reshards(self, is_last_micro: bool) -> bool:
        """Whether parameters are freed after this backward; after the last always: the optimizer makes them stale."""
        return self.reshard_after_forward or is_last_micro


# fmt: off
STAGES = {row.name: row for row in (
    #     name     mesh axes                 reshard after forward   reduce every micro
    Stage("ddp",   (DP_REPLICATE,),          False,                  True,   "baseline"),
    Stage("zero1", (DP_SHARD,),              False,                  False,  "ZeRO P_os"),
    Stage("zero2", (DP_SHARD,),              False,                  True,   "ZeRO P_os+g"),
    Stage("zero3", (DP_SHARD,),              True,                   True,   "ZeRO P_os+g+p"),
    Stage("hsdp",  (DP_REPLICATE, DP_SHARD), True,                   True,   "hybrid shard"),
)}
# fmt: on
ALIASES = {"fsdp": "zero3"}


def find_stage(name: str) -> Stage:
    """The row of a stage's name or alias. Raises RecipeError with the nearest spelling."""
    known = [*STAGES, *ALIASES]
    if name not in known:
        raise RecipeError(f"parallel.stage = {name!r}: must be one of {', '.join(known)}{nearest(name, known)}")
    return STAGES[ALIASES.get(name, name)]


def apply_stage(
    model: nn.Module,
    units: list[list[nn.Module]],
    stage: Stage,
    mesh: DeviceMesh,
    params_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> None:
    """Wrap each unit of `units` (modules that are gathered together), then the root, with fully_shard, in place.

    Afterwards every parameter is a DTensor: Shard(0) along dp_shard, Replicate along dp_replicate.
    `params_dtype` is the dtype of gathered parameters and of compute, `reduce_dtype` that of gradients on the wire.
    """
    # A 2-D mesh makes fully_shard all-reduce along the first axis. With one replica that would be a group of one.
    mesh = mesh[DP_REPLICATE, DP_SHARD] if DP_REPLICATE in stage.axes else mesh[DP_SHARD]
    policy = MixedPrecisionPolicy(param_dtype=params_dtype, reduce_dtype=reduce_dtype)
    for unit in [*units, [model]]:
        fully_shard(
            unit[0] if len(unit) == 1 else unit,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=stage.reshard_after_forward,
        )
    for module in sharded_modules(model):
        # SUM with factor 1: the default divides by the number of ranks, which would divide twice; forcing the plain
        # sum matters because gloo knows no pre-multiplied one.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def set_schedule(model: nn.Module, stage: Stage, is_last_micro: bool) -> None:
    """Prepare the root for one micro-batch: what its backward reduces and whether it frees parameters."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(stage.syncs(is_last_micro))
    model.set_requires_all_reduce(is_last_micro)  # across replicas gradients are summed once a step, in every stage
    model.set_reshard_after_backward(stage.reshards(is_last_micro))


def reshard(model: nn.Module) -> None:
    """Free every gathered parameter. Needed after an evaluation: a forward without backward leaves them gathered."""
    for module in sharded_modules(model):
        module.reshard()


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Every module that fully_shard wrapped, the root first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
