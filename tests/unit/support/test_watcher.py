"""The watcher turns each sort of hang red, with stacks, and leaves nothing running; what computes stays green."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watcher import IDLE_CPU_SECONDS, Process, Watch, processes_below

TESTS = Path(__file__).parents[2]
MARK = f"7431.{os.getpid()}"  # seconds that what must not outlive its test would sleep

HANGS = f"""
import ctypes, subprocess, sys, threading, time

import pytest
from world import forks, run_world

pytestmark = pytest.mark.quiet(4)
SLEEPS = [sys.executable, "-c", "import time; time.sleep({MARK})"]


def rank_1_is_late():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep({MARK})
    dist.barrier()


def rank_waits_in_c():
    mutex = ctypes.create_string_buffer(64)  # zeros: one that nobody has; no signal ends the wait for it
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


def rank_waits_for_a_thread():
    thread = threading.Thread(target=never_released)
    thread.start()
    thread.join()


def never_released():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@pytest.mark.parametrize("size, function", [(2, rank_1_is_late), (1, rank_waits_in_c), (1, rank_waits_for_a_thread)])
def test_ranks(size, function):
    run_world(size, function)


def test_a_launcher():
    subprocess.run([sys.executable, "-c", f"import subprocess; subprocess.run({{SLEEPS}})"])


def test_itself():
    never_released()


def test_what_computes_is_green():
    until = time.monotonic() + 9
    while time.monotonic() < until:
        sum(range(1000))


def test_a_child_that_computes_is_green():
    subprocess.run([sys.executable, "-c", "import time; s = time.monotonic()\\nwhile time.monotonic() < s + 9: pass"])


def test_left_over():
    subprocess.Popen(SLEEPS)
"""
STUCK = """
import ctypes

import pytest


@pytest.mark.quiet(2)
def test_never_returns_from_c():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def run_pytest(text: str, folder: Path) -> tuple[int, str]:
    """The exit code of a run of one file of tests with the suite's own plugins, and all that it prints."""
    (folder / "test_hangs.py").write_text(text)
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "-c",
        str(TESTS.parent / "pyproject.toml"),
    ]
    paths = os.pathsep.join([str(TESTS), str(TESTS / "support"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    ended = subprocess.run(
        [*words, f"--rootdir={folder}", str(folder / "test_hangs.py")],
        env={name: value for name, value in environment.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
    )
    return ended.returncode, ended.stdout + ended.stderr


def processes_with(mark: str) -> list[str]:
    said = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout.splitlines()
    return [line for line in said if f"time.sleep({mark})" in line and "pytest" not in line]


@pytest.mark.slow
def test_each_sort_of_hang_is_red_with_stacks_and_nothing_outlives_it(tmp_path):
    code, said = run_pytest(HANGS, tmp_path)
    assert code == 1 and "5 failed, 3 passed, 1 error" in said, said
    parts = re.split(r"^_{3,} .*?(test_\S+) _{3,}$", said, flags=re.M)
    of = dict(zip(parts[1::2], parts[2::2], strict=True))
    stacks = {
        "test_ranks[2-rank_1_is_late]": ("rank_1_is_late", "barrier"),
        "test_ranks[1-rank_waits_in_c]": ("rank_waits_in_c",),
        "test_ranks[1-rank_waits_for_a_thread]": ("rank_waits_for_a_thread", "never_released"),
        "test_a_launcher": (MARK, "subprocess.py"),
        "test_itself": ("never_released",),
    }
    for name, words in stacks.items():
        assert "nothing computed for" in of[name] and all(word in of[name] for word in words), of[name]
    assert "test_hangs.py leaves 1 processes running" in of["test_left_over"], said
    assert not processes_with(MARK)


@pytest.mark.slow
def test_a_test_that_does_not_return_ends_with_its_process_and_its_stacks(tmp_path):
    code, said = run_pytest(STUCK, tmp_path)
    assert code == 70 and "test_never_returns_from_c" in said, said
    assert "nothing computed for" in said and "its process is ended" in said


def test_processes_below_are_those_that_were_started():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        below = processes_below(os.getpid())
        assert {os.getpid(), child.pid} <= below.keys() and below[child.pid].parent == os.getpid()
        assert os.getppid() not in below
        child.communicate(b"\n")
    assert child.pid not in processes_below(os.getpid())


def look(watch, *processes, own_seconds=0.0):
    return watch.look({process.pid: process for process in processes}, own_seconds)


def test_what_a_look_counts_as_computing():
    own, watch = os.getpid(), Watch()
    asleep = Process(own, 1, "S", 5.0), Process(7, own, "S", 3.0)
    look(watch, *asleep)
    since = watch.since
    time.sleep(0.02)
    assert look(watch, *asleep) >= 0.02 and watch.since == since
    # the watcher's own seconds are not the test's
    assert look(watch, Process(own, 1, "S", 5.0 + 9), asleep[1], own_seconds=9.0) >= 0.02
    for change in (
        (Process(own, 1, "R", 5.0), asleep[1]),
        (asleep[0], Process(7, own, "R", 3.0)),
        (asleep[0], Process(7, own, "D", 3.0)),
        (asleep[0], Process(7, own, "S", 3.0 + 2 * IDLE_CPU_SECONDS)),
        (asleep[0],),
    ):
        watch.since = 0.0
        assert look(watch, *change) < 1
