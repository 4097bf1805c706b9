"""A plan as one self-contained page: memory against the GPU's, traffic, time by part, scaling, each also in numbers.

Invariant: it draws a `Report` and counts nothing itself.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardbook.compare.page import Panel, panel_of, render
from shardbook.plan.cluster import Candidate
from shardbook.plan.peak import GB, Peak, predict_moments
from shardbook.plan.report import PARTS, Report, describe_advice, describe_shared, facts, min_gpus_words
from shardbook.plan.step_timeline import lay_in_time
from shardbook.recipe import find_stage

WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)


def write_plan_page(path: Path, report: Report) -> None:
    """Writes the page of `report`."""
    planner, cluster = report.planner, report.cluster
    title = f"{planner.recipe.model.path} on {cluster.gpus} x {report.gpu_name}"
    experts = [line for line in describe_shared(report) if line.startswith("experts")]
    advice = (line.partition(" ") for line in [*experts, *describe_advice(report)])
    room = cluster.room_bytes / GB
    usable = f"{room:.0f} of {cluster.gpu.gb:g} GB of a GPU can be used"
    about = [f"{planner.parameters:,} parameters; {cluster.words()}; {usable}. By formula; nothing was run."]
    about.append(f"Assumed: {cluster.node_words()}.")
    about += [f"{word.capitalize()}: {rest.strip()}" for word, _, rest in advice]
    stages = report.stages
    rows = [(name, _verdict(report, name, candidate)) for name, candidate in stages.items()]
    peaks, stage_name = {name: one.peak for name, one in stages.items()}, find_stage(planner.recipe.parallel.stage).name
    moments = predict_moments(stages[stage_name].layout, planner.config, stages[stage_name].recipe)
    sent = ((name, one.comm.items()) for name, one in stages.items())
    traffic = [(name, {op.removesuffix("_bytes"): size / GB for op, size in volumes}) for name, volumes in sent]
    panels = [
        Panel("Verdicts", "", rows, heads=("stage",), caption="Each stage on this cluster"),
        panel_of("plan.memory", _gigabytes(peaks), "bars", heads=("stage",), limit=room, room=room),
        panel_of(
            "plan.moments", _gigabytes(moments), "bars", heads=("moment",), limit=room, room=room, stage=stage_name
        ),
        panel_of("plan.traffic", traffic, "bars", heads=("stage",)),
        panel_of("plan.time", [(name, asdict(one.time)) for name, one in stages.items()], "bars", heads=("stage",)),
        timeline_of(report, stage_name),
        scaling_of(report),
    ]
    render(path, title, about, panels)


def _verdict(report: Report, name: str, candidate: Candidate) -> dict[str, str]:
    left = (report.cluster.room_bytes - candidate.peak.total) / GB
    over = ", ".join(f"{count:,.1f} GB over, most {what}" for what, count in candidate.over_budget_gb.items())
    numbers = {key: fact for key, fact in facts(candidate).items() if key not in PARTS}
    return {
        "verdict": f"does not fit: {over}" if over else f"fits, {left:.1f} GB to spare",
        **{fact.name: fact.text for fact in numbers.values()},
        "GPUs": min_gpus_words(report, name).replace("-", "none"),
    }


def _gigabytes(peaks: dict[str, Peak]) -> list[tuple[str, dict[str, float]]]:
    return [(name, {term: size / GB for term, size in asdict(peak).items()}) for name, peak in peaks.items()]


def timeline_of(report: Report, stage: str) -> Panel:
    spans, left_out = lay_in_time(report.stages[stage])
    rows = [
        (
            (span.lane, span.what, span.of),
            {"from": 1000 * span.begins, "to": 1000 * span.ends, "busy": 1000 * span.busy},
        )
        for span in spans
    ]
    cut = f"{left_out:,.2f} s of micro-batches in the middle are left out" if left_out else "all passes are shown"
    return panel_of("plan.timeline", rows, "lanes", heads=("lane", "what", "of"), stage=stage, cut=cut)


def scaling_of(report: Report) -> Panel:
    """Returns the panel of speeds. A stage that fits nowhere has a thin line: its speed is as if memory sufficed."""
    planner, cluster, rows = report.planner, report.cluster, []
    remarks: dict[tuple[Any, str], str] = {}
    for world in WORLDS:
        larger = cluster.resized(world)
        recipes = {name: planner.under(name, larger) for name in report.stages}
        candidates = {name: planner.lay_out(recipe, larger) for name, recipe in recipes.items() if recipe}
        rows.append((world, {name: candidates[name].speed if name in candidates else None for name in report.stages}))
        remarks |= {(world, name): " (does not fit)" for name, one in candidates.items() if not one.fits}
    thin = tuple(name for name, count in report.min_gpus.items() if not count)
    return panel_of("plan.scaling", rows, "lines", heads=("GPUs",), log="x", from_zero=True, thin=thin, remarks=remarks)
