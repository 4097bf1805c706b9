"""Rows: reads a step's loss and norm from the device without a wait, and logs them with the rest of its row.

Invariant: a value that is not finite ends the run with its step's own number, before it is saved; so does the norm of
an earlier step, of which nothing was read (nonfinite.py). A row is logged when the next step's work is launched (on a
CPU: when its step is done), and before an evaluation, samples, a save or the end.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.ranks.exits import RunFailed
from shardbook.ranks.signals import StopFlag
from shardbook.run.console import Console
from shardbook.run.metrics import DeviceEvent, Metrics, Recorder, StepTimer
from shardbook.run.nonfinite import FirstNonFinite

RowPart = Metrics | Callable[[], Metrics]  # of a row: known metrics, or a function to call when the device has them
LAST_SECONDS = 10.0  # for which a failing run waits for its last row: with a lost rank it would wait for ever


def read_loss(
    sums: Tensor, names: list[str], norm: Tensor, step: int, nonfinite: FirstNonFinite
) -> tuple[Callable[[], Metrics], DeviceEvent]:
    """Begins to add `sums` [1 + metrics] of this rank, the loss first, over ranks and to read them with the gradient
    norm and the first step that was `nonfinite`. Returns a function that waits for the metrics, and the moment from
    which on it does not wait. Collective.

    The function raises RunFailed where a value is not finite: to train on would only save broken weights.
    """
    dist.all_reduce(sums)
    # torch takes pinned memory for such a copy by itself; a tensor on the host is not copied
    coming = [tensor.to("cpu", non_blocking=True).view(-1) for tensor in (sums, norm, nonfinite.first)]
    moment = DeviceEvent()

    @cache
    def read() -> Metrics:
        moment.wait()
        values = [value for tensor in coming[:2] for value in tensor.tolist()]
        metrics: Metrics = dict(zip([*names, "train/grad_norm"], values, strict=True))
        both, sections = f"train/loss is {values[0]} and train/grad_norm {values[-1]}", ""
        nonfinite.check(step, coming[2].tolist(), both)
        if broken := [name for name, value in metrics.items() if not math.isfinite(value)]:
            if names[0] not in broken:
                both, sections = f"{broken[0]} is {metrics[broken[0]]}", "[preference], [distill] and "
            raise RunFailed(f"step {step}: {both}; lower optim.learning_rate, or look at {sections}its rows")
        return metrics

    return read, moment


class Rows(contextlib.AbstractContextManager["Rows"]):
    """Logs the rows of the steps inside, in order; at most one waits for the device. All ranks make the same reads."""

    def __init__(
        self,
        recorder: Recorder,
        console: Console,
        names: list[str],
        pace: StepTimer,
        stop: StopFlag,
        nonfinite: FirstNonFinite,
    ):
        self.recorder, self.console, self.names, self.pace, self.stop = recorder, console, names, pace, stop
        self.nonfinite = nonfinite
        self.lags = torch.cuda.is_available()  # whether a read at once would make the host wait for the device
        self.step = 0  # the last one read
        self._read: Callable[[], Metrics] = dict
        self._moment: DeviceEvent | None = None  # from which on it can be read; None: it was read
        self._waiting: tuple[int, list[RowPart]] | None = None

    def read(self, step: int, sums: Tensor, norm: Tensor) -> Callable[[], Metrics]:
        """Begins to read the loss and norm of `step`, unless it has; returns its part of a row. Collective."""
        if step != self.step:
            self.flush()
            self.step = step
            self._read, self._moment = read_loss(sums, self.names, norm, step, self.nonfinite)
            if not self.lags:
                self.flush()
        return self._read

    def log(self, step: int, parts: list[RowPart]) -> None:
        """Logs and shows the row of `step`, once its values are on the host; without parts it is only shown."""
        if self._waiting:
            self.flush()
        self._waiting = step, parts
        if self._moment is None:
            self.flush()

    def flush(self) -> None:
        """Waits for the values under way, and logs the row that waits for them."""
        self._read()
        self._moment = None
        if self._waiting:
            (step, parts), self._waiting = self._waiting, None
            metrics: Metrics = {}
            for part in parts:
                metrics |= part() if callable(part) else part
            if metrics:
                self.recorder.log(step, metrics)
            self.console.show_step(step, metrics)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Logs the waiting row before an evaluation, samples or a save, and leaves the body out of steps' time. A
        signal that arrives meanwhile ends the run after it."""
        self.flush()
        with self.pace.paused():
            yield
        self.stop.again = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Logs the last row; of a failing run too, if the device computes it within LAST_SECONDS."""
        if error is None:
            self.flush()
        elif self._waiting and self._moment:
            self.nonfinite.alone = True
            with contextlib.suppress(Exception):  # the run ends by its own error, also where the device is broken
                until = time.perf_counter() + LAST_SECONDS
                while not self._moment.has_come() and time.perf_counter() < until:
                    time.sleep(0.01)
                if self._moment.has_come():
                    self.flush()
