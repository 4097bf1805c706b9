"""The stages: what a data-parallel rank keeps and when it gathers, as rows of one table.

Invariant: everything that tells one stage from another is a field of its row; code reads fields, never names. Sources:
ZeRO, arXiv 1910.02054, sections 5.1 to 5.3 (P_os, P_os+g, P_os+g+p); hybrid shard: PyTorch FSDP, arXiv 2304.11277,
section 3.2.2.
"""

from dataclasses import dataclass
from typing import Literal

from shardbook.axes import DP_REPLICATE, DP_SHARD
from shardbook.comm.collectives import ZeroppSwitches
from shardbook.recipe import Offload, Parallel, RecipeError, nearest


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


def read_switches(parallel: Parallel, shards: int, ranks_per_node: int) -> ZeroppSwitches:
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
    return ZeroppSwitches(
        weights_bits=parallel.quantize_weights,
        gradients_bits=(bits[0], bits[1]) if bits else None,
        secondary=secondary if secondary < shards else 0,  # one node: every gather is inside it already
        inside=inside if shards % inside == 0 else shards,
        block=parallel.quantize_block,
        min_params=parallel.quantize_min_params,
        error_feedback=parallel.quantize_error_feedback,
    )


def check_offload(offload: Offload, stage: Stage, switches: ZeroppSwitches) -> None:
    """Raise RecipeError where tiers contradict the stage."""
    where = f"offload.optimizer = {offload.optimizer!r} and"
    if offload.optimizer == "none":
        return
    if not stage.shards:
        raise RecipeError(
            f"{where} parallel.stage = {stage.name!r}: every rank would step all of it on the host; set "
            "parallel.stage=zero1"
        )
    if offload.params != "none" and not stage.reshard_after_forward:
        raise RecipeError(
            f"offload.params = {offload.params!r} and parallel.stage = {stage.name!r}: it keeps every parameter "
            "gathered through a step; set parallel.stage=zero3, or offload.params=none"
        )
    if switches.secondary:
        raise RecipeError(
            f"{where} parallel.secondary_shard = {switches.secondary}: secondary shards stay on the device; leave one "
            "of the two out"
        )
