"""A step as a picture: what a rank computes, what it sends, and what its host does, over time.

Invariant: the times are those that speed.py's clock notes while it goes through the list of events, and those of the
optimizer and the host that it counts; nothing is counted here. Blocks that repeat are one span, and of more than two
micro-batches the middle ones are left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from shardbook.memory.host_state import moved_bytes, plan_unit
from shardbook.parallel.layout import Layout
from shardbook.parallel.units import Unit
from shardbook.plan.cluster import Candidate
from shardbook.plan.events import step_passes
from shardbook.plan.hardware import PCIE_SHARE

SHOWN = 2  # passes at the beginning, and at the end, that are drawn; blocks at either end of a pass that are
WORDS = {
    "forward": ("computing", "computes forward"),
    "backward": ("computing", "computes backward"),
    "step": ("computing", "optimizer step"),
    "gather": ("network: parameters", "gathers parameters"),
    "reduce": ("network: gradients", "sums gradients"),
    "move": ("host", "moves parameters or gradients"),
    "update": ("host", "waits for the optimizer on the host"),
}


class Noted(NamedTuple):
    """One thing that is done for one unit."""

    number: int  # of its pass
    what: str
    unit: Unit | None
    begins: float
    ends: float


@dataclass(frozen=True)
class Span:
    """A bar of one lane: one kind of work, with nothing else of the lane in between; `busy` seconds of it."""

    lane: str
    what: str
    of: str
    begins: float
    ends: float
    busy: float


def name_units(layout: Layout) -> dict[Unit | None, tuple[int, str]]:
    """Returns the number of each unit among the rank's blocks (0: it is none), and its name for people."""
    names: dict[Unit | None, tuple[int, str]] = {None: (0, "several blocks")}
    blocks = 0
    for unit in layout.units:
        if any(unit.is_block_matrix) and not unit.is_root_like:
            blocks += 1
            names[unit] = blocks, f"block {blocks}"
        else:
            is_lookup = all(isinstance(module, nn.Embedding) for module in unit.modules)
            names[unit] = 0, "embedding" if is_lookup else "head and what else is in no block"
    return names


def lay_in_time(candidate: Candidate) -> tuple[list[Span], float]:
    """Returns the spans of a step in order, and the seconds of passes that are left out in its middle."""
    layout, recipe, cluster = candidate.layout, candidate.recipe, candidate.cluster
    events, micros = list[Noted](), recipe.train.gradient_accumulation_steps
    time = candidate.time_of(layout, lambda *noted: events.append(Noted(*noted)))
    end = max(each.ends for each in events)
    events += moves_of(layout, events, PCIE_SHARE * cluster.gpu.pcie, micros * recipe.forwards_per_micro)
    passes = max(each.number for each in events) + 1
    computing = [each for each in events if WORDS[each.what][0] == "computing"]
    first = [each.ends for each in computing if each.number < SHOWN]
    last = [each.begins for each in computing if each.number >= passes - SHOWN]
    cut = max(0.0, min(last) - max(first)) if passes > 2 * SHOWN else 0.0
    spans = list[Span]()
    for number in range(passes):
        if number < SHOWN or number >= passes - SHOWN:
            shift = cut if number >= passes - SHOWN else 0.0
            spans += join((each for each in events if each.number == number), layout, shift)
    if took := time.update:
        lane, words = WORDS["update" if layout.steps_on_host else "step"]
        spans.append(Span(lane, words, "all parameters", end - cut, end - cut + took, took))
    lanes = [lane for lane, _ in WORDS.values()]
    return sorted(spans, key=lambda span: (lanes.index(span.lane), span.begins)), cut


def moves_of(layout: Layout, noted: list[Noted], rate: float, count: int) -> list[Noted]:
    """Returns the transfers of an offloaded step at `rate` bytes a second, one after the other, none before its unit's
    computing begins that asks for it."""
    began = {(each.number, each.unit): each.begins for each in noted if each.what in ("forward", "backward")}
    moves, free = list[Noted](), 0.0
    for number, (_, events) in enumerate(step_passes(layout, count)):
        for what, unit, _ in events:
            if what in ("fetch", "arrive") and unit:
                moved = moved_bytes(layout, plan_unit(layout, unit, 0), what == "fetch", sums=what == "arrive")
                begins = max(free, began.get((number, unit), free))
                free = begins + max(moved["to_host"], moved["to_device"]) / rate
                moves.append(Noted(number, "move", unit, begins, free))
    return moves


def join(noted: Iterable[Noted], layout: Layout, shift: float) -> list[Span]:
    """Returns the spans of one pass, its blocks but the first and the last ones as one; all `shift` seconds earlier."""
    names = name_units(layout)
    count, groups = max(number for number, _ in names.values()), dict[tuple[str, str], list[Noted]]()
    for each in noted:
        number, name = names[each.unit]
        if SHOWN < number <= count - SHOWN and count > 2 * SHOWN + 1:
            name = f"blocks {SHOWN + 1} to {count - SHOWN}"
        if each.ends > each.begins:
            groups.setdefault((each.what, name), []).append(each)
    return [
        Span(
            *WORDS[what],
            name,
            min(each.begins for each in group) - shift,
            max(each.ends for each in group) - shift,
            sum(each.ends - each.begins for each in group),
        )
        for (what, name), group in groups.items()
    ]
