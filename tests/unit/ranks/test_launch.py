"""Ranks that failed are started again: from a newer checkpoint, not after a refusal or a signal, on a new port."""

import json
import os
import subprocess
import sys

import pytest

from shardbook.cli import main

# what rank 0 does in each start: it ends with a code, is killed (-9), or has a signal sent to the launcher and fails
RANK = """
import json, os, pathlib, signal, sys
ends = json.loads(sys.argv[1])
log = pathlib.Path(sys.argv[2])
with log.open("a") as file:
    file.write(os.environ["MASTER_PORT"] + "\\n")
end = ends[len(log.read_text().split()) - 1]
if end == -9:
    os.kill(os.getpid(), 9)
if end == "signal":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the launcher passes on
    os.kill(os.getppid(), signal.SIGTERM)
    end = 1
sys.exit(end)
"""
CASES = {  # how each start ends, the newest step after it, restarts: the code, and how many starts there were
    "two failures": ([1, -9, 0], [0, 10], 3, 0, 3),
    "no restarts": ([1, 0], [], 0, 1, 1),
    "refused": ([2, 0], [], 3, 2, 1),
    "preempted": ([75, 0], [], 3, 75, 1),
    "told to stop": (["signal", 0], [], 3, 1, 1),
    "nothing new": ([1, 1, 0], [10, 10], 3, 1, 2),
    "too often": ([1, 1, 1, 0], [10, 20, 30], 2, 1, 3),
}
LAUNCH = """
import json, os, pathlib, sys
from shardbook.ranks import launch
os.chdir({folder!r})
os.environ["PYTHONPATH"] = {folder!r}
if sys.argv[1] == "planted":
    launch.WRONG = launch.DONE
for name, (ends, steps, restarts, *_) in json.loads(sys.argv[2]).items():
    left = launch.Restarts(restarts, iter(steps).__next__)
    log = pathlib.Path(name)
    code = launch.launch_ranks(1, [json.dumps(ends), name], restarts=left)
    ports = log.read_text().split()
    assert len(ports) == len(set(ports)), ports
    print("found", json.dumps([name, code, len(ports)]))
"""


def found(tmp_path, cases, bug=""):
    (tmp_path / "shardbook").mkdir()
    (tmp_path / "shardbook" / "__init__.py").touch()
    (tmp_path / "shardbook" / "train.py").write_text(RANK)
    command = [sys.executable, "-c", LAUNCH.format(folder=str(tmp_path)), bug, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line.removeprefix("found ")) for line in done.stdout.splitlines() if line.startswith("found ")]
    return {name: rest for name, *rest in lines}, done.stdout


def test_ranks_start_again_only_where_it_can_help(tmp_path):
    codes, said = found(tmp_path, CASES)
    assert codes == {name: [code, starts] for name, (*_, code, starts) in CASES.items()}
    assert "restart  from step 10; 1 more may follow\n" in said
    assert "restart  none: the run failed again after its restart from step 10\n" in said


def test_a_restart_after_a_refusal_is_seen(tmp_path):
    codes, _ = found(tmp_path, {"refused": [[2, 0], [0], *CASES["refused"][2:]]}, "planted")
    assert codes == {"refused": [0, 2]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-restarts=-1"], "--max-restarts -1: must be at least 0"),
        (
            ["--max-restarts=2", "--nodes=2", "--head=a"],
            "--max-restarts 2 with --nodes 2: machines do not agree on when",
        ),
    ],
)
def test_restarts_that_cannot_be_are_refused(words, said, capsys):
    assert main(["train", "smollm2-135m-zero1", *words]) == 2
    assert capsys.readouterr().err.startswith(f"shardbook: {said}")
