"""Progress: marks how far this rank's main thread is, and finds the stragglers among hung ranks.

Invariant: all ranks of a run make the same marks in the same order, so of two hung ranks the one with fewer marks is
behind, and the other waits for it. In the first steps (compilers, loading) and in long phases no rank is watched. It
knows nothing of the computation.
"""

import contextlib
import json
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch.distributed

T = TypeVar("T")
PACKAGE = str(Path(__file__).parents[1]) + "/"
COLLECTIVES = str(Path(torch.distributed.__file__).parent) + "/"


@dataclass(frozen=True)
class RankProgress:
    """The progress of a rank's main thread at one moment, and the seconds since it last moved."""

    marks: int
    waits: bool  # on the host, inside a collective
    seconds: float  # since its last mark, while the rank itself was running; 0 where it is not watched
    step: int
    doing: str
    line: str  # file and line of this package; empty where the thread is outside of it

    def dump(self, beat: int) -> str:
        """Returns it as JSON, with the number of the `beat`, so that each beat's text is a new one."""
        return json.dumps([beat, *astuple(self)])

    @staticmethod
    def parse(text: bytes) -> "RankProgress":
        return RankProgress(*json.loads(text)[1:])


@dataclass
class Progress:
    """The progress of this process: the main thread writes it, the heartbeat reads it."""

    marks: int = 0
    step: int = 0
    doing: str = ""
    watched: bool = False
    blocks: bool = True  # the host waits in a collective (gloo), rather than queue it (NCCL)
    folder: Path | None = None  # for the stacks and records of a hang
    _seen: int = 0
    _seconds: float = 0.0

    def mark(self, doing: str) -> None:
        self.doing = doing
        self.marks += 1

    def finish(self, step: int, watched: bool = True) -> None:
        """Marks `step` as finished; `watched`: whether the rank is watched from here on."""
        self.step = step + 1
        self.watched = watched
        self.mark("before its micro-batches")

    def stand(self, passed_seconds: float) -> RankProgress:
        """Returns the progress now, `passed_seconds` after the last call."""
        marks = self.marks
        moved = marks != self._seen or not self.watched
        self._seen, self._seconds = marks, 0.0 if moved else self._seconds + passed_seconds
        line, in_collective = _line()
        return RankProgress(marks, in_collective and self.blocks, round(self._seconds, 1), self.step, self.doing, line)


PROGRESS = Progress()  # a process has one main thread


def mark_each(items: Iterable[T], name: str) -> Iterator[T]:
    """Yields `items`, each called a `name`, and makes a mark before each and one after the last."""
    each = iter(items)
    for number in count(1):
        PROGRESS.mark(f"in {name} {number}")  # before the item is made, which may be work
        try:
            item = next(each)
        except StopIteration:
            break
        yield item
    PROGRESS.mark(f"after its last {name}")


@contextlib.contextmanager
def long_phase(name: str) -> Iterator[None]:
    """Suspends the watch inside: a disk may take any time."""
    watched, PROGRESS.watched = PROGRESS.watched, False
    PROGRESS.mark(f"in {name}")
    yield
    PROGRESS.watched = watched
    PROGRESS.mark(f"after {name}")


def find_stragglers(standings: dict[int, RankProgress], seconds: float) -> list[int]:
    """Returns the ranks that all others wait for, where each has made no mark for more than `seconds`; else none."""
    if not standings:
        return []
    least = min((standing.marks, standing.waits) for standing in standings.values())
    behind = [rank for rank, standing in standings.items() if (standing.marks, standing.waits) == least]
    return behind if all(standings[rank].seconds > seconds for rank in behind) else []


def _line() -> tuple[str, bool]:
    """Returns the line of this package that the main thread is in, and whether it is inside of torch.distributed."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    in_collective = frame is not None and frame.f_code.co_filename.startswith(COLLECTIVES)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    line = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}" if frame is not None else ""
    return line, in_collective
