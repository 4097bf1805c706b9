"""The files of launch/ on one machine, two launches into one run, a killed launcher, a comparison that goes on."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from world import losses, run_train, run_world, train_rank

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LONG = ("train.steps=100000", "train.export=false")


def start(command, said: Path, **variables: str) -> subprocess.Popen:
    with said.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | variables, cwd=said.parent)


def torchrun(recipe, name, *words) -> list:
    return [ROOT / "launch" / "torchrun.sh", recipe, f"run.name={name}", *words]


def wait_for_step(said: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while not re.search(rf"^step {step}/", said.read_text(), re.M):
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def plain(recipe):
    return losses(run_train(2, recipe, "plain"))


def test_torchrun_stops_on_a_signal_with_75_and_continues(recipe, plain, tmp_path):
    said = tmp_path / "said"
    process = start(torchrun(recipe, "torchrun", *LONG), said, NPROC="2", PYTHON=sys.executable)
    wait_for_step(said, 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75 and "checkpoint saved" in said.read_text(), said.read_text()
    done = len(losses(recipe.parent / "torchrun"))
    assert losses(recipe.parent / "torchrun")[:5] == plain[: min(5, done)]
    again = start(torchrun(recipe, "torchrun", f"train.steps={done + 1}"), said, NPROC="2", PYTHON=sys.executable)
    assert again.wait(120) == 0 and f"at step {done} of {done + 1}" in said.read_text()


@pytest.mark.parametrize(
    "variables, words, code, line",
    [
        ({}, ["data.max_length=300"], 2, "shardbook: data.max_length = 300"),
        ({}, ["optim.learning_rate=1e30"], 1, "shardbook: step 2: train/loss is "),
        ({"NODES": "two"}, [], 2, "torchrun.sh: NODES=two: must be a whole number"),
        ({"NODES": "2"}, [], 2, "torchrun.sh: NODES=2: needs HEAD"),
        ({"NODES": "2", "HEAD": "a", "NODE_RANK": "2"}, [], 2, "torchrun.sh: NODE_RANK=2: must be below NODES=2"),
    ],
)
def test_torchrun_keeps_the_codes(variables, words, code, line, recipe, tmp_path):
    said = tmp_path / "said"
    variables = {"NPROC": "2", "PYTHON": sys.executable} | variables
    assert start(torchrun(recipe, "refused", *words), said, **variables).wait(120) == code
    assert re.search(f"^{line}", said.read_text(), re.M), said.read_text()


@pytest.fixture
def running(recipe, tmp_path):
    """A run of two ranks in its third step, its launcher and what it said."""
    said = tmp_path / "said"
    process = start([BIN / "shardbook", "train", recipe, f"run.name={tmp_path.name}", *LONG], said)
    wait_for_step(said, 2)
    yield recipe.parent / tmp_path.name, process, said
    process.kill()
    process.wait()


def snapshot(run: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in run.rglob("*") if path.name != "metrics.jsonl"}


def test_a_second_launch_into_a_run_is_refused_and_a_killed_launcher_ends_its_ranks(recipe, running):
    run, process, said = running
    before = snapshot(run) | {"": run.stat().st_mtime}
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    for code, _, errors in run_world(2, train_rank, [str(recipe), f"run.name={run.name}", "train.seed=1"]):
        held = f"in use by pid {ranks[0]} on {os.uname().nodename}; wait until that has ended, or choose another"
        assert code == 2 and errors == f"shardbook: run directory {run}: {held} run.name\n"
    assert snapshot(run) | {"": run.stat().st_mtime} == before and process.poll() is None

    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(alive(rank) for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "what started this process was killed; run the same command again" in said.read_text()
    run_train(2, recipe, run.name, "train.steps=1")  # and what they held is free


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def without_locks(words):
    def refuse(file, how):
        if Path(f"/proc/self/fd/{file}").resolve().name != "lock":  # others have locks of their own
            return before(file, how)
        raise OSError(37, "No locks available")

    before, fcntl.flock = fcntl.flock, refuse
    return train_rank(words)


def test_a_file_system_without_locks(recipe):
    run = recipe.parent / "unlocked"
    (first, out, _), (second, also, _) = run_world(2, without_locks, [str(recipe), "run.name=unlocked"])
    assert (first, second) == (0, 0)
    said = f"run directory {run}: not locked (No locks available); do not start the same run twice\n"
    assert out.count(said) == 1 and "not locked" not in also


def test_a_signal_saves_and_the_same_command_runs_only_what_is_left(recipe):
    words = [recipe, "--stages", "ddp zero3", "run.name=stopped", "optim.lr_scheduler_type=constant"]
    words += ["train.export=false", "train.steps=5"]
    with subprocess.Popen([BIN / "shardbook", "compare", *words], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "zero3  step 1/" in line:
                process.send_signal(signal.SIGTERM)
                break
        rest = process.stdout.read()
    ddp = recipe.parent / "stopped" / "ddp" / "metrics.jsonl"
    before = ddp.read_bytes()
    assert process.returncode == 75 and rest.splitlines()[-1] == "stopped  in zero3; continue with run.name=stopped", (
        rest
    )
    result = subprocess.run([BIN / "shardbook", "compare", *words], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout
    assert "[1/2] ddp  done     this run has finished its 5 steps" in result.stdout and ddp.read_bytes() == before
    assert losses(recipe.parent / "stopped" / "zero3") == losses(recipe.parent / "stopped" / "ddp")
