"""The launcher: starts a machine's ranks (`python -m shardbook.train`), passes signals on and keeps exit codes.

On several machines each starts its own ranks, and rank 0 of the first listens for the others. Not torchrun, for one
reason: it turns every failure of a rank into exit code 1 and a report of its own, and a Shardbook run's exit codes and
last line have meanings. (torchrun, accelerate launch and srun can start the same ranks.) Invariants: ranks are started
again only after all have ended by a failure, and never twice from the same step: what is wrong there would be again.
They are started before torch is imported here, which would take more than a second.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import SystemRandom
from types import FrameType
from typing import Any

from shardbook.ranks.exits import DONE, FAILED, LAUNCHER, PREEMPTED, WRONG, watch_launcher
from shardbook.ranks.launchers import Rendezvous, check_alone
from shardbook.ranks.machine import has_driver
from shardbook.ranks.process_env import allocator_default, malloc_defaults
from shardbook.ranks.signals import STOPS
from shardbook.recipe import RecipeError

POLL_SECONDS = 0.1
PORT = 29500
SENDERS = {
    "SIGKILL": "; the kernel does so when memory runs out",
    "SIGBUS": "; the kernel does so when a file that it had read, as the cache of datasets, is cut short",
    "SIGABRT": "; NCCL does so when a collective takes too long, gloo when ranks differ in its size; above is which",
}


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, and this one's number. `head`: the first one's host or host:port."""

    count: int = 1
    rank: int = 0
    head: str = ""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise RecipeError(f"--nodes {self.count}: must be at least 1")
        if not 0 <= self.rank < self.count:
            raise RecipeError(f"--node-rank {self.rank}: must be from 0 to {self.count - 1} with --nodes {self.count}")
        if self.count > 1 and not self.head:
            raise RecipeError(f"--nodes {self.count}: needs --head, the first machine's host or host:port")
        _, colon, port = self.head.partition(":")
        if colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
            allowed = "must be a host or host:port, with a port from 1 to 65535; an IPv6 address by its name"
            raise RecipeError(f"--head {self.head}: {allowed}")

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.head.partition(":")
        return host or "127.0.0.1", int(port or PORT) if self.count > 1 else free_port()


@dataclass
class Restarts:
    """The restarts that are `left`; `newest` returns the step that the next one goes on from."""

    left: int = 0
    newest: Callable[[], int] = lambda: 0
    began: set[int] = field(default_factory=set)

    def again(self) -> bool:
        """Returns whether ranks that failed may be started again, and says so."""
        if not self.left:
            return False
        step = self.newest()
        if step in self.began:
            print(f"restart  none: the run failed again after its restart from step {step}", flush=True)
            return False
        self.began.add(step)
        self.left -= 1
        print(f"restart  from step {step}; {self.left} more may follow", flush=True)
        return True


def launch_ranks(
    nproc: int,
    words: list[str],
    nodes: Nodes = Nodes(),
    restarts: Restarts | None = None,
    module: str = "shardbook.train",
) -> int:
    """Runs `nproc` ranks here with the command line `words`. Returns the exit code of the first that fails, else 0.

    When one fails the others are killed: they would wait for it in a collective. Other nodes' ranks get the reason.
    Ranks that failed, not by a recipe (2) or a signal (75), are started again as often as `restarts` allows.
    """
    if nodes.count == 1:
        check_alone(os.environ, module)
    watch_launcher()  # ends this process where its comparison is killed
    processes: list[subprocess.Popen[Any]] = []
    with passing_signals(processes, _for_ranks) as (asked, _):
        while True:
            processes.clear()
            code = _run_ranks(nproc, [module, *words], nodes, processes, asked)
            if code in (DONE, WRONG, PREEMPTED) or asked or not (restarts and restarts.again()):
                return code


@contextlib.contextmanager
def passing_signals(
    processes: list[subprocess.Popen[Any]], choose: Callable[[list[int]], int] = lambda asked: asked[-1]
) -> Iterator[tuple[list[int], set[subprocess.Popen[Any]]]]:
    """Passes requests to stop that come inside on to the running `processes`, as the signal that `choose` returns of
    all that came. Yields the list of these and the processes that got one: a process that is started after one did
    not."""
    asked, told = list[int](), set[subprocess.Popen[Any]]()

    def pass_on(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        for process in processes:
            if process.poll() is None:
                process.send_signal(choose(asked))
                told.add(process)

    before = {signum: signal.signal(signum, pass_on) for signum in STOPS}
    try:
        yield asked, told
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _for_ranks(asked: list[int]) -> int:
    """Returns the signal for ranks: never SIGINT, which goes to ranks that are alone. A second Ctrl-C ends them at
    once, without saving, and so does a second SIGTERM, which a rank counts itself."""
    if asked.count(signal.SIGINT) > 1:
        return signal.SIGKILL
    return signal.SIGUSR1 if asked[-1] == signal.SIGINT else asked[-1]


def _run_ranks(
    nproc: int, words: list[str], nodes: Nodes, processes: list[subprocess.Popen[Any]], asked: list[int]
) -> int:
    """Starts ranks, of the module that `words` begins with, as `processes`, and waits until they have ended. Returns
    the exit code."""
    host, port = nodes.address  # on one machine a new port for each start
    shared = {
        "WORLD_SIZE": str(nodes.count * nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        LAUNCHER: str(os.getpid()),
        **allocator_default(os.environ),
        **({} if has_driver() else malloc_defaults(os.environ)),
        # else ranks that lose the store print C++ stacks over the one line with the reason
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    command = [sys.executable, "-m", *words]
    for rank in range(nproc):
        environment = os.environ | shared | {"RANK": str(nodes.rank * nproc + rank), "LOCAL_RANK": str(rank)}
        # a session of its own, so that Ctrl-C reaches a rank once, from this process, and not twice
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
    if asked:  # a signal came while ranks were being started: the later ones did not get it
        for process in processes:
            process.send_signal(signal.SIGUSR1)
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, DONE, PREEMPTED):  # preempted ranks all save and leave by themselves
                failed = nodes.rank * nproc + rank
                if code < 0 and failed and nodes.count > 1:  # a rank's own failure it prints; rank 0 has the store
                    from shardbook.ranks.heartbeat import tell_run  # it imports torch

                    reason = f"rank {failed} (host {socket.gethostname()}) was ended by {_name_signal(code)}"
                    tell_run(Rendezvous(failed, nodes.count * nproc, host=host, port=port), reason, nodes.rank == 0)
                for process in processes:
                    process.kill()
                    process.wait()
                return _explain_exit(failed, code, bool(asked))
        if None not in codes:
            return max(code for code in codes if code is not None)
        time.sleep(POLL_SECONDS)


def _explain_exit(rank: int, code: int, is_asked: bool) -> int:
    """Returns the run's exit code for a rank's, and prints the reason for a rank that a signal ended. `is_asked`: a
    signal was passed on to all ranks, which did not save."""
    if code >= 0:
        return code
    if is_asked and code in (-signal.SIGTERM, -signal.SIGUSR1):  # before the ranks listened for it
        print("shardbook: stopped before the first step; run the same command again", file=sys.stderr)
        return PREEMPTED
    insists = is_asked and code == -signal.SIGKILL
    reason = "quit without saving" if insists else f"rank {rank} was ended by {_name_signal(code)}"
    way_out = "" if insists else "; the same command with this run's run.name goes on from its newest checkpoint"
    print(f"shardbook: run failed: {reason}{way_out}", file=sys.stderr)
    return FAILED


def free_port() -> int:
    """Returns a free port below the ephemeral range: it is bound seconds later, after an import of torch, and until
    then the kernel could give a port of that range to another process."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port := SystemRandom().randrange(10_000, 20_000)))
            return port


def _name_signal(code: int) -> str:
    name = signal.Signals(-code).name
    return name + SENDERS.get(name, "")
