"""The worlds of ranks that tests run in."""

import os
import subprocess
import sys
import time
from pathlib import Path

from watcher import stat_of
from world import run_world

ROOT = Path(__file__).parents[3]


def asks_late():
    """What rank 1 reads from the store of rank 0, which has answered by then."""
    import time

    import torch.distributed as dist

    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("word", "kept")
        return "kept"
    time.sleep(0.5)
    return store.get("word").decode()


def test_a_late_rank_finds_the_store_of_rank_0():
    assert run_world(2, asks_late) == ["kept", "kept"]


def waits_for_one_that_is_gone():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        return "gone"
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return "noticed"


def test_who_waits_for_a_rank_that_has_answered_sees_its_end():
    assert run_world(2, waits_for_one_that_is_gone) == ["noticed", "gone"]


KILLED = """
import os, signal, time
from multiprocessing import forkserver
from watcher import stat_of
from world import forks
rank = forks().Process(target=signal.raise_signal, args=(signal.SIGSTOP,))
rank.start()
while stat_of(rank.pid)[0] != "T":
    time.sleep(0.01)
print(forkserver._forkserver._forkserver_pid, rank.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_gone(pid):
    try:
        return stat_of(pid)[0] in "ZX"
    except OSError:
        return True


def test_a_killed_session_leaves_neither_its_server_nor_a_stopped_rank():
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("tests/support", "src"))
    done = subprocess.run(
        [sys.executable, "-c", KILLED], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    pids = [*map(int, done.stdout.split())]
    assert len(pids) == 2, done.stderr
    while not all(map(is_gone, pids)):  # else nothing computes, which is red
        time.sleep(0.05)


NO_CUDA = """
import pathlib, torch
def ask(*_): raise AssertionError("CUDA was asked for before ranks were forked")
for name in ("is_available", "device_count", "get_device_name", "get_device_properties", "init", "_lazy_init"):
    setattr(torch.cuda, name, ask)
exists = pathlib.Path.exists
pathlib.Path.exists = lambda path, **how: str(path) == "/dev/nvidiactl" or exists(path, **how)
import preloaded
print("asked nothing")
"""


def test_the_server_of_ranks_asks_nothing_of_cuda_where_there_is_a_gpu():
    """A process that is forked after such a question cannot start CUDA: every test with ranks would fail."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("tests/support", "src"))
    done = subprocess.run(
        [sys.executable, "-c", NO_CUDA], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.stdout == "asked nothing\n", done.stderr


def test_ports_are_there_for_many_workers():
    """Sixteen workers of one machine, and more: each port is one that a rank may listen on."""
    for worker in (0, 13, 40):
        code = "import itertools, world; print(*itertools.islice(world.ports, 30_000))"
        more = {"PYTEST_XDIST_WORKER": f"gw{worker}", "PYTHONPATH": str(ROOT / "tests" / "support")}
        said = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | more, capture_output=True, text=True
        ).stdout
        ports = [*map(int, said.split())]
        assert len(set(ports[:22_000])) == 22_000 and min(ports) > 1024 and max(ports) < 32_768
