"""One step ahead: a thread makes the next step's micro-batches, and their counts travel, while this step computes.

Invariant: what was made ahead is no state. The loader's position is that of the steps taken, so a run that is stopped
or killed goes on with the step that was not trained, whatever lay ready.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from shardbook.data.loader import Loader, MicroBatch, RowError, count_totals, count_work
from shardbook.data.tokenized import Totals
from shardbook.ranks.distributed import StopFlag, begin_sum
from shardbook.ranks.exits import RunFailed
from shardbook.ranks.progress import HERE


class Step(NamedTuple):
    micros: list[MicroBatch]  # of this rank
    totals: Totals  # of all ranks
    work: list[float]  # of all ranks: tokens of rows, and pairs of tokens of one document


class StepsAhead:
    """The steps of `loader`, from where it stands. Every rank takes and begins in turn: each begins a collective."""

    def __init__(self, loader: Loader, stop: StopFlag):
        self.loader, self.stop = loader, stop
        self.next_row = loader.consumed_rows
        self.waited_seconds, self.steps = 0.0, 0
        self._thread = ThreadPoolExecutor(1, "loader")
        self._error: RowError | None = None
        self._made = self._make()
        self.begin()
        self.waited_seconds = 0.0  # nothing computed yet that could have hidden it

    def begin(self) -> None:
        """Begin the counts of the step that `take` returns next, and the micro-batches of the one after it. Call it
        when all of the running step's work is on its way."""
        began = time.perf_counter()
        HERE.mark("at the rows of its next step")
        try:
            micros = self._made.result()
        except RowError as error:  # of a step that may not be taken; the others' sum goes on
            micros, self._error = [], error
        HERE.mark("after its last micro-batch")
        self.waited_seconds += time.perf_counter() - began
        self._made = self._make()
        counts = count_totals(micros, self.loader.batching.sequences)
        self._counted: tuple[list[MicroBatch], Callable[[], list[float]]] = (
            micros,
            begin_sum(*counts, self.stop.asked, *count_work(micros)),
        )

    def take(self) -> Step | None:
        """Returns the next step, behind which the loader then stands; None where a rank was asked to stop. Raises
        RunFailed for its rows. Counts are of the host: the device is not waited for."""
        micros, wait = self._counted
        same = self.loader.batching.alike * self.loader.batching.stages  # as often each is counted
        tokens, examples, chosen, stops, *work = (count / same for count in wait())
        if self.stop.again:
            self.stop.again = False
            stops += begin_sum(self.stop.asked)()[0]
        if stops:
            return None
        if self._error:
            raise RunFailed(str(self._error)) from self._error
        self.loader.consumed_rows += self.loader.rows_per_step
        self.steps += 1
        return Step(micros, Totals(tokens, examples, chosen), work)

    def take_wait(self) -> dict[str, float]:
        """The metric of what micro-batches were waited for in a step since the last call."""
        seconds, steps = self.waited_seconds, max(1, self.steps)
        self.waited_seconds, self.steps = 0.0, 0
        return {"perf/loader_wait_seconds": seconds / steps}

    def _make(self) -> Future[list[MicroBatch]]:
        start = self.next_row
        self.next_row += self.loader.rows_per_step
        return self._thread.submit(self.loader.step_at, start)
