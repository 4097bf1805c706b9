"""Async save: a checkpoint that a thread of each rank writes while steps go on (`train.async_save`).

The main thread lists what this rank writes; the thread copies it into a buffer on the host that is made once, while the
next step's forward and backward run, which change none of it; then it checks, writes, hashes and syncs. The optimizer's
step waits for the copy; with `wait` the next step does. Invariant: the thread begins no collective. Whether a rank's
thread is done or failed is a flag that ranks sum beside each step (step_flags.py); rank 0 publishes when all are done,
so what is published is durable on all of them. It knows neither what the tensors are nor the files they go to.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.arithmetic import round_up
from shardbook.memory.direct_io import COPY_ALIGN, page_buffer
from shardbook.ranks.distributed import sum_over_ranks
from shardbook.ranks.exits import RunFailed
from shardbook.ranks.progress import long_phase
from shardbook.recipe import first_line
from shardbook.run.checkpoint import disk
from shardbook.run.checkpoint.format import Facts, facts_of_ranks
from shardbook.terminal import print_line

WRITE_SECONDS = 1200  # for which a thread may write; below gloo's limit, by which the others would end unnamed
# what a rank writes: of each item its name, offsets, sizes, shape and dtype, and the tensors whose bytes it is
Items = list[tuple[list[Any], list[Tensor]]]
Publish = Callable[[dict[str, Facts]], None]


class StagedItems:
    """One save's items of this rank, taken on the main thread; `copy` and `write` are the thread's. `write_copies`
    checks and writes what it is given."""

    def __init__(self, items: Items, write_copies: Callable[[Items], object]):
        self.items, self.write_copies = items, write_copies
        devices = {part.device for _, parts in items for part in parts if part.is_cuda}
        self.device = next(iter(devices), None)
        if self.device:
            self.ready, self.copied = torch.cuda.Event(), torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(self.device))

    def copy(self, buffer: list[Tensor], streams: dict[torch.device, torch.cuda.Stream]) -> None:
        """Launches the copies of all tensors, of those on the host too, into the one `buffer`, which is made anew where
        it is too small. On a GPU in a stream of its own, from `streams`; `copied` says when they are done."""
        parts = [part for _, parts in self.items for part in parts]
        begins = [0, *accumulate(round_up(part.nbytes, COPY_ALIGN) for part in parts)]
        if not buffer or len(buffer[0]) < begins[-1]:
            buffer.clear()  # before the new one is made
        _reserve(buffer, begins[-1], self.device)
        copies = dict[int, Tensor]()
        with self._stream(streams):
            for number in sorted(range(len(parts)), key=lambda number: parts[number].is_cuda):  # the host's first
                copies[number] = _copy(parts[number], buffer[0], begins[number])
        numbers = count()
        self.copies = [(head, [copies[next(numbers)] for _ in parts]) for head, parts in self.items]

    @contextlib.contextmanager
    def _stream(self, streams: dict[torch.device, torch.cuda.Stream]) -> Iterator[None]:
        """Runs the body in a stream of its own, on a GPU; `copied` is the end of what it launched, even if it fails."""
        if not self.device:
            yield
            return
        if self.device not in streams:  # once: torch deals 32 out in turn, and others have some of them
            streams[self.device] = torch.cuda.Stream(self.device)
        stream = streams[self.device]
        stream.wait_event(self.ready)
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                self.copied.record()

    def write(self, copying: Future[None]) -> None:
        """Writes the copies once they are complete."""
        copying.result()
        if self.device:
            self.copied.synchronize()
        self.items.clear()  # random states and the like, kept until they were copied
        self.write_copies(self.copies)


def _reserve(buffer: list[Tensor], size: int, device: torch.device | None) -> None:
    """Makes the one `buffer`, if there is none, with its pages: else the first copy would take 20 times as long."""
    if pin := device is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # a thread has its own
    if not buffer:
        buffer.append(page_buffer(size, pin).zero_())


def _copy(part: Tensor, buffer: Tensor, begin: int) -> Tensor:
    into = buffer[begin : begin + part.nbytes].view(part.dtype).view(part.shape)
    return into.copy_(part, non_blocking=part.is_cuda)


@dataclass
class AsyncSave:
    """The save that is under way, if one is. All ranks make the same calls. Its buffer, of `size` bytes for tensors of
    `device`, is made beside the first steps; where that fails the first save tries again."""

    size: int = 0
    device: torch.device | None = None
    waits: bool = False  # `begin` does, until all is copied: no copy is beside a step
    failures: int = 0  # saves in a row that failed
    published: int = -1  # the step of the last that was published
    step: int = -1  # the step of the save that is under way; -1: none is

    def __post_init__(self) -> None:
        self.buffer = list[Tensor]()  # none, or one
        self.streams = dict[torch.device, torch.cuda.Stream]()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._work: Future[Any] = self._thread.submit(_reserve, self.buffer, self.size, self.device)
        self._publish: Publish | None = None  # on rank 0
        self._publishing, self._flagged = False, (-1, False)
        self._copying: tuple[StagedItems, Future[None]] | None = None
        self._side: Path | None = None  # the directory that is written

    def begin(self, step: int, staged: StagedItems, side: Path, publish: Publish | None) -> None:
        """Begins to copy and write `staged` into the directory `side`. `publish`, on rank 0, takes the facts of all
        files."""
        self.step, self._side, self._publish, self._publishing = step, side, publish, False
        copying = self._thread.submit(staged.copy, self.buffer, self.streams)
        self._copying = staged, copying
        self._work = self._thread.submit(staged.write, copying)
        if self.waits:
            self.wait_copied()
            if staged.device:
                staged.copied.synchronize()  # the host too, else the copy's time would be the next step's

    def wait_copied(self, *of_hook: Any) -> None:
        """Waits until nothing of the save is read any more: on a GPU the device does, the host for launches alone. Call
        it, or have the optimizer's step call it, before what is saved changes."""
        if self._copying:
            (staged, copying), self._copying = self._copying, None
            wait([copying])
            if staged.device:
                torch.cuda.current_stream(staged.device).wait_event(staged.copied)

    def flags(self) -> list[float]:
        """Returns whether this rank's thread is done, has failed, and in a way that no other try helps."""
        self._flagged = self.step, self._publishing
        if self.step < 0 or not self._work.done():
            return [False, False, False]
        error = self._work.exception()
        return [not error, bool(error), isinstance(error, RunFailed)]

    def take_flag_sums(self, sums: list[float]) -> None:
        """Acts on the sums over ranks of their flags, which are the same on all."""
        done, failed, fatal = sums
        if self.step < 0 or self._flagged != (self.step, self._publishing):
            return  # of a save that was waited for since
        if failed and done + failed == dist.get_world_size():  # else one still writes into what is removed
            self._abort(is_fatal=fatal > 0)
        elif done == dist.get_world_size() and self._publishing:
            self.published, self.failures, self.step = self.step, 0, -1
        elif done == dist.get_world_size():
            self._publishing = True
            if (publish := self._publish) and (side := self._side):
                self._work = self._thread.submit(lambda: publish(facts_of_ranks(side, dist.get_world_size())))

    @long_phase("a checkpoint")
    def finish(self) -> None:
        """Waits until the save that is under way is published, or failed. Collective."""
        while self.step >= 0:
            if not wait([self._work], WRITE_SECONDS).done:
                late = f"rank {dist.get_rank()} has not written its part for {WRITE_SECONDS} s"
                raise RunFailed(f"checkpoint of step {self.step}: {late}; check its disk")
            self.take_flag_sums(sum_over_ranks(*self.flags()))

    def _abort(self, is_fatal: bool) -> None:
        """Removes what was written of the save. Raises RunFailed where it `is_fatal`: no other try helps."""
        step, self.step = self.step, -1
        error = self._work.exception()
        reason = f"{type(error).__name__}: {first_line(error)}" if error else "another rank said why"
        message = f"checkpoint of step {step}: cannot be written ({reason})"
        if self._side and dist.get_rank() == 0:
            disk.remove_tree(self._side)
        if is_fatal:
            raise error if isinstance(error, RunFailed) else RunFailed(message)
        self.report_failure(message, is_shown=bool(error))

    def report_failure(self, message: str, is_shown: bool) -> None:
        """Prints, where it `is_shown`, that a save failed. Raises RunFailed where the one before failed too."""
        self.failures += 1
        if self.failures > 1:
            raise RunFailed(f"{message}, the second in a row")
        if is_shown:
            print_line(f"warning  {message}; it is tried again when the next is due", any_rank=True)
