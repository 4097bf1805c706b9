"""A plan as one self-contained page: memory against the GPU's, traffic, time by part, scaling, each also in numbers.

Invariant: it draws a `Report` and counts nothing itself.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardbook.compare.page import Figure, Panel, bars, colour, figure, render, table
from shardbook.plan.cluster import Candidate
from shardbook.plan.peak import predict_moments
from shardbook.plan.report import Report, describe_advice, facts
from shardbook.recipe import find_stage

GB = 1e9
AT_MOST = 3.0  # times the usable memory: more is not drawn, else bars that fit are too short to read
WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)


def write_plan_page(path: Path, report: Report) -> None:
    """Writes the page of `report`."""
    planner, cluster = report.planner, report.cluster
    title = f"{planner.recipe.model.path} on {cluster.gpus} x {report.gpu_name}"
    advice = (line.partition(" ") for line in describe_advice(report))
    said = ". ".join(f"{word.capitalize()}: {rest.strip()}" for word, _, rest in advice)
    room = f"{cluster.room_bytes / GB:.0f} of {cluster.gpu.gb:g} GB of a GPU can be used"
    about = f"{planner.parameters:,} parameters; {cluster.words()}; {room}. By formula; nothing was run. {said}"
    named = [fact.name for fact in facts(planner, next(iter(report.stages.values()))).values()]
    head = ["stage", "verdict", *named, "GPUs"]
    rows = [[name, *_verdict(report, name, candidate)] for name, candidate in report.stages.items()]
    panels = {
        "memory": draw_memory(report),
        "step": draw_step(report),
        "traffic": draw_traffic(report),
        "time": draw_time(report),
        "scaling": draw_scaling(report),
    }
    render(path, title, about, table("Each stage on this cluster", head, rows, words=1), panels)


def _verdict(report: Report, name: str, candidate: Candidate) -> list[str]:
    left = (report.cluster.room_bytes - candidate.peak.total) / GB
    over = ", ".join(f"{count:,.1f} GB over, most {what}" for what, count in candidate.over.items())
    return [
        f"does not fit: {over}" if over else f"fits, {left:.1f} GB to spare",
        *(fact.text for fact in facts(report.planner, candidate).values()),
        str(report.fewest[name] or "none"),
    ]


def _stacked(rows: dict[str, dict[str, float]], unit: str, caption: str, digits: int) -> tuple[Figure, str]:
    """Returns bars, one for each of `rows`, stacked by part, and the same numbers as a table."""
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    traces = [
        {"type": "bar", "orientation": "h", "name": part, "y": list(rows), "marker": {"color": colour(number)}}
        | {"x": [row.get(part, 0.0) for row in rows.values()], "hovertemplate": f"%{{x:,.{digits}f}} {unit}"}
        for number, part in enumerate(parts)
    ]
    numbers = [
        [name, *(f"{row.get(part, 0.0):,.{digits}f}" for part in parts), f"{sum(row.values()):,.{digits}f}"]
        for name, row in rows.items()
    ]
    return bars(traces, len(rows), unit), table(caption, ["stage", *parts, "together"], numbers)


def draw_memory(report: Report) -> Panel:
    rows = {
        name: {term: size / GB for term, size in asdict(candidate.peak).items()}
        for name, candidate in report.stages.items()
    }
    chart, numbers = _stacked(rows, "GB", "GB of a rank at the peak of a step", 1)
    room = report.cluster.room_bytes / GB
    line = {"color": "#d55e00", "width": 2, "dash": "dash"}
    longest = max(sum(row.values()) for row in rows.values())
    chart["layout"]["xaxis"]["range"] = [0, min(1.05 * longest, AT_MOST * room)]
    chart["layout"]["shapes"] = [
        {"type": "line", "x0": room, "x1": room, "yref": "paper", "y0": 0, "y1": 1, "line": line}
    ]
    words = f"What a rank must have at the fullest moment of a step. The dashed line: {room:.0f} GB, what can be used. "
    words += "A bar that reaches the edge is longer."
    return "Memory", words, chart, numbers


def draw_step(report: Report) -> Panel:
    """Returns the panel of the recipe's own stage, moment by moment."""
    planner, room = report.planner, report.cluster.room_bytes / GB
    name = find_stage(planner.recipe.parallel.stage).name
    moments = predict_moments(report.stages[name].layout, planner.config, report.stages[name].recipe)
    rows = {moment: {term: size / GB for term, size in asdict(peak).items()} for moment, peak in moments.items()}
    chart, numbers = _stacked(rows, "GB", f"GB of a rank under {name}, by moment", 1)
    words = f"{name}, from top to bottom: the moments where a step can be fullest, of its first two micro-batches and "
    words += "its last. "
    return "Memory over the step", words + f"{room:.0f} GB can be used.", chart, numbers


def draw_traffic(report: Report) -> Panel:
    rows = {
        name: {op.removesuffix("_bytes"): size / GB for op, size in candidate.comm.items()}
        for name, candidate in report.stages.items()
    }
    words = "Payload of a step's collectives of one rank: the full tensor, in the dtype on the wire."
    return "Traffic", words, *_stacked(rows, "GB", "GB of collectives in a step", 2)


def draw_time(report: Report) -> Panel:
    rows = {name: asdict(candidate.time) for name, candidate in report.stages.items()}
    words = "Seconds of a step by part. Exposed: a GPU waits for collectives that nothing hides."
    return "Time", words, *_stacked(rows, "s", "Seconds of a step", 3)


def draw_scaling(report: Report) -> Panel:
    """Returns the panel of speeds. A stage that fits nowhere has a thin line: its speed is as if memory sufficed."""
    planner, cluster = report.planner, report.cluster
    traces: list[dict[str, Any]] = []
    rows = [[f"{world} GPUs"] for world in WORLDS]
    for number, name in enumerate(report.stages):
        speeds: list[float | None] = []
        for world, row in zip(WORLDS, rows, strict=True):
            larger = cluster.resized(world)
            recipe = planner.under(name, larger)
            found = recipe and planner.lay_out(recipe, larger)
            speeds.append(found.speed if found else None)
            row.append(f"{speeds[-1]:,.0f}{'' if found.fits else ' (does not fit)'}" if found else "")
        line = {"color": colour(number), "width": 2.5 if report.fewest[name] else 1}
        traces.append(
            {"type": "scatter", "mode": "lines+markers", "name": name, "x": list(WORLDS), "y": speeds, "line": line}
        )
    x = {"type": "log", "title": {"text": "GPUs"}, "tickvals": list(WORLDS)}
    chart = figure(traces, x, {"title": {"text": "tokens/s a GPU"}, "rangemode": "tozero"}, height=420)
    words = "Tokens a second of one GPU on larger clusters, rows of a rank as they are. A thin line fits on no number."
    return "Scaling", words, chart, table("Tokens a second of one GPU", ["cluster", *report.stages], rows)
