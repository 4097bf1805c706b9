"""The plan of a checkpoint: the rows of each tensor that each rank writes. Made at a run's first save, then reused.

Rank 0 makes it for all ranks, in Python, while the GPUs idle (docs/benchmarks/loading.md). Invariant: it is reused only
where every rank saves the same names, shapes, dtypes and rows as it was made for; else it is made anew. Not torch's own
`enable_plan_caching`: it has one cache for the whole process, whatever is saved; it compares no dtypes, so that the
metadata would keep the old one; and in torch 2.11 it also keeps a plan that failed.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, WriteItem

from shardbook.optim.elementwise import parts_of
from shardbook.ranks.distributed import sum_over_ranks


@dataclass(frozen=True)
class Planned:
    """One rank's plan of a save that succeeded. Holds no tensors."""

    asked: SavePlan  # all items that this rank has
    given: SavePlan  # the items that it writes: each replica is written once
    total_bytes: int  # that all ranks write; 0 but on rank 0


class PlanOnce(DefaultSavePlanner):
    """Plans one save of `tensors`, or reuses `last`, an earlier save's plan. Collective: it waits for all ranks."""

    def __init__(self, tensors: dict[str, Any], last: Planned | None):
        super().__init__()
        self.set_up_planner(tensors)
        asked = super().create_local_plan()
        self.asked = replace(asked, items=[self._with_bytes(item) for item in asked.items])
        # all ranks must agree: one that sent no plan while another sent a new one would lose its part of the checkpoint
        anew = sum_over_ranks(last is None or last.asked != self.asked)[0] > 0
        self.last = None if anew else last
        self.total_bytes = self.last.total_bytes if self.last else 0

    def _with_bytes(self, item: WriteItem) -> WriteItem:
        """Returns `item` with the bytes that are written: a tensor of eight bits says that its dtype is fp32."""
        parts = parts_of(self.lookup_object(item.index))
        return replace(item, bytes_io_data=BytesIOWriteData(sum(part.nbytes for part in parts)))

    def create_local_plan(self) -> SavePlan:
        return SavePlan([]) if self.last else self.asked

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if not self.last:
            all_plans, _ = super().create_global_plan(all_plans)
            facts = [item.bytes_io_data for plan in all_plans for item in plan.items]
            self.total_bytes = sum(each.nbytes for each in facts if each)
        return all_plans, Metadata({})  # each rank writes what its own items are: DCP would send it all to all

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        # what the storage adds for all ranks is this save's, also where the items are an earlier one's
        own = replace(self.last.given, storage_data=new_plan.storage_data) if self.last else new_plan
        self.given = super().finish_plan(own)
        return self.given

    def planned(self) -> Planned:
        """Returns the plan to reuse. Call it when the save has succeeded."""
        return Planned(self.asked, self.given, self.total_bytes)
