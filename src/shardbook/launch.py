"""Start the ranks of one machine: N processes of `python -m shardbook.train`, signals passed on, exit codes kept.

Not torchrun, for one reason: it turns every failure of a rank into exit code 1 and a report of its own, and the exit
codes and the last line of a Shardbook run mean something. Several machines start with torchrun, accelerate or Slurm.
"""

import os
import signal
import subprocess
import sys
import time
from types import FrameType

from shardbook.dist import DONE, FAILED, PREEMPTED, free_port

POLL_SECONDS = 0.1


def launch_ranks(nproc: int, words: list[str]) -> int:
    """Run `nproc` ranks with the command line `words`; the exit code of the first that fails, else 0.

    When one fails the others are killed: they would wait for it in a collective.
    """
    shared = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    # Each rank computes with its share of the cores: more threads than cores makes CPU runs several times slower.
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    processes: list[subprocess.Popen[bytes]] = []

    asked: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        insists = asked.count(signal.SIGINT) > 1  # a second Ctrl-C: at once, without saving
        for process in processes:
            if process.poll() is None:
                # never SIGINT: a rank that is still importing would answer with a traceback
                process.send_signal(signal.SIGKILL if insists else signal.SIGTERM)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, pass_on)
    for rank in range(nproc):
        environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        # a session of its own, so that Ctrl-C reaches a rank once, through us, and not twice
        processes.append(
            subprocess.Popen([sys.executable, "-m", "shardbook.train", *words], env=environment, start_new_session=True)
        )
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, DONE, PREEMPTED):  # preempted ranks all save and leave by themselves
                for process in processes:
                    process.kill()
                    process.wait()
                if asked and code in (-signal.SIGTERM, -signal.SIGKILL):
                    return _explain_stop(code)
                return _explain_exit(rank, code)
        if None not in codes:
            return max(code for code in codes if code is not None)
        time.sleep(POLL_SECONDS)


def _explain_stop(code: int) -> int:
    """The exit code where ranks ended by the signal that was passed on to them, without having saved."""
    early = code == -signal.SIGTERM  # before they listened for it
    reason = "stopped before the first step; run the same command again" if early else "run failed: quit without saving"
    print(f"shardbook: {reason}", file=sys.stderr)
    return PREEMPTED if early else FAILED


def _explain_exit(rank: int, code: int) -> int:
    """The exit code to return for a rank's; a rank that a signal ended could not give its reason itself."""
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    hint = "; the kernel does so when memory runs out" if name == "SIGKILL" else ""
    print(f"shardbook: run failed: rank {rank} was ended by {name}{hint}", file=sys.stderr)
    return FAILED
