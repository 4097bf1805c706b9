"""The watcher: a test in which nothing computes for a minute is red, with the stacks of every process, and ended.

Invariant: what takes long is never red here, on however full a machine. A look at a live test finds a process that runs
or waits for a disk, or CPU seconds that were used since; sixty looks at a dead one find neither.
"""

import ctypes
import faulthandler
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

QUIET_SECONDS = 60  # a test that waits longer by intent says pytest.mark.quiet(seconds)
IDLE_CPU_SECONDS = 1.0  # in all of them together: timers, heartbeats and polling use some
SECONDS = 1200  # of one test, its fixtures among them: what computes for ever is red too
GRACE_SECONDS = 10  # for a process that is ending by itself, and for a test that was told to
STACKS = "SHARDBOOK_TEST_STACKS"  # a folder: each Python process writes its stacks to <pid> there when SIGUSR2 asks
TICKS = os.sysconf("SC_CLK_TCK")
KEPT: set[int] = set()  # processes that are there for more than one test, beside the server of ranks
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    state: str
    cpu_seconds: float


def processes_below(root: int) -> dict[int, Process]:
    """Returns `root` and what it has started, directly or not, by pid."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:  # stat: proc_pid_stat(5); a name may hold spaces and brackets
                words = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            seconds = (int(words[11]) + int(words[12])) / TICKS
            found[int(entry.name)] = Process(int(entry.name), int(words[1]), words[0], seconds)
    below = {root}
    while more := {pid for pid, process in found.items() if process.parent in below} - below:
        below |= more
    return {pid: found[pid] for pid in below & found.keys()}


def dump_on_signal() -> None:
    """Makes SIGUSR2 write the stacks of all threads of this process, also where one of them never returns from C."""
    if folder := os.environ.get(STACKS):
        faulthandler.register(signal.SIGUSR2, (Path(folder) / str(os.getpid())).open("a"), all_threads=True)


def end_with_parent() -> None:
    """Makes the kernel end this process when the one that started it ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def stacks_of(pids: list[int]) -> str:
    """Returns what `dump_on_signal` writes in each of the processes that called it, and the state of all."""
    folder, told = Path(os.environ[STACKS]), []
    for pid in pids:
        if (folder / str(pid)).exists():
            (folder / str(pid)).write_text("")
            os.kill(pid, signal.SIGUSR2)
            told.append(pid)
    time.sleep(1)
    said = [f"process {pid}:\n{(folder / str(pid)).read_text()}" for pid in told]
    listed = ["ps", "wwo", "pid,ppid,etimes,time,stat,wchan:24,args", "-p", ",".join(map(str, pids))]
    return "\n".join([*said, subprocess.run(listed, capture_output=True, text=True).stdout])


class Watch:
    """What the looks at one test have found: since when nothing computes, and what was used until then."""

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.used: dict[int, float] = {}

    def look(self, now: dict[int, Process], own_seconds: float) -> float:
        """Returns for how many seconds nothing has computed. `own_seconds`: CPU seconds of the thread that looks."""
        used = {pid: process.cpu_seconds for pid, process in now.items()}
        used[os.getpid()] -= own_seconds
        running = any(process.state in "RD" for pid, process in now.items() if pid != os.getpid())
        if (
            running
            or used.keys() != self.used.keys()
            or sum(used.values()) - sum(self.used.values()) > IDLE_CPU_SECONDS
        ):
            self.since, self.used = time.monotonic(), used
        return time.monotonic() - self.since


class Watcher:
    """The plugin, of a process that runs tests: a thread that looks once a second while one runs."""

    def __init__(self) -> None:
        self.limit: float | None = None  # of the test that runs
        self.watch = Watch()
        self.reason = ""
        self.stderr = 2

    def pytest_configure(self, config) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a killed launcher leaves behind is this process's
        if hasattr(config, "workerinput"):
            end_with_parent()
        dump_on_signal()
        self.stderr = os.dup(2)  # before pytest captures what tests write there
        threading.Thread(target=self._look, daemon=True, name="watcher").start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        mark = item.get_closest_marker("quiet")
        before = signal.signal(signal.SIGALRM, functools.partial(self._end, item.nodeid))
        self.reason, self.watch = "", Watch()
        self.limit = mark.args[0] if mark else QUIET_SECONDS
        signal.alarm(SECONDS)
        try:
            return (yield)
        finally:
            self.limit = None
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item, nextitem):
        """After the last test of a file, whose fixtures may have kept processes for all of it, none is left."""
        result = yield
        if nextitem is None or nextitem.path != item.path:
            self.limit = None  # what ends by itself may wait
            end_left_over(item.path.name)
        return result

    def _look(self) -> None:
        while True:
            time.sleep(1)
            limit, watch = self.limit, self.watch
            if limit is None or self.reason:
                continue
            now = processes_below(os.getpid())
            quiet = watch.look(now, time.thread_time())
            if quiet > limit and watch is self.watch and self.limit:
                self.reason = f"nothing computed for {quiet:.0f} s"
                self._tell(watch, [*now])

    def _tell(self, watch: Watch, pids: list[int]) -> None:
        """Has the main thread fail the test; where it does not return from C, this ends its process, and says why."""
        self.reason += "\n" + stacks_of(pids)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
        until = time.monotonic() + GRACE_SECONDS
        while self.watch is watch and self.limit and self.reason and time.monotonic() < until:
            time.sleep(0.1)
        if self.watch is watch and self.limit and self.reason:
            os.write(self.stderr, f"\n{self.reason}\nThe test does not end: its process is ended.\n".encode())
            kill([pid for pid in processes_below(os.getpid()) if pid != os.getpid()])
            os._exit(70)

    def _end(self, name: str, *_) -> None:
        reason = self.reason or f"it did not end in {SECONDS} s\n" + stacks_of([*processes_below(os.getpid())])
        self.reason = ""
        kill([process.pid for process in left_over()])
        pytest.fail(f"{name}: {reason}", pytrace=False)


def left_over() -> list[Process]:
    """Returns what this process has started and what is not there for all tests, as the server of ranks is."""
    kept = {os.getpid(), forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid, *KEPT}
    return [
        process
        for process in processes_below(os.getpid()).values()
        if process.pid not in kept and process.state not in "ZX" and not is_kept(process.pid)
    ]


def is_kept(pid: int) -> bool:
    """Whether a process is of a pool that torch keeps for the life of its parent, to compile in."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"torch/_inductor/compile_worker" in words


def end_left_over(name: str) -> None:
    """Fails, after `name`'s tests, where a process is left; it is named and killed."""
    until = time.monotonic() + GRACE_SECONDS
    while (left := left_over()) and time.monotonic() < until:
        time.sleep(0.05)
    if left:
        said = stacks_of([process.pid for process in left])
        kill([process.pid for process in left])
        pytest.fail(f"{name} leaves {len(left)} processes running:\n{said}", pytrace=False)


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            print(f"{pid} has ended meanwhile", file=sys.stderr)
