"""A plan as one self-contained page: memory against the GPU's, traffic, time by part, scaling, each also in numbers.

Invariant: it draws a `Report` and counts nothing itself.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardbook.compare.page import Panel, render
from shardbook.plan.cluster import Candidate
from shardbook.plan.peak import Peak, predict_moments
from shardbook.plan.report import GB, PARTS, Report, describe_advice, facts, fewest_words
from shardbook.recipe import find_stage

WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)


def write_plan_page(path: Path, report: Report) -> None:
    """Writes the page of `report`."""
    planner, cluster = report.planner, report.cluster
    title = f"{planner.recipe.model.path} on {cluster.gpus} x {report.gpu_name}"
    advice = (line.partition(" ") for line in describe_advice(report))
    room = f"{cluster.room_bytes / GB:.0f} of {cluster.gpu.gb:g} GB of a GPU can be used"
    about = [f"{planner.parameters:,} parameters; {cluster.words()}; {room}. By formula; nothing was run."]
    about.append(f"Assumed: {cluster.node_words()}.")
    about += [f"{word.capitalize()}: {rest.strip()}" for word, _, rest in advice]
    stages = report.stages
    rows = [(name, _verdict(report, name, candidate)) for name, candidate in stages.items()]
    panels = [
        Panel("Verdicts", "", rows, heads=("stage",), caption="Each stage on this cluster"),
        memory_of(report),
        moments_of(report),
        traffic_of(report),
        Panel(
            "Time",
            "Seconds of a step by part. Exposed: a GPU waits for collectives that nothing hides.",
            [(name, asdict(candidate.time)) for name, candidate in stages.items()],
            **_bars("s", "Seconds of a step", ",.3f"),
        ),
        scaling_of(report),
    ]
    render(path, title, about, panels)


def _verdict(report: Report, name: str, candidate: Candidate) -> dict[str, str]:
    left = (report.cluster.room_bytes - candidate.peak.total) / GB
    over = ", ".join(f"{count:,.1f} GB over, most {what}" for what, count in candidate.over.items())
    numbers = {key: fact for key, fact in facts(report.planner, candidate).items() if key not in PARTS}
    return {
        "verdict": f"does not fit: {over}" if over else f"fits, {left:.1f} GB to spare",
        **{fact.name: fact.text for fact in numbers.values()},
        "GPUs": fewest_words(report, name).replace("-", "none"),
    }


def _bars(unit: str, caption: str, form: str, head: str = "stage") -> dict[str, Any]:
    return {"kind": "bars", "unit": unit, "caption": caption, "form": form, "heads": (head,)}


def _gigabytes(peak: Peak) -> dict[str, float]:
    return {term: size / GB for term, size in asdict(peak).items()}


def memory_of(report: Report) -> Panel:
    room = report.cluster.room_bytes / GB
    rows = [(name, _gigabytes(candidate.peak)) for name, candidate in report.stages.items()]
    words = f"What a rank must have at the fullest moment of a step. The dashed line: {room:.0f} GB, what can be used. "
    words += "A bar that reaches the edge is longer."
    return Panel("Memory", words, rows, limit=room, **_bars("GB", "GB of a rank at the peak of a step", ",.1f"))


def moments_of(report: Report) -> Panel:
    """Returns the panel of the recipe's own stage, moment by moment."""
    planner, room = report.planner, report.cluster.room_bytes / GB
    name = find_stage(planner.recipe.parallel.stage).name
    moments = predict_moments(report.stages[name].layout, planner.config, report.stages[name].recipe)
    words = f"{name}, from top to bottom: the moments where a step can be fullest, of its first two micro-batches and "
    words += f"its last. {room:.0f} GB can be used."
    rows = [(moment, _gigabytes(peak)) for moment, peak in moments.items()]
    caption = f"GB of a rank under {name}, by moment"
    return Panel("Memory over the step", words, rows, limit=room, **_bars("GB", caption, ",.1f", "moment"))


def traffic_of(report: Report) -> Panel:
    rows = [
        (name, {op.removesuffix("_bytes"): size / GB for op, size in candidate.comm.items()})
        for name, candidate in report.stages.items()
    ]
    words = "Payload of a step's collectives of one rank: the full tensor, in the dtype on the wire."
    return Panel("Traffic", words, rows, **_bars("GB", "GB of collectives in a step", ",.2f"))


def scaling_of(report: Report) -> Panel:
    """Returns the panel of speeds. A stage that fits nowhere has a thin line: its speed is as if memory sufficed."""
    planner, cluster, rows = report.planner, report.cluster, []
    remarks: dict[tuple[Any, str], str] = {}
    for world in WORLDS:
        larger = cluster.resized(world)
        recipes = {name: planner.under(name, larger) for name in report.stages}
        found = {name: planner.lay_out(recipe, larger) for name, recipe in recipes.items() if recipe}
        rows.append((world, {name: found[name].speed if name in found else None for name in report.stages}))
        remarks |= {(world, name): " (does not fit)" for name, one in found.items() if not one.fits}
    words = "Tokens a second of one GPU on larger clusters, rows of a rank as they are. A thin line fits on no number."
    thin = tuple(name for name, fewest in report.fewest.items() if not fewest)
    more: dict[str, Any] = {"unit": "tokens/s a GPU", "form": ",.0f", "log": "x", "from_zero": True, "remarks": remarks}
    return Panel("Scaling", words, rows, "lines", ("GPUs",), "Tokens a second of one GPU", thin=thin, **more)
