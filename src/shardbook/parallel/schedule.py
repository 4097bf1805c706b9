"""The order of a pipeline's work: which micro-batch runs forward or backward in which chunk of layers, on each rank.

gpipe (Huang et al., arXiv 1811.06965), 1f1b (PipeDream-Flush: Narayanan et al., arXiv 2006.09503, section 2.2) and
interleaved 1f1b (Narayanan et al., arXiv 2104.04473, section 2.2). Arithmetic alone: no rank need exist, so a plan can
read the table that a run follows. Invariant: in every chunk backwards run in the order of micro-batches, so all three
add up a gradient in the same order, to the bit; and each forward comes before its backward.
"""

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved"]


@dataclass(frozen=True)
class Action:
    """Forward or backward of one micro-batch through one chunk of a rank's layers. Chunk c of rank r is stage
    c * ranks + r of the model."""

    is_forward: bool
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{'F' if self.is_forward else 'B'}{self.micro}" + f".{self.chunk}" * bool(self.chunk)


def actions(schedule: Schedule, rank: int, ranks: int, micros: int, chunks: int = 1) -> list[Action]:
    """What `rank` of `ranks` does in a step of `micros` micro-batches, in order; `chunks` of layers on each rank, more
    than one only if interleaved, whose micro-batches come in groups of `ranks`.

    One rank runs each micro-batch forward and backward, one after another, whatever the schedule: today's loop.
    """
    total = micros * chunks
    before = min(in_flight(schedule, rank, ranks, micros, chunks) - 1, total)
    if schedule == "gpipe" and ranks > 1:
        before = total
    forwards = [_place(number, ranks, chunks, True) for number in range(total)]
    backwards = [_place(number, ranks, chunks, False) for number in range(total)]
    order = forwards[:before]
    for number, backward in enumerate(backwards):
        order += forwards[before + number : before + number + 1]
        order.append(backward)
    return order


def _place(number: int, ranks: int, chunks: int, is_forward: bool) -> Action:
    """The `number`-th forward, or backward, of a rank: `ranks` micro-batches through a chunk, then through the next."""
    group, within = divmod(number, ranks * chunks) if chunks > 1 else (0, number)
    chunk, place = divmod(within, ranks) if chunks > 1 else (0, within)
    return Action(is_forward, chunk if is_forward else chunks - 1 - chunk, group * ranks + place)


def in_flight(schedule: Schedule, rank: int, ranks: int, micros: int, chunks: int = 1) -> int:
    """Most chunk-passes whose activations `rank` holds at once: each is a micro-batch's through one of its chunks."""
    if ranks == 1:
        return 1
    if schedule == "gpipe":
        return micros
    if schedule == "1f1b":
        return min(micros, ranks - rank)
    return min(micros * chunks, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1)


def bubble(ranks: int, micros: int, chunks: int = 1) -> float:
    """Time in which a rank waits for others, over its computing: of every schedule, where links cost nothing."""
    return (ranks - 1) / (chunks * micros)
