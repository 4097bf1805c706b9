"""A rank that fails ends those of other nodes within seconds and with its reason, where no closed socket tells them (as
over NCCL): each rank here sits in a sleep."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from world import free_port

ROOT = Path(__file__).parents[2]
HOST = re.escape(socket.gethostname())
# `python -m shardbook.train` finds this one, and the real package for all else
PACKAGE = f"__path__.append({str(ROOT / 'src' / 'shardbook')!r})\n"
PROGRAM = """
import os, signal, sys, time
from shardbook.ranks.distributed import start_distributed
from shardbook.ranks.exits import FAILED, RunFailed, exit_rank, report_error

ranks = start_distributed(lost_seconds=10_000)
print("started", flush=True)
if os.environ["RANK"] == sys.argv[1]:
    time.sleep(1)
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        raise ValueError("no such thing") if sys.argv[2] == "bug" else RunFailed("train/loss is nan at step 7")
    except Exception as error:
        exit_rank(report_error(error, FAILED))
time.sleep(10_000)
"""
LAUNCH = "import sys; from shardbook.ranks.launch import Nodes, launch_ranks; "
LAUNCH += "sys.exit(launch_ranks(1, sys.argv[3:], Nodes(2, int(sys.argv[1]), sys.argv[2])))"


def end_two_nodes(folder, failing, how):
    """Two launchers of one rank each; exit codes and standard errors."""
    (folder / "shardbook").mkdir()
    (folder / "shardbook" / "__init__.py").write_text(PACKAGE)
    (folder / "shardbook" / "train.py").write_text(PROGRAM)
    head = f"127.0.0.1:{free_port()}"
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    nodes = [
        subprocess.Popen([sys.executable, "-c", LAUNCH, str(node), head, failing, how], env=environment, **pipes)
        for node in (0, 1)
    ]
    try:
        for node in nodes:
            assert node.stdout.readline() == "started\n", node.stderr.read()
        errors = [node.communicate()[1] for node in nodes]
        return [node.returncode for node in nodes], errors
    finally:
        for node in nodes:
            if node.poll() is None:
                node.send_signal(signal.SIGINT)
                node.send_signal(signal.SIGINT)


KILLED = rf"rank 1 \(host {HOST}\) was ended by SIGKILL; the kernel does so when memory runs out"


@pytest.mark.slow
@pytest.mark.parametrize(
    "failing, how, said",
    [
        ("1", "kill", KILLED),
        ("0", "kill", rf"rank 0 \(host {HOST}\) ended, and said why where it ran; run.*"),
        ("1", "bug", rf"rank 1 \(host {HOST}\) ended: ValueError: no such thing"),
        ("0", "nan", rf"rank 0 \(host {HOST}\) ended: train/loss is nan.*"),
    ],
)
def test_the_other_node_ends_with_the_reason(tmp_path, failing, how, said):
    codes, errors = end_two_nodes(tmp_path, failing, how)
    assert codes == [1, 1], errors
    last = errors[1 - int(failing)].strip().splitlines()[-1]
    assert re.fullmatch(f"shardbook: run failed: {said}", last), errors
