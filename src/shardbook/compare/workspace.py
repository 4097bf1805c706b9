"""A comparison in wandb: the saved view of its runs and a report that explains them, in code.

Invariant: every panel names metrics that runs log. Building touches no network; only `publish` does.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces
from pydantic import TypeAdapter

from shardbook.compare.outcome import Outcome, judge
from shardbook.run.log.trackers import STEP, has_wandb_key

PANELS = tomllib.loads(Path(__file__).with_name("panels.toml").read_text())  # section -> its panels


def build_panels(section: str) -> list[Any]:
    return [
        reports.LinePlot(title=panel["title"], x=panel["x"], y=list(panel["metrics"]))
        if "x" in panel
        else reports.BarPlot(title=panel["title"], metrics=list(panel["metrics"]), orientation="v")
        for panel in PANELS[section]
    ]


def build_workspace(entity: str, project: str, group: str) -> Any:
    """Returns the view of the runs of `group`: a wandb_workspaces.workspaces.Workspace, not yet saved."""
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=f"Stages: {group}",
        sections=[workspaces.Section(name=name, panels=build_panels(name), is_open=True) for name in PANELS],
        settings=workspaces.WorkspaceSettings(x_axis=STEP),
        runset_settings=workspaces.RunsetSettings(filters=f"Metric('Group') == {group!r}"),
    )


def build_report(entity: str, project: str, group: str, outcomes: list[Outcome]) -> Any:
    """Returns the report that explains the runs of `group`: a wandb_workspaces.reports.v2.Report, not yet saved."""
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
    """Writes the view and the report as JSON, without an entity, which is known only when they are published."""
    project = _project(outcomes)
    built = {"workspace": build_workspace("", project, group), "report": build_report("", project, group, outcomes)}
    text = {name: TypeAdapter(type(value)).dump_python(value, mode="json") for name, value in built.items()}
    path.write_text(json.dumps(text, indent=1) + "\n")


def publish(folder: Path, outcomes: list[Outcome]) -> None:
    """Sends the runs that were recorded offline, then saves the view and the report, and prints their addresses.

    Without a key or a network it prints that, and nothing else changes."""
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
