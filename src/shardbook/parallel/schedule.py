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


@dataclass(frozen=True)
class Pipeline:
    """The place of a rank among those that have a model's layers one after another, and which layers each stage has."""

    schedule: Schedule = "1f1b"
    rank: int = 0  # along pp
    ranks: int = 1
    layers: tuple[int, ...] = ()  # of each stage of the model, `chunks` of which are each rank's; empty: there is one
    is_tied: bool = False  # one weight is the first stage's embedding and the last one's head

    @property
    def chunks(self) -> int:
        return max(1, len(self.layers) // self.ranks)

    @property
    def begins(self) -> bool:
        """Whether this rank has the first stage."""
        return self.rank == 0

    @property
    def ends(self) -> bool:
        """Whether this rank has the last stage."""
        return self.rank == self.ranks - 1

    def stage(self, chunk: int) -> int:
        return chunk * self.ranks + self.rank

    def is_first(self, chunk: int) -> bool:
        return self.stage(chunk) == 0

    def is_last(self, chunk: int) -> bool:
        return self.stage(chunk) == self.chunks * self.ranks - 1

    def own_layers(self, chunk: int) -> range:
        """The numbers of the blocks of a chunk, in the whole model."""
        before = sum(self.layers[: self.stage(chunk)])
        return range(before, before + self.layers[self.stage(chunk)])

    def actions(self, micros: int) -> "list[Action]":
        return actions(self.schedule, self.rank, self.ranks, micros, self.chunks)


def deal_layers(layers: int, stages: int) -> tuple[int, ...]:
    """How many of a model's `layers` each of so many stages has, in order: as many, or one more; the last stage, which
    has the head and the loss, is the last to have more, and before it the first, which holds most activations (as
    Llama 3 405B was dealt out: arXiv 2407.21783, section 3.3.2)."""
    each, more = divmod(layers, stages)
    longer = [*range(1, stages - 1), 0][:more]
    return tuple(each + (stage in longer) for stage in range(stages))


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
