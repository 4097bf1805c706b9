"""Pipeline schedules: the order in which a rank runs micro-batches forward and backward through its chunks of layers.

gpipe (Huang et al., arXiv 1811.06965), 1f1b (PipeDream-Flush: Narayanan et al., arXiv 2006.09503, section 2.2) and
interleaved 1f1b (Narayanan et al., arXiv 2104.04473, section 2.2). Arithmetic alone: no rank need exist, so a plan can
read the table that a run follows. Invariant: in every chunk backwards run in the order of micro-batches, so all three
schedules add up a gradient in the same order, to the bit; and each forward comes before its backward.
"""

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved"]


@dataclass(frozen=True)
class Action:
    """The forward or backward of one micro-batch through one chunk of a rank's layers. Chunk c of rank r is pipeline
    stage c * ranks + r of the model."""

    is_forward: bool
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{'F' if self.is_forward else 'B'}{self.micro}" + f".{self.chunk}" * bool(self.chunk)


@dataclass(frozen=True)
class Pipeline:
    """A rank's number along pp, the schedule, and the number of layers in each pipeline stage."""

    schedule: Schedule = "1f1b"
    rank: int = 0  # along pp
    ranks: int = 1
    layers: tuple[int, ...] = ()  # of each stage; each rank has `chunks` stages; empty: there is one stage
    is_tied: bool = False  # one trained weight is the first stage's embedding and the last stage's head

    @property
    def chunks(self) -> int:
        return max(1, len(self.layers) // self.ranks)

    @property
    def has_first_pp_stage(self) -> bool:
        """Returns whether this rank has the first stage."""
        return self.rank == 0

    @property
    def has_last_pp_stage(self) -> bool:
        """Returns whether this rank has the last stage."""
        return self.rank == self.ranks - 1

    def pp_stage(self, chunk: int) -> int:
        return chunk * self.ranks + self.rank

    def is_first(self, chunk: int) -> bool:
        return self.pp_stage(chunk) == 0

    def is_last(self, chunk: int) -> bool:
        return self.pp_stage(chunk) == self.chunks * self.ranks - 1

    def own_layers(self, chunk: int, count: int) -> range:
        """Returns the numbers of the blocks of a chunk, of a model of `count` blocks."""
        if not self.layers:
            return range(count)
        before = sum(self.layers[: self.pp_stage(chunk)])
        return range(before, before + self.layers[self.pp_stage(chunk)])

    def actions(self, micros: int) -> "list[Action]":
        return actions(self.schedule, self.rank, self.ranks, micros, self.chunks)


def layers_per_pp_stage(layers: int, stages: int) -> tuple[int, ...]:
    """Returns how many of a model's `layers` each of `stages` pipeline stages has, in order. Numbers differ by at most
    one. The last stage, which has the head and the loss, is never the longer; the first, which holds most activations,
    only where all between them are (as for Llama 3 405B: arXiv 2407.21783, section 3.3.2)."""
    each, more = divmod(layers, stages)
    longer = [*range(1, stages - 1), 0][:more]
    return tuple(each + (stage in longer) for stage in range(stages))


def actions(schedule: Schedule, rank: int, ranks: int, micros: int, chunks: int = 1) -> list[Action]:
    """Returns the actions of `rank` of `ranks` in a step of `micros` micro-batches, in order. `chunks`: chunks of
    layers on each rank; more than one only if interleaved, where micro-batches run in groups of `ranks`.

    A single rank runs each micro-batch forward and backward, one after another, whatever the schedule.
    """
    total, warmup = micros * chunks, in_flight(schedule, rank, ranks, micros, chunks) - 1
    forwards = [_place(number, ranks, chunks, True) for number in range(total)]
    backwards = [_place(number, ranks, chunks, False) for number in range(total)]
    order = forwards[:warmup]
    for number, backward in enumerate(backwards):
        order += forwards[warmup + number : warmup + number + 1]
        order.append(backward)
    return order


def _place(number: int, ranks: int, chunks: int, is_forward: bool) -> Action:
    """Returns the `number`-th forward, or backward, of a rank: `ranks` micro-batches a chunk, then the next chunk."""
    group, within = divmod(number, ranks * chunks)
    chunk, place = divmod(within, ranks)
    return Action(is_forward, chunk if is_forward else chunks - 1 - chunk, group * ranks + place)


def in_flight(schedule: Schedule, rank: int, ranks: int, micros: int, chunks: int = 1) -> int:
    """Returns the most passes (of one micro-batch through one chunk) whose activations `rank` holds at once."""
    if ranks == 1:
        return 1
    if schedule == "gpipe":
        return micros
    if schedule == "1f1b":
        return min(micros, ranks - rank)
    return min(micros * chunks, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1)


def bubble(ranks: int, micros: int, chunks: int = 1) -> float:
    """Returns the time that a rank waits for others, over its computing: in every schedule, where links cost
    nothing."""
    return (ranks - 1) / (chunks * micros)
