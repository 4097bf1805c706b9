"""The stages: the shards that a data-parallel rank keeps and when it gathers, as rows of one table.

Invariant: everything that tells one stage from another is a field of its row; code reads fields, never names. Sources:
ZeRO, arXiv 1910.02054, sections 5.1 to 5.3 (P_os, P_os+g, P_os+g+p); hybrid shard: PyTorch FSDP, arXiv 2304.11277,
section 3.2.2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardbook.axes import DP_REPLICATE, DP_SHARD
from shardbook.recipe.sections import RecipeError, nearest


@dataclass(frozen=True)
class Stage:
    """A row of the table. N: ranks along dp_shard; k: micro-batches in a step."""

    name: str
    axes: tuple[str, ...]  # mesh axes that this stage may make larger than 1
    reshard_after_forward: bool  # parameters at rest: 1/N (True), or gathered from first forward to optimizer step
    reduce_every_micro: bool  # gradients while accumulating: 1/N, reduce-scattered k times (True), or unsharded, once
    switches: Literal["no", "may", "must"]  # ZeRO++'s three: refused, allowed, or at least one set
    source: str

    @property
    def shards(self) -> bool:
        """True where a rank may keep a shard in place of everything."""
        return DP_SHARD in self.axes

    def syncs(self, is_last_micro: bool) -> bool:
        """Returns whether this micro-batch's backward reduce-scatters gradients."""
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
# keys of [parallel] that go with any stage; ZeRO++'s three, with the values that a user would first set
OF_ANY = ("tp_size", "cp_size", "ep_size", "pp_size", "pipeline_schedule", "pipeline_chunks")
SWITCHES = {"quantize_weights": 8, "quantize_gradients": [8, 4], "secondary_shard": "node"}


def find_stage(name: str) -> Stage:
    """Returns the row of a stage's name or alias. Raises RecipeError with the nearest spelling."""
    known = [*STAGES, *ALIASES]
    if name not in known:
        raise RecipeError(f"parallel.stage = {name!r}: must be one of {', '.join(known)}{nearest(name, known)}")
    return STAGES[ALIASES.get(name, name)]


def stages_where(fits: Callable[[Stage], bool]) -> str:
    """Returns the names of the stages that `fits` accepts, aliases too, as `zero3|fsdp`."""
    return "|".join(name for name in (*STAGES, *ALIASES) if fits(find_stage(name)))
