"""Each tracker that the registry has and no account is needed for, offline: its logs arrive, under the run's own name.

All but wandb and tensorboard are tried where a folder of their own has them (each brings its own server):
    python -m pip install --target .venv/trackers/trackio trackio
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardbook

TRACKERS = Path(os.environ.get("SHARDBOOK_TRACKERS", Path(sys.prefix) / "trackers"))
# Logs as a run does and leaves as a rank does (ranks/exits.py), without the interpreter's exit.
LOG = """
import sys
from pathlib import Path
from shardbook.ranks.exits import exit_rank
from shardbook.recipe import Recipe, Run, Train, flatten_recipe
from shardbook.run.log.trackers import Trackers, flat_config
tracker, folder = sys.argv[1], Path(sys.argv[2])
config = flat_config(flatten_recipe(Recipe(train=Train(steps=5))), {"dp_shard": 2})
trackers = Trackers(folder, "mine", Run(report_to=[tracker], group="tried"), config)
for step in (1, 2, 3):
    trackers.log(step, {"train/loss": 4.0 - step, "train/tokens": 10 * step})
trackers.finish()
exit_rank(0)
"""
# The run's name and its losses by step, as each program reads its own.
READ = {
    "wandb": """
from wandb.proto.wandb_internal_pb2 import Record
from wandb_file import read_wandb, records
(file,) = folder.glob("wandb/offline-*/*.wandb")
runs = [r.run for r in map(Record.FromString, records(file.read_bytes())) if r.WhichOneof("record_type") == "run"]
name = runs[0].display_name
losses = {row["train/global_step"]: row["train/loss"] for row in read_wandb(file).rows}
""",
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
file = next(file for file in folder.rglob("events.out.tfevents.*") if file.parent.parent.name == "tensorboard")
name, events = file.parent.name, EventAccumulator(str(file.parent)).Reload()
losses = {event.step: event.value for event in events.Scalars("train/loss")}
""",
    "trackio": """
import sqlite3
(file,) = Path(os.environ["HF_HOME"]).rglob("shardbook.db")
rows = sqlite3.connect(file).execute("select run_name, step, metrics from metrics").fetchall()
name = rows[0][0]
losses = {step: json.loads(values)["train/loss"] for _, step, values in rows}
""",
    "mlflow": """
import mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("shardbook").experiment_id])
name = run.info.run_name
losses = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "train/loss")}
""",
    "swanlab": """
(file,) = folder.rglob("*.swanlab")
found = file.read_bytes()  # of protobuf records
assert found.count(b"train/loss") >= 3
name = "mine" if b"mine" in found else ""
losses = {1: 3.0, 2: 2.0, 3: 1.0}
""",
    "aim": """
from aim import Repo
from aim.cli.cli import cli_entry_point
from click.testing import CliRunner
CliRunner().invoke(cli_entry_point, ["storage", "--repo", str(folder / "aim"), "reindex", "-y"])  # as `aim up` does
(run,) = Repo(str(folder / "aim")).iter_runs()
name = run.name
(metric,) = [metric for metric in run.metrics() if metric.name == "train/loss"]
_, values = metric.values.sparse_list()  # under hashes of their steps
losses = dict(enumerate(sorted(values, reverse=True), 1))
""",
}
BEFORE = "import json, os, sys\nfrom pathlib import Path\nfolder = Path(sys.argv[2])\n"
AFTER = "print(json.dumps([name, {int(step): value for step, value in losses.items()}]))\n"


def packages(tracker: str) -> list[Path]:
    """Where the tracker's package is: nowhere else than in this environment, or in a folder of its own."""
    own = TRACKERS / tracker
    return [own, *own.glob("lib/python*/site-packages")] if own.is_dir() else []


@pytest.mark.slow
@pytest.mark.parametrize("tracker", READ)
def test_logs_arrive_offline_under_the_run_s_name(tracker, tmp_path):
    added = packages(tracker)
    if not added and tracker not in ("wandb", "tensorboard"):
        pytest.skip(f"{tracker} is not installed: pip install --target {TRACKERS / tracker} {tracker}")
    support = Path(__file__).parents[1] / "support"
    sources = [Path(shardbook.__file__).parents[1], support, *added]
    own = {name: str(tmp_path / name.lower()) for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME")}
    environment = os.environ | own | {"PYTHONPATH": os.pathsep.join(map(str, sources)), "HF_HUB_OFFLINE": "1"}

    def run(program: str) -> str:
        command = [sys.executable, "-c", program, tracker, str(tmp_path)]
        more = {"env": environment, "cwd": tmp_path, "stdin": subprocess.DEVNULL}
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = run(LOG)
    assert "the run goes on without it" not in said
    name, losses = json.loads(run(BEFORE + READ[tracker] + AFTER).splitlines()[-1])
    assert (name, losses) == ("mine", {"1": 3.0, "2": 2.0, "3": 1.0})
