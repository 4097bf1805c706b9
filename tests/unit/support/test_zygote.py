"""A rank that the zygote forks is what a fresh process would be to the launcher that started it, and to the test."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import write_recipe
from watcher import processes_below
from world import free_port, variables_of

pytestmark = pytest.mark.usefixtures("warm_ranks")
LONG = ("train.steps=100000", "train.export=false", "train.save_steps=0")


@pytest.fixture
def rank(zygote):
    """Starts `python -m shardbook.train` as a launcher does, whose sys.executable is the zygote's client."""
    started = []

    def start(*words, parent=(), **more):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = os.environ | variables_of(0, 1, free_port()) | more.pop("env", {})
        command = [*parent, zygote, "-m", "shardbook.train", *map(str, words)]
        started.append(subprocess.Popen(command, env=environment, **pipes, **more))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def forked_ranks() -> set[int]:
    """The ranks below the server: they have no command line of their own, and are leaders of sessions."""

    def leads(pid: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return os.getsid(pid) == pid != os.getpid()
        return False

    return set(filter(leads, processes_below(os.getpid())))


def ended(pids: set[int], seconds: float = 30) -> bool:
    until = time.monotonic() + seconds
    while (left := pids & processes_below(os.getpid()).keys()) and time.monotonic() < until:
        time.sleep(0.02)
    return not left


def test_words_folder_variables_and_streams_are_the_clients_and_the_code_comes_back(rank, tiny, tmp_path):
    write_recipe(tiny, tmp_path)
    file = {"SHARDBOOK_EXIT_FILE": str(tmp_path / "codes")}
    done = rank("./tiny.toml", "train.steps=1", "run.name=one", cwd=tmp_path, env=file)
    out, error = done.communicate()
    assert done.returncode == 0, error
    assert out.splitlines()[-1].startswith("done     1 steps") and (tmp_path / "one" / "metrics.jsonl").exists()
    refused = rank("./tiny.toml", "train.steps=none", cwd=tmp_path, env=file)
    out, error = refused.communicate()
    assert refused.returncode == 2 and error.startswith("shardbook: tiny.toml: train.steps = 'none'") and not out
    assert "RuntimeWarning" not in error
    assert (tmp_path / "codes").read_text() == "0\n2\n"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGKILL, -9)])
def test_a_signal_to_the_client_is_the_ranks(signum, code, rank, recipe):
    before = forked_ranks()
    process = rank(recipe, *LONG, f"run.name=signal-{signum}")
    while not process.stdout.readline().startswith("step 1/"):
        assert process.poll() is None
    (own,) = forked_ranks() - before
    process.send_signal(signum)
    assert process.wait() == code and ended({own})


def test_a_rank_that_is_killed_is_a_client_that_was(rank, recipe):
    before = forked_ranks()
    process = rank(recipe, *LONG, "run.name=killed")
    while not process.stdout.readline().startswith("step 1/"):
        assert process.poll() is None
    (own,) = forked_ranks() - before
    os.kill(own, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_its_parent_is_what_started_the_client(rank, recipe):
    """SHARDBOOK_LAUNCHER: the rank ends when that process has been killed."""
    code = "import os, subprocess, sys; os.environ['SHARDBOOK_LAUNCHER'] = str(os.getpid()); "
    code += "subprocess.run(sys.argv[1:])"
    before = forked_ranks()
    process = rank(recipe, *LONG, "run.name=orphan", parent=(sys.executable, "-c", code))
    while not process.stdout.readline().startswith("step 1/"):
        assert process.poll() is None
    (own,) = forked_ranks() - before
    process.kill()
    assert process.stderr.read().endswith("what started this process was killed; run the same command again\n")
    assert ended({own})


def test_what_is_no_rank_is_the_real_python(zygote):
    code = "import sys; print(sys.executable, *sys.argv[1:]); sys.exit(3)"
    for words in (["-c", code, "a", "b c"], ["-m", "this"]):
        done = subprocess.run([zygote, *words], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (3, f"{zygote} a b c\n") or "Namespaces" in done.stdout


def test_a_launcher_has_it_for_its_python_and_one_that_is_cold_has_not(zygote, monkeypatch):
    command = [sys.executable, "-c", "import sys; print(sys.executable)"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"{zygote}\n"
    monkeypatch.delenv("SHARDBOOK_TEST_WARM")
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"{sys.executable}\n"
    assert Path(zygote).stat().st_mode & 0o111
