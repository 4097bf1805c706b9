"""launch/slurm.sbatch in a real Slurm: how a job ends, and what one that was requeued computes."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm import run, slurm, until
from tiny import write_recipe
from world import losses

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "slurm.sbatch"
BIN = Path(sys.executable).parent
ENDLESS = 100_000  # steps: such a run is never done before it is told to stop


@dataclass(frozen=True)
class Job:
    """A job of the cluster that `environment` reaches, and the file that it writes to."""

    number: str
    out: Path
    environment: dict[str, str]

    def fact(self, name: str) -> str:
        """A field of `scontrol show job`: JobState, Restarts, ExitCode, ..."""
        shown = run("scontrol", "show", "job", "--oneliner", self.number, env=self.environment)
        return re.search(rf"\b{name}=(\S+)", shown)[1]

    def said(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def until(self, true: Callable[[], bool], seconds: float) -> None:
        until(true, seconds, lambda: f"job {self.number} is {self.fact('JobState')} and said {self.said()}")

    def ends(self, state: str, seconds: float) -> None:
        """It comes to `state`, and has left its nodes: while it leaves them, COMPLETING goes before every state."""
        words = ("--noheader", "--states=all", f"--jobs={self.number}", "--format=%T")
        self.until(lambda: run("squeue", *words, env=self.environment).strip() == state, seconds)


@pytest.fixture(scope="module")
def cluster():
    with slurm() as environment:
        # one thread a rank: else each has its share of the cores, and the last bits change with the ranks of a node
        yield environment | {"SHARDBOOK_BIN": str(BIN), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def recipe(tiny, tmp_path) -> Path:
    return write_recipe(tiny, tmp_path)


def submit(environment: dict[str, str], folder: Path, *words: str | Path) -> Job:
    """`sbatch --nodes=1 ... launch/slurm.sbatch ...` from `folder`, on a cluster that has no GPUs."""
    command = ["sbatch", "--parsable", "--gpus-per-node=0", *map(str, words)]
    number = run(*command, env=environment, cwd=folder).strip()
    return Job(number, folder / f"shardbook-{number}.out", environment)


def set_steps(recipe: Path, steps: int) -> None:
    recipe.write_text(re.sub(r"steps = \d+", f"steps = {steps}", recipe.read_text()))


def undisturbed(environment: dict[str, str], recipe: Path, steps: int) -> list[float]:
    """The losses of the recipe by `shardbook train`, at a stretch."""
    words = ["train", str(recipe), "run.name=undisturbed", f"train.steps={steps}", "--nproc", "2"]
    run(str(BIN / "shardbook"), *words, env=environment)
    return losses(recipe.parent / "undisturbed")


def test_a_job_at_its_time_limit_saves_requeues_itself_and_goes_on_to_the_end(cluster, recipe):
    set_steps(recipe, ENDLESS)
    options = ("--nodes=1", "--time=2", "--signal=B:USR1@60")  # Slurm sends it after 30 to 60 of the 120 seconds
    job = submit(cluster, recipe.parent, *options, SCRIPT, recipe)
    log = recipe.parent / f"tiny-{job.number}"
    job.until(lambda: job.fact("JobState") == "PENDING" and "checkpoint saved" in job.said(), seconds=240)
    done = len(losses(log))
    # Now the end, a few steps on: fixed beforehand a fast machine would be there before the signal.
    set_steps(recipe, done + 5)
    job.ends("COMPLETED", seconds=180)
    assert job.fact("ExitCode") == "0:0" and int(job.fact("Restarts")) >= 1
    for part in (
        f"slurm.sbatch: no run.name given; run.name=tiny-{job.number}, in this job and whenever it is requeued",
        "slurm.sbatch: asked to stop",
        f"stopped  after step {done} of {ENDLESS}, checkpoint saved",
        "task 0: Exited with exit code 75",
        f"at step {done} of {done + 5}",
        f"done     {done + 5} steps",
    ):
        assert part in job.said(), job.said()
    assert done > 0 and losses(log) == undisturbed(cluster, recipe, done + 5)


def test_two_nodes_that_are_preempted_go_on_and_once_cancelled_do_not(cluster, recipe):
    words = (SCRIPT, recipe, "parallel.dp_shard_size=2")  # on two nodes: one rank each
    job = submit(cluster, recipe.parent, "--nodes=2", *words, f"train.steps={ENDLESS}", "run.name=mine")
    mine = recipe.parent / "mine"
    log = mine / "metrics.jsonl"
    job.until(lambda: log.exists() and len(losses(mine)) >= 3, seconds=120)
    submit(cluster, recipe.parent, "--nodes=2", "--exclusive", "--partition=urgent", "--wrap=true")
    job.until(lambda: job.fact("Restarts") == "1", seconds=60)
    done = len(losses(mine))
    job.until(lambda: len(losses(mine)) > done, seconds=120)
    run("scontrol", "requeue", job.number, env=cluster)
    job.until(lambda: job.fact("JobState") == "PENDING" and job.said().count("checkpoint saved") == 2, seconds=60)
    again = len(losses(mine))
    job.until(lambda: len(losses(mine)) > again, seconds=120)
    run("scancel", job.number, env=cluster)
    job.ends("CANCELLED", seconds=60)
    assert job.fact("Restarts") == "2"  # what Slurm takes back, the script does not requeue once more
    more = len(losses(mine))
    for part in (
        "2 nodes, head localhost:",
        f"stopped  after step {done} of {ENDLESS}, checkpoint saved",
        f"at step {done} of {ENDLESS}",
        f"stopped  after step {again} of {ENDLESS}, checkpoint saved",
        f"at step {again} of {ENDLESS}",
        f"stopped  after step {more} of {ENDLESS}, checkpoint saved",
        "slurm.sbatch: stopped by Slurm, which says COMPLETING: not requeued by this script",
    ):
        assert part in job.said(), job.said()
    with recipe.open("a") as file:
        file.write('name = "mine"\n')
    job = submit(cluster, recipe.parent, "--nodes=2", *words, f"train.steps={more + 2}")
    job.ends("COMPLETED", seconds=120)
    assert f"at step {more} of {more + 2}" in job.said() and "run.name given" not in job.said()
    assert losses(mine) == undisturbed(cluster, recipe, more + 2)


def test_a_job_that_is_told_before_its_ranks_listen_begins_again(cluster, recipe):
    job = submit(cluster, recipe.parent, "--nodes=1", SCRIPT, recipe)
    job.until(lambda: f"{job.number}.0" in run("squeue", "--steps", "--format=%i", env=cluster), seconds=60)
    run("scancel", "--batch", "--signal=USR1", job.number, env=cluster)
    job.ends("COMPLETED", seconds=120)
    assert job.fact("Restarts") == "1" and job.said().count("slurm.sbatch: requeued") == 1
    assert len(losses(recipe.parent / f"tiny-{job.number}")) == 5


def test_a_node_that_leaves_first_does_not_end_the_other_which_still_saves(cluster, recipe):
    """In place of `shardbook train`: the first node takes three seconds longer than the other."""
    launcher = """#!/bin/bash
        [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && exit 0
        [ "$SLURM_NODEID" -eq 0 ] && sleep 3 && echo "saved on $SLURM_NODEID"
        exit 75"""
    folder = recipe.parent / "bin"
    folder.mkdir()
    for name, text in {"shardbook": launcher, "python": f'#!/bin/bash\nexec {BIN}/python "$@"'}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = submit(cluster | {"SHARDBOOK_BIN": str(folder)}, recipe.parent, "--nodes=2", SCRIPT, recipe)
    job.ends("COMPLETED", seconds=60)
    assert job.fact("Restarts") == "1" and job.said().count("saved on 0") == 1


@pytest.mark.parametrize(
    "words, said",
    [
        (["optim.learning_rat=1"], "shardbook: {recipe}: optim.learning_rat"),  # before a rank is started
        (["data.max_length=300"], "shardbook: data.max_length = 300"),  # by the ranks
        (["--nproc", "0"], "shardbook: --nproc 0: must be at least 1"),  # by the launcher
    ],
)
def test_a_wrong_recipe_fails_the_job_once(words, said, cluster, recipe):
    job = submit(cluster, recipe.parent, "--nodes=1", SCRIPT, recipe, *words)
    job.ends("FAILED", seconds=120)
    assert job.fact("ExitCode") == "2:0" and job.fact("Restarts") == "0"
    assert job.said().count(said.format(recipe=recipe)) == 1, job.said()


def test_without_a_venv_or_a_recipe_it_says_so_in_one_line(cluster, recipe):
    environment = {name: value for name, value in cluster.items() if name != "SHARDBOOK_BIN"}
    job = submit(environment, recipe.parent, "--nodes=1", SCRIPT, recipe)
    job.ends("FAILED", seconds=30)
    assert job.fact("ExitCode") == "2:0"
    assert job.said() == (
        f"slurm.sbatch: {recipe.parent}/.venv/bin/shardbook: not there; submit from the repository after `make train` "
        "or another target of `make help` made .venv, or set SHARDBOOK_BIN to the folder that holds shardbook\n"
    )
    job = submit(cluster, recipe.parent, "--nodes=1", SCRIPT)
    job.ends("FAILED", seconds=30)
    assert job.fact("ExitCode") == "2:0"
    assert job.said() == "slurm.sbatch: no recipe; sbatch launch/slurm.sbatch RECIPE [section.key=value ...]\n"


def test_it_wants_slurm():
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    done = subprocess.run(["bash", SCRIPT, "some.toml"], capture_output=True, text=True, env=environment)
    wanted = "slurm.sbatch: not in a Slurm job; start it with sbatch launch/slurm.sbatch RECIPE\n"
    assert (done.returncode, done.stderr) == (2, wanted)


def test_shellcheck_finds_nothing(cluster):
    assert run("shellcheck", str(SCRIPT)) == ""
