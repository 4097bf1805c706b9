"""Prefetch of data: a thread makes the next step's micro-batches, whose counts are summed while this step computes.

Invariant: prefetched batches are no state. The loader's position counts only steps taken, so a run that is stopped or
killed goes on with the first step that was not trained.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardbook.data.loader import Loader, MicroBatch, RowError, count_totals, count_work
from shardbook.data.tokenized import Totals
from shardbook.ranks.distributed import begin_sum
from shardbook.ranks.exits import RunFailed
from shardbook.ranks.progress import PROGRESS
from shardbook.run.step_flags import StepFlags


class StepBatch(NamedTuple):
    micros: list[MicroBatch]  # of this rank
    totals: Totals  # of all ranks
    work: list[float]  # of all ranks: tokens of rows, and pairs of tokens of one document
    waited_seconds: float = 0.0  # in which this rank had nothing else to do than to wait for its micro-batches


@dataclass(frozen=True)
class Prefetched:
    micros: list[MicroBatch]
    error: RowError | None
    waited_seconds: float
    wait: Callable[[], list[float]]  # for the sum of counts


class BatchPrefetcher:
    """Prefetches the steps of `loader`, from its position on. All ranks call `prefetch` and `next_step` in the same
    order, with whose sums those of `flags` begin and end."""

    def __init__(self, loader: Loader, flags: StepFlags):
        self.loader, self.flags = loader, flags
        self.next_row = loader.consumed_rows
        self._thread = ThreadPoolExecutor(1, "loader")
        self._future = self._make()
        self._prefetched: Prefetched
        self.prefetch()
        self._prefetched = replace(self._prefetched, waited_seconds=0.0)  # nothing computed yet that could hide it

    def prefetch(self) -> None:
        """Begins the sums over ranks of the next step's counts and flags, and to make the micro-batches of the step
        after it. Call it when all of the running step's work is launched. Collective."""
        began, error = time.perf_counter(), None
        PROGRESS.mark("at the rows of its next step")
        try:
            micros = self._future.result()
        except RowError as failure:  # for `next_step`: the step may not be taken, and the others wait in the sum
            micros, error = [], failure
        PROGRESS.mark("after its last micro-batch")
        waited = time.perf_counter() - began
        self._future = self._make()
        batching = self.loader.batching
        wait = begin_sum(*count_totals(micros, batching.sequences, batching.slice_number), *count_work(micros))
        self._prefetched = Prefetched(micros, error, waited, wait)
        self.flags.begin()

    def next_step(self) -> StepBatch | None:
        """Returns the next step, and moves the loader's position past it; None where a rank was asked to stop. Raises
        RunFailed for rows that cannot be read. Counts are summed on the host: no device sync. Collective."""
        batch = self._prefetched
        tokens, examples, chosen, *work = (count / self.loader.batching.copies for count in batch.wait())
        if self.flags.stops():
            return None
        if batch.error:
            raise RunFailed(str(batch.error)) from batch.error
        self.loader.consumed_rows += self.loader.rows_per_step
        return StepBatch(batch.micros, Totals(tokens, examples, chosen), work, batch.waited_seconds)

    def next_steps(self, count: int) -> Iterator[StepBatch]:
        """Yields the next `count` steps, or fewer where a rank was asked to stop."""
        for _ in range(count):
            if (batch := self.next_step()) is None:
                return
            yield batch

    def _make(self) -> Future[list[MicroBatch]]:
        start = self.next_row
        self.next_row += self.loader.rows_per_step
        return self._thread.submit(self.loader.step_at, start)
