"""Progress: how far the main thread of this rank has come, and which ranks of a run stand still.

Invariant: all ranks of a run make the same marks in the same order, so of two that stand still the one with fewer marks
is behind, and the other waits for it. In the first steps (compilers, loading) and in long phases nobody is watched.
Knows nothing of what a step computes.
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
class Standing:
    """Where a rank's main thread stands, and for how long."""

    marks: int
    waits: bool  # on the host, inside a collective
    seconds: float  # since its last mark, while the rank itself was running; 0 where it is not watched
    step: int
    doing: str
    line: str  # of this package; empty where it is in none

    def dump(self, beat: int) -> str:
        """As text, which is another one for each `beat`."""
        return json.dumps([beat, *astuple(self)])

    @staticmethod
    def parse(text: bytes) -> "Standing":
        return Standing(*json.loads(text)[1:])


@dataclass
class Progress:
    """Written by the main thread, read by the heartbeat."""

    marks: int = 0
    step: int = 0
    doing: str = ""
    watched: bool = False
    blocks: bool = True  # the host waits in a collective (gloo), rather than queue it (NCCL)
    folder: Path | None = None  # where to leave what may explain a hang
    _seen: int = 0
    _seconds: float = 0.0

    def mark(self, doing: str) -> None:
        self.doing = doing
        self.marks += 1

    def finish(self, step: int, watched: bool = True) -> None:
        """This rank has finished `step`, and is `watched` from here on."""
        self.step = step + 1
        self.watched = watched
        self.mark("before its micro-batches")

    def stand(self, passed_seconds: float) -> Standing:
        """Where it stands, `passed_seconds` after it was last asked."""
        marks = self.marks
        moved = marks != self._seen or not self.watched
        self._seen, self._seconds = marks, 0.0 if moved else self._seconds + passed_seconds
        line, in_collective = _line()
        return Standing(marks, in_collective and self.blocks, round(self._seconds, 1), self.step, self.doing, line)


HERE = Progress()  # a process has one main thread


def marked(items: Iterable[T], name: str) -> Iterator[T]:
    """`items`, each a `name`, with a mark before each and one after the last."""
    each = iter(items)
    for number in count(1):
        HERE.mark(f"in {name} {number}")  # before it is made: some are work
        try:
            item = next(each)
        except StopIteration:
            break
        yield item
    HERE.mark(f"after its last {name}")


@contextlib.contextmanager
def long_phase(name: str) -> Iterator[None]:
    """Inside nobody is watched: how long a disk takes is not known."""
    watched, HERE.watched = HERE.watched, False
    HERE.mark(f"in {name}")
    yield
    HERE.watched = watched
    HERE.mark(f"after {name}")


def find_behind(standings: dict[int, Standing], seconds: float) -> list[int]:
    """The ranks that all others wait for, where each of them has stood still for more than `seconds`; else none."""
    if not standings:
        return []
    least = min((there.marks, there.waits) for there in standings.values())
    behind = [rank for rank, there in standings.items() if (there.marks, there.waits) == least]
    return behind if all(standings[rank].seconds > seconds for rank in behind) else []


def _line() -> tuple[str, bool]:
    """The line of this package that the main thread is in, and whether it is in torch's collectives below that."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    in_collective = frame is not None and frame.f_code.co_filename.startswith(COLLECTIVES)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    line = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}" if frame is not None else ""
    return line, in_collective
