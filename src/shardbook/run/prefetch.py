"""Prefetch of data: a thread makes the next step's micro-batches, whose counts are summed while this step computes.

Invariant: prefetched batches are no state. The loader's position counts only steps taken, so a run that is stopped or
killed goes on with the first step that was not trained.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from shardbook.data.loader import Loader, MicroBatch, RowError, count_totals, count_work
from shardbook.data.tokenized import Totals
from shardbook.ranks.distributed import begin_sum
from shardbook.ranks.exits import RunFailed
from shardbook.ranks.progress import PROGRESS
from shardbook.ranks.signals import StopFlag

NO_FLAGS = [0.0, 0.0, 0.0]  # of a run that saves nothing beside its steps


class StepBatch(NamedTuple):
    micros: list[MicroBatch]  # of this rank
    totals: Totals  # of all ranks
    work: list[float]  # of all ranks: tokens of rows, and pairs of tokens of one document


class BatchPrefetcher:
    """Prefetches the steps of `loader`, from its position on. All ranks call `prefetch` and `next_step` in the same
    order. What `flags` returns, three numbers, is summed with the counts; `take_flag_sums` takes the sums."""

    def __init__(
        self,
        loader: Loader,
        stop: StopFlag,
        flags: Callable[[], list[float]] = NO_FLAGS.copy,
        take_flag_sums: Callable[[list[float]], object] = len,
    ):
        self.loader, self.stop, self.flags, self.take_flag_sums = loader, stop, flags, take_flag_sums
        self.next_row = loader.consumed_rows
        self.waited_seconds, self.steps = 0.0, 0
        self._thread = ThreadPoolExecutor(1, "loader")
        self._error: RowError | None = None
        self._made = self._make()
        self.prefetch()
        self.waited_seconds = 0.0  # nothing computed yet, so nothing could hide it

    def prefetch(self) -> None:
        """Begins the sum over ranks of the next step's counts, and to make the micro-batches of the step after it. Call
        it when all of the running step's work is launched. Collective."""
        began = time.perf_counter()
        PROGRESS.mark("at the rows of its next step")
        try:
            micros = self._made.result()
        except RowError as error:  # raised by `next_step`: the step may not be taken, and the others wait in the sum
            micros, self._error = [], error
        PROGRESS.mark("after its last micro-batch")
        self.waited_seconds += time.perf_counter() - began
        self._made = self._make()
        counts = count_totals(micros, self.loader.batching.sequences)
        self._counted = micros, begin_sum(*counts, *count_work(micros), self.stop.asked, *self.flags())

    def next_step(self) -> StepBatch | None:
        """Returns the next step, and moves the loader's position past it; None where a rank was asked to stop. Raises
        RunFailed for rows that cannot be read. Counts are summed on the host: no device sync. Collective."""
        micros, wait = self._counted
        same = self.loader.batching.tp_size * self.loader.batching.pp_size  # ranks that count the same tokens
        *counts, stops, done, failed, hopeless = wait()
        tokens, examples, chosen, *work = (count / same for count in counts)
        self.take_flag_sums([done, failed, hopeless])
        if self.stop.again:
            self.stop.again = False
            stops += begin_sum(self.stop.asked)()[0]
        if stops:
            return None
        if self._error:
            raise RunFailed(str(self._error)) from self._error
        self.loader.consumed_rows += self.loader.rows_per_step
        self.steps += 1
        return StepBatch(micros, Totals(tokens, examples, chosen), work)

    def next_steps(self, count: int) -> Iterator[StepBatch]:
        """Yields the next `count` steps, or fewer where a rank was asked to stop."""
        for _ in range(count):
            if (batch := self.next_step()) is None:
                return
            yield batch

    def take_wait(self) -> dict[str, float]:
        """Returns the metric of the mean seconds a step that were waited for micro-batches since the last call."""
        seconds, steps = self.waited_seconds, max(1, self.steps)
        self.waited_seconds, self.steps = 0.0, 0
        return {"perf/loader_wait_seconds": seconds / steps}

    def _make(self) -> Future[list[MicroBatch]]:
        start = self.next_row
        self.next_row += self.loader.rows_per_step
        return self._thread.submit(self.loader.step_at, start)
