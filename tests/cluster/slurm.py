"""A real Slurm on this machine: munged, slurmctld and two slurmd as two nodes, `localhost` and `other`, out of one
directory, on ports of their own. Another Slurm that runs here is not touched. Needs root, and installs what is missing.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardbook.ranks.launch import free_port

PACKAGES = {"slurmctld": "slurm-wlm", "munged": "munge", "shellcheck": "shellcheck"}
# Slurm sorts them, and the first is a job's head: its name must resolve. In the file a first `localhost` is refused.
NODES = ("other", "localhost")
DAEMONS = ("munged", "slurmctld", *(f"slurmd.{node}" for node in NODES))
# cred_expire: how long a requeued job waits at the least; 120 unless told. KillWait: from SIGTERM to SIGKILL.
# FirstJobId: a job's port comes from its number, and another test run here would have the same.
# JobRequeue and KillOnBadExit as a cluster may have them, against which the script must stand.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={pid}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munged.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
JobRequeue=0
KillOnBadExit=1
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


@contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands reach the cluster, which ends with the block."""
    install()
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # in a short path: munged's socket is in it
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "munged.key").touch(mode=0o600)
    (folder / "munged.key").write_bytes(os.urandom(64))
    config = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    here = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()}"
    nodes = "\n".join(f"NodeName={node} {here} Port={free_port()}" for node in NODES)
    config.write_text(CONFIG.format(folder=folder, host=host, port=free_port(), pid=os.getpid(), nodes=nodes))
    # what an outer job would say to sbatch and srun goes
    environment = {name: value for name, value in os.environ.items() if not re.match("SLURM|SBATCH|SRUN", name)}
    environment["SLURM_CONF"] = str(config)
    munge = [f"--{part}-file={folder}/munged.{part}" for part in ("key", "pid", "log", "seed")]
    try:
        subprocess.run(["munged", f"--socket={folder}/munged.socket", *munge], check=True)
        subprocess.run(["slurmctld", "-f", config], check=True)
        for node in NODES:
            subprocess.run(["slurmd", "-f", config, "-N", node], check=True)
        until(lambda: run("sinfo", "-h", "-o", "%D %t", env=environment).strip() == "2 idle", 60)
        yield environment
        until(lambda: no_job_left(environment), 60)
    finally:
        for daemon in reversed(DAEMONS):
            stop(folder / f"{daemon}.pid")
    shutil.rmtree(folder)


def install() -> None:
    if os.geteuid() != 0:
        pytest.fail("a Slurm of its own needs root", pytrace=False)
    absent = [package for program, package in PACKAGES.items() if not shutil.which(program)]
    if absent and not shutil.which("apt-get"):
        pytest.fail(f"{', '.join(absent)}: not installed, and there is no apt-get to install them with", pytrace=False)
    if absent:
        for words in (["update"], ["install", "--yes", "--no-install-recommends", *absent]):
            done = subprocess.run(["apt-get", "-qq", *words], capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr or done.stdout).strip().splitlines()[-1]
                pytest.fail(f"apt-get {' '.join(words)} failed: {last}", pytrace=False)


def no_job_left(environment: dict[str, str]) -> bool:
    """Cancels what there is, each time: a script that is wrong may bring its job back."""
    run("scancel", "--user=root", env=environment)
    return not run("squeue", "-h", env=environment)


def stop(pid_file: Path) -> None:
    """End the daemon that wrote `pid_file`, if it ever came to that."""
    if pid_file.exists():
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        until(lambda: not Path(f"/proc/{pid}").exists(), 30)


def run(*words: str, **more) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(words, capture_output=True, text=True, **more)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def until(true: Callable[[], bool], seconds: float, told: Callable[[], str] = str) -> None:
    """Wait for what must come; `told` says what there is where it does not."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not in {seconds:.0f} s; {told()}"
        time.sleep(0.2)
