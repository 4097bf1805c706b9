"""A rank that was stopped (SIGSTOP), whose run was continued by others, and that then wakes up (SIGCONT) changes
nothing; a disk that another program fills while a checkpoint is written costs no number."""

import functools
import hashlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from test_kills import SAVING, SECONDS, count_rows, launch, plan_nothing
from world import losses, run_train

from shardbook.run.checkpoint.format import list_checkpoints, verify

STEPS = 6
WORDS = (f"train.steps={STEPS}", *SAVING)


@pytest.fixture(scope="module")
def straight(recipe):
    return run_train(2, recipe, "straight", *WORDS, "train.async_save=false")


def asleep(rank, name, step, bug=None):
    """The rank stops just before the operation `name` of the checkpoint of `step`."""
    from shardbook.run.checkpoint import disk

    plan_nothing()
    bug and bug()
    real = getattr(disk, name)

    def sleeps(*paths):
        if os.environ["RANK"] == str(rank) and f"{step:06d}" in str(paths[0].parent if name == "create" else paths[-1]):
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*paths)

    setattr(disk, name, sleeps)


def wait_stopped(process):
    began = time.monotonic()
    while (state := Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0]) != "T":
        assert process.is_alive() and time.monotonic() < began + SECONDS, state
        time.sleep(0.02)


def contents(run):
    """And when each file was last written: a run is bitwise, so a file that is written anew may have its bytes."""
    return {
        str(path.relative_to(run)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(run.rglob("*"))
        if path.is_file() and "hang" not in path.parts
    }


def wake_up(recipe, tmp_path, name, rank, place, mode, bug=None, keep=2):
    """The run's files before and after the rank woke up, its exit code, and what it said."""
    run = recipe.parent / name
    # gloo does not tell each operation that its peer has gone: the heartbeat ends those that it leaves waiting
    words = [*WORDS, f"train.async_save={mode}", f"run.name={name}", f"train.save_total_limit={keep}"]
    words.append("run.lost_seconds=20")
    first = launch(recipe, words, tmp_path / "first", functools.partial(asleep, rank, place, 3, bug))
    wait_stopped(first[rank])
    first[1 - rank].kill()
    if rank == 0:  # its lock is of this host: on another's disk it would hold nobody
        (run / "lock").unlink()
    again = launch(recipe, words, tmp_path / "again", functools.partial(asleep, -1, place, 3, bug))
    for process in again:
        process.join(SECONDS)
    assert [process.exitcode for process in again] == [0, 0], (tmp_path / "again" / "0").read_text()[-2000:]
    before = contents(run)
    began = time.monotonic()
    while first[rank].is_alive() and time.monotonic() < began + SECONDS:
        os.kill(first[rank].pid, signal.SIGCONT)  # again: it may have been woken before each of its threads slept
        first[rank].join(1)
    code = first[rank].exitcode
    first[rank].kill()
    return run, before, contents(run), code, (tmp_path / "first" / f"{rank}").read_text()


CASES = {
    "file": (1, "create", "false"),
    "file-behind": (1, "create", "true"),
    "file-0": (0, "create", "true"),
    "publish": (0, "rename", "false"),
    "publish-behind": (0, "rename", "true"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "file-behind")) for name in CASES]
)
def test_a_rank_that_wakes_up_changes_nothing(recipe, straight, tmp_path, name):
    run, before, after, code, said = wake_up(recipe, tmp_path, f"woken-{name}", *CASES[name])
    assert before == after and code == 1, (code, said[-2000:])
    assert losses(run) == losses(straight)
    found = list_checkpoints(run / "checkpoints")
    assert [each.name for each in found] == ["step-000006", "step-000005"]
    for each in found:
        verify(each)
    assert len(list((run / "checkpoints").iterdir())) == 2


def published_files_are_written():
    """Planted bug: a rank writes into the checkpoint itself, and opens files anew, as DCP does."""
    from shardbook.run.checkpoint import disk

    real = disk.create

    def create(path):
        published = path.parents[1] / f"step-{path.parent.name.split('-')[1]}" / path.name
        if published.exists():
            return os.open(published, os.O_WRONLY | os.O_TRUNC)
        return real(path)

    disk.create = create


@pytest.mark.slow
def test_a_published_file_that_is_written_turns_it_red(recipe, tmp_path):
    found = wake_up(recipe, tmp_path, "written", *CASES["file"], published_files_are_written, keep=0)
    assert found[1] != found[2], found[3:]


# -- a disk that never answers


def unanswered():
    """Rank 1's thread waits for its disk for ever."""
    from shardbook.run.checkpoint import async_save, disk

    plan_nothing()
    async_save.WRITE_SECONDS = 3
    real = disk.sync

    def sync(file):
        while os.environ["RANK"] == "1" and threading.current_thread().name.startswith("checkpoint"):
            time.sleep(1)
        real(file)

    disk.sync = sync


def test_a_disk_that_never_answers_is_named_and_ends_the_run(recipe, tmp_path):
    """When the next save is due; and the run goes on from what was published before."""
    words = [*WORDS, "train.async_save=true", "run.name=unanswered"]
    processes = launch(recipe, words, tmp_path / "first", unanswered)
    for process in processes:
        process.join(SECONDS)
    said = (tmp_path / "first" / "1").read_text()
    assert [process.exitcode for process in processes] == [1, 1], said[-2000:]
    assert "checkpoint of step 1: rank 1 has not written its part for 3 s; check its disk" in said, said[-2000:]
    assert list_checkpoints(recipe.parent / "unanswered" / "checkpoints") == []


# -- a disk that is full


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 8 MB."""
    (folder := tmp_path / "disk").mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mount is refused: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def filled(rank, number, folder):
    """Just before the rank's write of that number another program takes all that is free on the disk."""
    from shardbook.run.checkpoint import disk

    plan_nothing()
    real, count = disk.write, []

    def write(file, data):
        count.append(1)
        if len(count) == number and os.environ["RANK"] == str(rank):
            with (folder / "other").open("wb", buffering=0) as other:
                try:
                    while other.write(bytes(4096)):
                        pass
                except OSError:
                    pass
        real(file, data)

    disk.write = write


@pytest.mark.parametrize(
    ("rank", "number", "mode"),
    [
        (1, 7, "true"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(0, 1, "true"), (0, 10, "false"), (1, 7, "false")]),
    ],
)
def test_a_disk_that_fills_up_costs_no_number(recipe, straight, tmp_path, small_disk, rank, number, mode):
    words = [*WORDS, f"train.async_save={mode}", f"run.dir={small_disk}", "run.name=full"]
    run = small_disk / "full"
    processes = launch(recipe, words, tmp_path / "first", functools.partial(filled, rank, number, small_disk))
    for process in processes:
        process.join(SECONDS)
    said = "".join((tmp_path / "first" / f"{each}").read_text() for each in range(2))
    assert [process.exitcode for process in processes] == [1, 1] and "No space left on device" in said, said[-3000:]
    for each in list_checkpoints(run / "checkpoints"):
        verify(each)
    assert count_rows(run) >= len(list_checkpoints(run / "checkpoints"))
    (small_disk / "other").unlink()
    processes = launch(recipe, words, tmp_path / "again")
    for process in processes:
        process.join(SECONDS)
    assert [process.exitcode for process in processes] == [0, 0], (tmp_path / "again" / "0").read_text()[-2000:]
    assert losses(run) == losses(straight) and len(list((run / "checkpoints").iterdir())) == 2
