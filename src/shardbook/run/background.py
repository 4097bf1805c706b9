"""A checkpoint that a thread of each rank writes while steps go on (`train.async_save`).

The main thread plans it and copies what this rank writes into buffers that are made once; the thread writes, hashes and
syncs, and does nothing else. Invariant: the thread begins no collective. Whether a rank's thread is done or failed is
summed between steps; rank 0 publishes when all are done, so a checkpoint is published only when all of it is durable.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from shardbook.ranks.distributed import begin_sum
from shardbook.ranks.exits import RunFailed
from shardbook.ranks.progress import long_phase
from shardbook.recipe import first_line
from shardbook.run import operations
from shardbook.run.item_storage import ItemWriter, bytes_of, items_of, parts_of
from shardbook.run.stored_items import Facts, facts_of_ranks, write_items

WRITE_SECONDS = 1800  # for which a thread may take to write: one that hangs would be waited for without an end


class StagingWriter(ItemWriter):
    """Copies what an ItemWriter would write into `buffers`, which are kept from save to save. Its `publish` is told the
    directory when all ranks have copied, and no files: none is written yet."""

    def __init__(self, *given: Any, buffers: list[Tensor]):
        super().__init__(*given)
        self.buffers, self.staged = buffers, list[tuple[Facts, list[memoryview]]]()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        self.check_finite(plan, planner)
        self.side, number, devices = plan.storage_data, 0, set[torch.device]()
        for facts, tensor in items_of(plan, planner):
            parts = parts_of(tensor)
            self.staged.append((facts, [self._copy(part, number + more) for more, part in enumerate(parts)]))
            number += len(parts)
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # the next step changes what is copied
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([WriteResult(MetadataIndex(f"rank-{self.rank}"), 0, {})])
        return done

    def _copy(self, part: Tensor, number: int) -> memoryview:
        """Begins to copy a tensor into the buffer `number`, also one that is on the host: a step changes it."""
        if number == len(self.buffers):
            self.buffers.append(torch.empty(0))
        if (self.buffers[number].shape, self.buffers[number].dtype) != (part.shape, part.dtype):
            self.buffers[number] = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
        return bytes_of(self.buffers[number].copy_(part, non_blocking=part.is_cuda))


@dataclass
class Background:
    """The save that is under way, if one is. All ranks make the same calls."""

    buffers: list[Tensor] = field(default_factory=list)
    failures: int = 0  # saves in a row that failed
    published: int = -1  # the step of the last that was published
    step: int = -1  # the step of the save that is under way; -1: none is

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._asked: Callable[[], list[float]] | None = None
        self._publish: Callable[[dict[str, Facts]], None] | None = None  # on rank 0
        self._publishing = False
        self._work: Future[Any]
        self._side: Path

    def begin(self, step: int, writer: StagingWriter, publish: Callable[[dict[str, Facts]], None] | None) -> None:
        """Begins to write what was staged. `publish`, on rank 0, takes the facts of all ranks' files."""
        assert writer.side
        self.step, self._side, self._publish = step, writer.side, publish
        self._asked, self._publishing = None, False
        self._work = self._thread.submit(write_items, writer.side, writer.rank, writer.staged)

    def look(self) -> None:
        """Takes the result of the sum that was begun after the step before, and begins another. Collective."""
        if self._asked:
            self._settle(self._asked())
        self._asked = self._begin_sum() if self.step >= 0 else None

    @long_phase("a checkpoint")
    def finish(self) -> None:
        """Waits until the save that is under way is published, or failed. Collective."""
        while self.step >= 0:
            if self._asked:
                self._settle(self._asked())
                self._asked = None
                continue
            if not wait([self._work], WRITE_SECONDS).done:
                said = f"rank {dist.get_rank()} has not written its part for {WRITE_SECONDS} s"
                raise RunFailed(f"checkpoint of step {self.step}: {said}; see what its disk does")
            self._settle(self._begin_sum()())

    def _begin_sum(self) -> Callable[[], list[float]]:
        failed = self._work.done() and self._work.exception() is not None
        return begin_sum(self._work.done() and not failed, failed)

    def _settle(self, result: list[float]) -> None:
        """Acts on what all ranks know alike."""
        done, failed = result
        if failed and done + failed == dist.get_world_size():  # else one still writes into what is removed
            self._fail()
        elif done == dist.get_world_size() and self._publishing:
            self.published, self.failures, self.step = self.step, 0, -1
        elif done == dist.get_world_size():
            self._publishing = True
            if publish := self._publish:
                self._work = self._thread.submit(_publish, publish, self._side, dist.get_world_size())

    def _fail(self) -> None:
        step, self.step, self._asked = self.step, -1, None
        self.failures += 1
        error = self._work.exception()
        reason = f"{type(error).__name__}: {first_line(error)}" if error else "another rank said why"
        said = f"checkpoint of step {step}: cannot be written ({reason})"
        if dist.get_rank() == 0:
            operations.remove_tree(self._side)
        if self.failures > 1:
            raise RunFailed(f"{said}, the second in a row")
        if error:
            print(f"warning  {said}; it is tried again when the next is due", flush=True)


def _publish(publish: Callable[[dict[str, Facts]], None], side: Path, ranks: int) -> None:
    publish(facts_of_ranks(side, ranks))
