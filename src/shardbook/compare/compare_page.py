"""report.html: the page of a comparison.

Invariant: a panel shows numbers that outcomes measured and nothing else; a number not measured has no panel.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import quantiles
from typing import Any

from shardbook.axes import IN_BLOCKS, MODEL_AXES
from shardbook.compare.outcome import PREFIXES, Outcome, differences, first_difference, judge
from shardbook.compare.page import HELD_OUT, Panel, panel_of, render
from shardbook.terminal import readable_bytes

ROW = "fastest", "first quarter", "median", "third quarter", "slowest"  # of a panel of spans


def write_page(path: Path, title: str, outcomes: list[Outcome]) -> None:
    """Writes the page of `outcomes`; the first is the baseline of the others."""
    finished = [outcome for outcome in outcomes if outcome.finished]
    verdicts = Panel("Verdicts", "", summary_rows(outcomes), caption=f"Each variant beside {outcomes[0].name}")
    makers = (losses_of, differences_of, memory_of, peak_of, traffic_of, throughput_of, mfu_of)
    panels = [verdicts, *(make(finished) for make in makers)]
    render(path, title, [describe(finished[0])], [panel for panel in panels if panel])


def describe(base: Outcome) -> str:
    """Returns the facts that all variants share: model, rows, ranks, machine, versions."""
    settings, facts = base.settings, base.facts
    words = [
        f"{settings['model']['path']} on {settings['data']['train']}",
        f"{base.rows} rows of {settings['data']['max_length']} tokens a step",
        f"{facts['world_size']} ranks on {facts.get('gpu', 'CPU cores')}",
        f"computed in {settings['precision']['params']}, reduced in {settings['precision']['reduce']}",
        f"torch {facts['torch']}",
    ]
    if revision := facts.get("git_revision"):
        words.append(f"shardbook {facts['shardbook']} at {revision[:10]}")
    return "; ".join(words) + "."


def summary_rows(outcomes: list[Outcome]) -> list[tuple[str, dict[str, str]]]:
    """Returns the rows of the table on the page and the terminal: a variant, and its values by heading."""
    base = outcomes[0]
    named = [axis for axis in MODEL_AXES if any(axis in one.mesh for one in outcomes)]
    outer, inner = (", ".join(axis for axis in named if (axis in IN_BLOCKS) is inside) for inside in (False, True))
    mesh = f"({outer} x) " * bool(outer) + "replicas x shards" + f" (x {inner})" * bool(inner)
    rows = []
    for one in outcomes:
        sizes = (f"{axis} {size}" if axis in named else str(size) for axis, size in one.mesh.items())
        row = {
            "verdict": judge(one, base),
            mesh: " x ".join(sizes),
            "last loss": f"{one.losses[-1]:.4f}" if one.losses else "",
            "held-out": f"{one.eval_losses[-1]:.4f}" if one.eval_losses else "",
            "kept": readable_bytes(one.resident_bytes) if one.memory else "",
            "peak": readable_bytes(one.fullest_bytes) if one.fullest_bytes else "",
            "sent a step": "" if one.sent_bytes is None else readable_bytes(one.sent_bytes),
            "tokens/s": "" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}",
        }
        rows.append((one.name, row))
    return rows


def by_step(columns: dict[str, dict[int, float]]) -> list[tuple[int, dict[str, float]]]:
    """Returns rows of `columns`, each of whose values belongs to a step."""
    steps = sorted({step for values in columns.values() for step in values})
    return [(step, {name: values.get(step) for name, values in columns.items()}) for step in steps]


def losses_of(outcomes: list[Outcome]) -> Panel:
    columns = {}
    for one in outcomes:
        columns[one.name] = dict(zip(one.steps, one.losses, strict=True))
        if one.eval_losses:
            columns[one.name + HELD_OUT] = dict(zip(one.eval_steps, one.eval_losses, strict=True))
    drawn = sorted(outcomes, key=lambda one: (one.steps, one.losses))
    groups = ([one.name for one in alike] for _, alike in groupby(drawn, key=lambda one: (one.steps, one.losses)))
    sentences = (
        f"{', '.join(others)} and {last} have the same curve, bit for bit." for *others, last in groups if others
    )
    panel = panel_of("compare.loss", by_step(columns), "lines", heads=("step",))
    return replace(panel, words=" ".join([panel.words, *sentences]))


def differences_of(outcomes: list[Outcome]) -> Panel | None:
    """Returns None where every variant has the first one's losses to the last bit."""
    base, *others = outcomes
    if all(first_difference(one, base) is None for one in others):
        return None
    rows = by_step({one.name: differences(one, base) for one in others})
    return panel_of("compare.difference", rows, "lines", heads=("step",), log="y", first=1, base=base.name)


def _stacks(
    name: str, outcomes: list[Outcome], of: Callable[[Outcome], dict[str, dict[str, float]]], *sources: str
) -> Panel:
    """Returns bars of bytes, stacked by part, one for each outcome and source."""
    rows = [((one.name, source), of(one).get(source, {})) for one in outcomes for source in sources]
    more: dict[str, Any] = {"together": len(sources), "unit": "MiB", "scale": 2**20, "form": ",.0f"}
    return panel_of(name, rows, "bars", heads=("variant", "source"), **more)


def memory_of(outcomes: list[Outcome]) -> Panel:
    return _stacks("compare.memory", outcomes, lambda one: one.memory, *PREFIXES)


def peak_of(outcomes: list[Outcome]) -> Panel | None:
    """Returns None where a run has no predicted peak, as before there was a formula."""

    def of(one: Outcome) -> dict[str, dict[str, float]]:
        return {"predicted": one.peak, "measured": {"allocated": one.peak_bytes} if one.peak_bytes else {}}

    if not all(one.peak for one in outcomes):
        return None
    measured = ["measured"] * any(one.peak_bytes for one in outcomes)
    return _stacks("compare.peak", outcomes, of, "predicted", *measured)


def traffic_of(outcomes: list[Outcome]) -> Panel:
    return _stacks("compare.traffic", outcomes, lambda one: one.traffic, "predicted", "measured")


def throughput_of(outcomes: list[Outcome]) -> Panel:
    rows = []
    for one in outcomes:
        times = sorted(one.step_seconds)
        quarters = quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        rows.append((one.name, dict(zip(ROW, [times[0], *quarters, times[-1]], strict=True))))
    return panel_of("compare.throughput", rows, "spans")


def mfu_of(outcomes: list[Outcome]) -> Panel | None:
    """Returns None on CPUs, and on a GPU whose peak is not known."""
    rows = [(one.name, {"perf/mfu": one.mfu}) for one in outcomes if one.mfu is not None]
    return panel_of("compare.mfu", rows, "bars") if rows else None
