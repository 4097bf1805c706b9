"""report.html: the comparison as one self-contained page, charts by plotly, every chart's numbers as a table below it.

Invariant: a chart shows numbers that outcomes measured and nothing else; a number not measured has no chart.
"""

import json
import re
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from statistics import median
from string import Template
from textwrap import wrap
from typing import Any

from plotly.offline import get_plotlyjs

from shardbook.axes import CP, PP, TP
from shardbook.compare.outcome import SOURCES, Outcome, differences, first_difference, judge
from shardbook.run.console import readable_bytes

Figure = dict[str, Any]  # plotly's data and layout
Panel = tuple[str, str, Figure, str]  # title, what it shows, the chart, its numbers as a table
# Okabe and Ito's palette (Color Universal Design, 2008): color-blind readers can distinguish it, on white and black
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")
MIB = 2**20


def write_page(path: Path, title: str, outcomes: list[Outcome]) -> None:
    """Writes the page of `outcomes`; the first is the baseline of the others."""
    finished = [outcome for outcome in outcomes if outcome.finished]
    drawn = {
        "loss": draw_losses(finished),
        "difference": draw_differences(finished),
        "memory": draw_memory(finished),
        "peak": draw_peak(finished),
        "traffic": draw_traffic(finished),
        "throughput": draw_throughput(finished),
        "mfu": draw_mfu(finished),
    }
    head, *rows = summary_rows(outcomes)
    verdicts = table(f"Each variant beside {outcomes[0].name}", head, rows, words=1)
    render(path, title, describe(finished[0]), verdicts, {name: panel for name, panel in drawn.items() if panel})


def render(path: Path, title: str, about: str, verdicts: str, panels: dict[str, Panel]) -> None:
    """Writes a page: the table `verdicts`, then each panel as a section whose id is the panel's key."""
    sections = "\n".join(
        f'<section id="{name}"><h2>{escape(heading)}</h2><p>{escape(words)}</p>'
        f'<div class="plot" id="plot-{name}" role="img" aria-label="{escape(heading)}; in numbers below"></div>'
        f"<details><summary>{escape(heading)} in numbers</summary>{numbers}</details></section>"
        for name, (heading, words, _, numbers) in panels.items()
    )
    links = " ".join(f'<a href="#{name}">{escape(panel[0])}</a>' for name, panel in panels.items())
    figures = {f"plot-{name}": panel[2] for name, panel in panels.items()}
    page = Template(Path(__file__).with_name("report.html").read_text()).substitute(
        css=Path(__file__).with_name("page.css").read_text(),
        title=escape(title),
        about=escape(about),
        links=links,
        verdicts=verdicts,
        panels=sections,
        library=get_plotlyjs(),
        figures=json.dumps(figures).replace("</", "<\\/"),
    )
    path.write_text(page)


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


def table(caption: str, head: Iterable[str], rows: Iterable[Iterable[str]], words: int = -1) -> str:
    """Returns an HTML table that scrolls on its own and by keyboard; column `words` holds prose."""
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = ""
    for name, *row in rows:
        data = (f"<td{' class=words' * (at == words)}>{escape(cell)}</td>" for at, cell in enumerate(row, 1))
        broken = re.sub(r"[,._=]", r"\g<0><wbr>", escape(name))  # else a variant's name is one long word
        body += f'<tr><th scope="row">{broken}</th>{"".join(data)}</tr>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def summary_rows(outcomes: list[Outcome]) -> list[list[str]]:
    """Returns the rows of the table on the page and the terminal, its heading first."""
    base = outcomes[0]
    named = [axis for axis in (PP, CP, TP) if any(axis in one.mesh for one in outcomes)]
    inner = ", ".join(axis for axis in named if axis != PP)
    mesh = "(pp x) " * (PP in named) + "replicas x shards" + f" (x {inner})" * bool(inner)
    rows = [["variant", "verdict", mesh, "last loss", "held-out", "kept", "peak", "sent a step", "tokens/s"]]
    for one in outcomes:
        row = [
            one.name,
            judge(one, base),
            " x ".join(f"{axis} {size}" if axis in named else str(size) for axis, size in one.mesh.items()),
            f"{one.losses[-1]:.4f}" if one.losses else "",
            f"{one.eval_losses[-1]:.4f}" if one.eval_losses else "",
            readable_bytes(one.resident_bytes) if one.memory else "",
            readable_bytes(one.fullest_bytes) if one.fullest_bytes else "",
            "" if one.sent_bytes is None else readable_bytes(one.sent_bytes),
            "" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}",
        ]
        rows.append(row)
    return rows


def figure(data: list[dict[str, Any]], x: dict[str, Any], y: dict[str, Any], **layout: Any) -> Figure:
    """Returns a chart without colors of its own for text and lines: the page sets those, for light, dark and print."""
    plain = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},  # below, it would meet the axes' titles
        "xaxis": x | {"automargin": True},
        "yaxis": y | {"automargin": True},
    }
    return {"data": data, "layout": plain | layout}


def bars(data: list[dict[str, Any]], count: int, unit: str, lines: float = 1) -> Figure:
    """Returns a chart of `count` horizontal bars, which long names and a phone's width do not squeeze; the first is on
    top. `lines`: text lines of the name beside each."""
    y = {"autorange": "reversed", "dividerwidth": 1}
    return figure(data, {"title": {"text": unit}}, y, barmode="stack", height=150 + max(24, 17 * lines) * count)


def label(one: Outcome) -> str:
    return one.name.replace(",", ",<br>")


def longest_label(outcomes: list[Outcome]) -> int:
    """Returns the number of lines of the longest label."""
    return max(label(one).count("<br>") + 1 for one in outcomes)


def in_legend(name: str) -> str:
    """Returns `name`, which has no spaces, broken behind commas where it would run over the page's edge."""
    lines = wrap(name.replace(",", ", "), 100, break_long_words=False, break_on_hyphens=False)
    return "<br>".join(line.replace(", ", ",") for line in lines)


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def draw_losses(outcomes: list[Outcome]) -> Panel:
    traces = []
    for number, one in enumerate(outcomes):
        # equal curves lie on each other: the first is widest, so that each still shows
        width = 1.5 + 1.5 * (len(outcomes) - 1 - number)
        line = {"color": colour(number), "width": width}
        trace = {"type": "scatter", "mode": "lines", "name": in_legend(one.name), "legendgroup": one.name, "line": line}
        traces.append(trace | {"x": one.steps, "y": one.losses})
        if one.eval_losses:
            marker = {"color": colour(number), "size": 6 + width, "symbol": "diamond"}
            held = {"x": one.eval_steps, "y": one.eval_losses, "marker": marker, "showlegend": False}
            traces.append(trace | held | {"mode": "markers", "name": f"{one.name}, held out"})
    steps = sorted({step for one in outcomes for step in one.steps})
    by_step = [dict(zip(one.steps, one.losses, strict=True)) for one in outcomes]
    rows = [[str(step), *(f"{losses[step]!r}" if step in losses else "" for losses in by_step)] for step in steps]
    return (
        "Loss",
        "Training loss by step, and diamonds for the held-out rows. Curves that are equal lie on each other.",
        figure(traces, {"title": {"text": "step"}}, {"title": {"text": "loss"}}, hovermode="x unified", height=420),
        table("train/loss, every digit", ["step", *(one.name for one in outcomes)], rows),
    )


def draw_differences(outcomes: list[Outcome]) -> Panel | None:
    """Returns None where every variant has the first one's losses to the last bit."""
    base, traces, rows = outcomes[0], [], []
    for number, one in enumerate(outcomes[1:], 1):
        step, apart = first_difference(one, base), differences(one, base)
        rows.append([one.name, "never" if step is None else str(step), f"{max(apart.values(), default=0):.1e}"])
        if step is not None:
            line = {"color": colour(number), "width": 1.5}
            points = {step: share for step, share in apart.items() if share}  # a logarithm shows no zero
            trace = {"type": "scatter", "mode": "lines+markers", "name": in_legend(one.name), "line": line}
            traces.append(trace | {"x": list(points), "y": list(points.values())})
    if not traces:
        return None
    drawn = [share for one in outcomes[1:] for share in differences(one, base).values() if share]
    dense = max(drawn) < 100 * min(drawn)  # too few powers of ten to read the axis by
    share = {"type": "log", "title": {"text": "share of the loss"}, "tickformat": ".0e", "dtick": "D2" if dense else 1}
    return (
        f"Difference from {base.name}",
        f"How far each loss is from {base.name}'s, as a share of it. A variant that is not drawn has the same losses "
        "bitwise.",
        figure(traces, {"title": {"text": "step"}}, share, showlegend=True, height=360),
        table(f"First step that differs from {base.name}", ["variant", "first different step", "largest share"], rows),
    )


def draw_stacks(
    outcomes: list[Outcome], of: Callable[[Outcome], dict[str, dict[str, float]]], sources: tuple[str, ...], what: str
) -> tuple[Figure, str]:
    """Returns bars of bytes, stacked by part, one for each outcome and source; and the same numbers as a table."""
    found = [(one, source, of(one).get(source, {})) for one in outcomes for source in sources]
    parts = list(dict.fromkeys(part for _, _, counts in found for part in counts))
    names = [[label(one) for one, _, _ in found], [source for _, source, _ in found]]
    traces = [
        {"type": "bar", "orientation": "h", "name": part, "y": names, "marker": {"color": colour(number)}}
        | {"x": [counts.get(part, 0) / MIB for _, _, counts in found], "hovertemplate": "%{x:,.2f} MiB"}
        for number, part in enumerate(parts)
    ]
    rows = []
    for one, source, counts in found:
        shown = [*(counts.get(part, 0) for part in parts), sum(counts.values())]
        rows.append([one.name, source, *(f"{count:,.0f}" for count in shown)])
    return bars(traces, len(found), "MiB", longest_label(outcomes) / max(1, len(sources))), table(
        what, ["variant", "source", *parts, "total"], rows
    )


def draw_memory(outcomes: list[Outcome]) -> Panel:
    return (
        "Memory",
        "What the first rank keeps from step to step. Paper: ZeRO's count of 2 + 2 + 12 bytes a parameter (arXiv "
        "1910.02054), for bf16 copies of weights and gradients beside fp32 states. Predicted: what this program must "
        "keep, by formula. Measured: what it kept.",
        *draw_stacks(outcomes, lambda one: one.memory, SOURCES, "Bytes that the first rank keeps"),
    )


def draw_peak(outcomes: list[Outcome]) -> Panel | None:
    """Returns None where a run has no predicted peak, as before there was a formula."""

    def of(one: Outcome) -> dict[str, dict[str, float]]:
        measured = {"measured": {"allocated": one.peak_bytes}} if one.peak_bytes else {}
        return {"predicted": one.peak} | measured

    if not all(one.peak for one in outcomes):
        return None
    sources = ("predicted", "measured") if any(one.peak_bytes for one in outcomes) else ("predicted",)
    return (
        "Peak of a step",
        "What a rank must have at the fullest moment of a step, by formula: what it keeps, parameters gathered, "
        "activations held for backward, and the work of a block, the loss or a reduction. On a GPU also as its "
        "allocator measured it; a CPU does not.",
        *draw_stacks(outcomes, of, sources, "Bytes of a rank at the peak of a step"),
    )


def draw_traffic(outcomes: list[Outcome]) -> Panel:
    sources, counted = ("predicted", "measured"), "Payload bytes of the first rank's first step"
    return (
        "Traffic",
        "Payload of what one step sends, by operation and mesh axis: the full tensor, in the dtype on the wire, "
        "scales included. A ring passes an all-reduce twice, so verdicts compare the bytes that a rank sends.",
        *draw_stacks(outcomes, lambda one: one.traffic, sources, counted),
    )


def draw_throughput(outcomes: list[Outcome]) -> Panel:
    traces = [
        {"type": "box", "orientation": "h", "name": label(one), "x": one.step_seconds, "boxpoints": "all"}
        | {"marker": {"color": colour(number)}, "showlegend": False}
        for number, one in enumerate(outcomes)
    ]
    head = ["variant", "median seconds a step", "fastest", "slowest", "tokens/s a device"]
    rows = []
    for one in outcomes:
        times = one.step_seconds
        shown = [f"{value:.3f}" for value in (median(times), min(times), max(times))]
        rows.append([one.name, *shown, f"{one.tokens_per_second:,.1f}"])
    return (
        "Throughput",
        "Seconds of each step but the first. Variants ran one after another; on a shared machine small differences "
        "say nothing.",
        bars(traces, 2 * len(outcomes), "seconds a step", longest_label(outcomes) / 2),
        table("Throughput", head, rows),
    )


def draw_mfu(outcomes: list[Outcome]) -> Panel | None:
    """Returns None on CPUs, and on a GPU whose peak is not known."""
    known = [one for one in outcomes if one.mfu is not None]
    if not known:
        return None
    trace = {"type": "bar", "orientation": "h", "marker": {"color": colour(0)}, "showlegend": False}
    trace |= {"y": [label(one) for one in known], "x": [one.mfu for one in known]}
    return (
        "MFU",
        "Share of the device's dense bf16 peak that the model's own arithmetic used; recomputation does not count.",
        bars([trace], len(known), "share of the peak"),
        table("MFU", ["variant", "perf/mfu"], [[one.name, f"{one.mfu:.1%}"] for one in known]),
    )
