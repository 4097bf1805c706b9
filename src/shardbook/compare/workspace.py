"""A comparison in wandb: the saved view of its runs and a report that explains them, in code.

Invariant: every panel names metrics that runs log. Building touches no network; only `publish` does.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces
from pydantic import TypeAdapter

from shardbook.comm.ledger import OPS
from shardbook.compare.outcome import Outcome, judge
from shardbook.trackers import STEP, TOKENS, has_wandb_key

MEMORY = [f"memory/{what}_bytes" for what in ("params", "grads", "optimizer")]
# section -> panels: title, kind, metrics. Bars show what is measured once, lines what every step has.
PANELS: dict[str, list[tuple[str, str, list[str]]]] = {
    "Loss": [
        ("Training loss", STEP, ["train/loss"]),
        ("Training loss by tokens", TOKENS, ["train/loss"]),
        ("Held-out loss", STEP, ["eval/loss"]),
        ("Gradient norm", STEP, ["train/grad_norm"]),
    ],
    "Throughput": [
        ("Tokens a second and device", STEP, ["perf/tokens_per_second_per_device"]),
        ("Seconds a step", STEP, ["perf/step_seconds"]),
        ("MFU (GPU)", STEP, ["perf/mfu"]),
    ],
    "Memory": [
        ("Kept, by category", "bar", MEMORY),
        ("Predicted against measured", "bar", [name for key in MEMORY for name in (f"predicted/{key}", key)]),
        ("By the ZeRO paper's count", "bar", [f"paper/{key}" for key in MEMORY]),
        ("Peak of the allocator (GPU)", STEP, ["memory/peak_bytes"]),
    ],
    "Traffic of a step": [
        ("Payload, by operation", "bar", [f"comm/{op}_bytes" for op in OPS]),
        (
            "Predicted against measured",
            "bar",
            [name for op in OPS for name in (f"predicted/comm/{op}_bytes", f"comm/{op}_bytes")],
        ),
        ("Sent by the first rank, and to other nodes", "bar", ["comm/sent_bytes", "comm/inter_node_bytes"]),
    ],
}


def build_panels(section: str) -> list[Any]:
    return [
        reports.BarPlot(title=title, metrics=list(metrics), orientation="v")
        if kind == "bar"
        else reports.LinePlot(title=title, x=kind, y=list(metrics))
        for title, kind, metrics in PANELS[section]
    ]


def build_workspace(entity: str, project: str, group: str) -> Any:
    """The view of the runs of `group`: a wandb_workspaces.workspaces.Workspace, not yet saved."""
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=f"Stages: {group}",
        sections=[workspaces.Section(name=name, panels=build_panels(name), is_open=True) for name in PANELS],
        settings=workspaces.WorkspaceSettings(x_axis=STEP),
        runset_settings=workspaces.RunsetSettings(filters=f"Metric('Group') == {group!r}"),
    )


def build_report(entity: str, project: str, group: str, outcomes: list[Outcome]) -> Any:
    """The report that explains the runs of `group`: a wandb_workspaces.reports.v2.Report, not yet saved."""
    base = outcomes[0]
    blocks: list[Any] = [
        reports.P(
            f"One recipe and the same rows under {len(outcomes)} stages, held against {base.name}. What a stage keeps "
            "and sends is predicted by formula from its row of the stage table, then measured; bars stand beside each "
            "other where the two are shown."
        ),
        reports.UnorderedList(items=[f"{one.name}: {judge(one, base)}" for one in outcomes]),
    ]
    for name in PANELS:
        runs = reports.Runset(entity=entity, project=project, name=group, filters=f"Metric('Group') == {group!r}")
        blocks += [reports.H2(name), reports.PanelGrid(runsets=[runs], panels=build_panels(name))]
    return reports.Report(entity=entity, project=project, title=f"Stages: {group}", blocks=blocks, width="fluid")


def keep_workspace(path: Path, group: str, outcomes: list[Outcome]) -> None:
    """Write both as JSON, as they are before an entity is known."""
    project = _project(outcomes)
    built = {
        "workspace": (workspaces.Workspace, build_workspace("", project, group)),
        "report": (reports.Report, build_report("", project, group, outcomes)),
    }
    text = {name: TypeAdapter(kind).dump_python(value, mode="json") for name, (kind, value) in built.items()}
    path.write_text(json.dumps(text, indent=1) + "\n")


def publish(folder: Path, outcomes: list[Outcome]) -> None:
    """Send the runs that were recorded offline, then save the view and the report; says where they are.

    Without a key or a network it says so and nothing else changes."""
    try:
        import wandb

        if not has_wandb_key():
            raise RuntimeError("no key (wandb login, or WANDB_API_KEY)")
        entity, project = wandb.Api(timeout=30).default_entity or "", _project(outcomes)
        if offline := sorted(folder.glob("*/wandb/offline-run-*")):
            subprocess.run([sys.executable, "-m", "wandb", "sync", *map(str, offline)], check=True)
        view = build_workspace(entity, project, folder.name).save()
        report = build_report(entity, project, folder.name, outcomes)
        report.save()
        print(f"wandb    {view.url}\nwandb    {report.url}")
    except Exception as error:  # whatever a dashboard's network does, the comparison is on disk
        print(f"wandb    not published: {error}; runs and view are kept in {folder}, for wandb sync and --publish")


def _project(outcomes: list[Outcome]) -> str:
    return next(one.settings["run"]["project"] for one in outcomes if one.finished)
