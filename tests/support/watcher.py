"""The watcher: a test in which nothing computes for a minute is red, with the stacks of every process, and ended.

Invariant: what computes is not red before SECONDS are over, on however full a machine. A look at a live test finds a
process that runs or waits for a disk, or CPU seconds that were used since; sixty looks at a dead one find neither.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import threading
import time
import traceback
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


def stat_of(pid: int) -> list[str]:
    """Returns what the kernel says of a process from its state on: field 3 of proc_pid_stat(5) is the first. The name
    before it may hold spaces, brackets and half a character. Raises OSError where the process has ended."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def processes_below(root: int) -> dict[int, Process]:
    """Returns `root` and what it has started, directly or not, by pid."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                words = stat_of(int(entry.name))
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
    folder, files = Path(os.environ[STACKS]), {}
    for pid in pids:
        file = folder / str(pid)
        if pid == os.getpid():  # not by a signal: its handler would walk this thread's stack while this thread runs
            with file.open("w") as own:
                faulthandler.dump_traceback(own)
            files[pid] = file
        elif file.exists():
            file.write_text("")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
                files[pid] = file
    until, sizes = time.monotonic() + GRACE_SECONDS, None
    while sizes != (sizes := [file.stat().st_size for file in files.values()]) or 0 in sizes:
        if time.monotonic() > until:  # one of them has ended, or is stopped
            break
        time.sleep(0.5)
    said = [f"process {pid}:\n{file.read_text()}" for pid, file in files.items()]
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
        running = any(process.state in "RD" for process in now.values())  # of this one its main thread's
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
        self.name, self.began = "", 0.0
        self.told: tuple[Watch, str] | None = None  # what the main thread is to fail with, and of which watch
        self.stderr = 2

    def pytest_configure(self, config) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a killed launcher leaves behind is this process's
        if hasattr(config, "workerinput"):
            end_with_parent()
        dump_on_signal()
        self.stderr = os.dup(2)  # before pytest captures what tests write there
        signal.signal(signal.SIGALRM, self._end)
        threading.Thread(target=self._look, daemon=True, name="watcher").start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        mark = item.get_closest_marker("quiet")
        self.name, self.began, self.told, self.watch = item.nodeid, time.monotonic(), None, Watch()
        self.limit = mark.args[0] if mark else QUIET_SECONDS
        signal.alarm(SECONDS)
        try:
            return (yield)
        finally:
            self.limit = None
            signal.alarm(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item, nextitem):
        """After the last test of a file, whose fixtures may have kept processes for all of it, none is left."""
        try:
            return (yield)
        finally:
            if nextitem is None or nextitem.path != item.path:
                self.limit = None  # what ends by itself may wait
                end_left_over(item.path.name)

    def _look(self) -> None:
        while True:
            time.sleep(1)
            limit, watch = self.limit, self.watch
            if limit is None or self.told:
                continue
            try:
                now = processes_below(os.getpid())
                if (quiet := watch.look(now, time.thread_time())) > limit:
                    self._tell(watch, f"nothing computed for {quiet:.0f} s\n{stacks_of([*now])}")
            except Exception:  # the next look may find what this one did not
                os.write(self.stderr, f"watcher: {traceback.format_exc()}".encode())

    def _tell(self, watch: Watch, reason: str) -> None:
        """Has the main thread fail the test; where it does not return from C, this ends its process, and says why."""

        def runs() -> bool:
            return self.watch is watch and self.limit is not None

        if not runs():
            return
        self.told = watch, reason
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
        until = time.monotonic() + GRACE_SECONDS
        while runs() and time.monotonic() < until:
            time.sleep(0.1)
        if runs():
            os.write(self.stderr, f"\n{reason}\nThe test does not end: its process is ended.\n".encode())
            kill([pid for pid in processes_below(os.getpid()) if pid != os.getpid()])
            os._exit(70)

    def _end(self, *_) -> None:
        """Handles SIGALRM, which the watcher's thread sends, or the clock; its test may have ended meanwhile."""
        told, self.told = self.told, None
        is_late = time.monotonic() - self.began >= SECONDS - 1
        if self.limit is None or not (is_late or (told and told[0] is self.watch)):
            return
        reason = told[1] if told else f"it did not end in {SECONDS} s\n" + stacks_of([*processes_below(os.getpid())])
        self.watch = Watch()  # its fixtures have as long again
        kill([process.pid for process in left_over()])
        pytest.fail(f"{self.name}: {reason}", pytrace=False)


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
    """Fails, after `name`'s tests, where a process is left that does not end by itself; it is named and killed."""
    until, watch = time.monotonic() + 10 * GRACE_SECONDS, Watch()
    itself = Process(os.getpid(), 0, "S", 0.0)  # it computes, since it looks
    while (left := left_over()) and time.monotonic() < until:
        if watch.look({process.pid: process for process in (*left, itself)}, 0.0) > GRACE_SECONDS:
            break
        time.sleep(0.05)
    if left:
        said = stacks_of([process.pid for process in left])
        kill([process.pid for process in left])
        pytest.fail(f"{name} leaves {len(left)} processes running:\n{said}", pytrace=False)


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
