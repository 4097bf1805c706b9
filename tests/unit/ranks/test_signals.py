"""A signal that comes while a line is being written is a request to stop, not a crash."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from world import forks, free_port, run_world, variables_of

from shardbook.ranks.signals import StopFlag


class Busy:
    """A standard output in the middle of a write."""

    def write(self, text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    flush = write


def signalled():
    from shardbook.ranks.distributed import start_distributed
    from shardbook.ranks.signals import StopFlag

    start_distributed()
    stop, real = StopFlag().listen(), sys.stdout
    sys.stdout = Busy()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        sys.stdout = real
    return stop.asked


@pytest.mark.parametrize("has_steps", [True, False])
def test_a_request_is_answered_on_standard_error(has_steps, capfd, monkeypatch):
    """A program that reads the output, as of `shardbook eval --json`, reads no line for people."""
    monkeypatch.setenv("RANK", "0")
    before = signal.getsignal(signal.SIGINT)
    StopFlag(has_steps=has_steps)._ask(signal.SIGINT, None)
    signal.signal(signal.SIGINT, before)
    when = "after the step under way, or the next; Ctrl-C again to quit without saving"
    assert capfd.readouterr() == ("", f"stopping {when if has_steps else 'before the first step'}\n")


def test_a_signal_in_mid_write():
    assert run_world(1, signalled) == [True]


def ending(folder):
    from shardbook.ranks.exits import exit_rank

    os.environ["SHARDBOOK_EXIT_FILE"] = f"{folder}/none/such"
    exit_rank(3)


def test_a_rank_that_must_end_ends_where_its_exit_file_cannot_be_written(tmp_path):
    process = forks().Process(target=ending, args=(tmp_path,))
    process.start()
    process.join(240)
    assert process.exitcode == 3


def stopped_late():
    """The signal comes when the process group is gone: the run is done."""
    from shardbook.ranks.distributed import start_distributed, stop_distributed
    from shardbook.ranks.signals import StopFlag

    ranks, stop = start_distributed(), StopFlag().listen()
    stop_distributed(ranks)
    os.kill(os.getpid(), signal.SIGTERM)
    return stop.asked


def test_a_signal_after_the_end():
    assert run_world(1, stopped_late) == [True]


RANK = [sys.executable, "-m", "shardbook.train"]


# In place of torch: it comes once a file is there.
LATE = """
import os, sys, time
while not os.path.exists({go!r}):
    time.sleep(0.01)
sys.path.remove({folder!r})
del sys.modules["torch"]
import torch
"""


@pytest.mark.slow  # two processes import torch anew
def test_a_signal_while_a_rank_is_being_started_counts(recipe, tmp_path):
    """It comes to one rank before torch is there: both leave with 75 as soon as they have met, and built nothing."""
    port, ranks, go = str(free_port()), [], tmp_path / "go"
    (tmp_path / "torch.py").write_text(LATE.format(go=str(go), folder=str(tmp_path)))
    late = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}
    for rank in range(2):
        variables = os.environ | variables_of(rank, 2, port, late if rank else {})
        process = subprocess.Popen([*RANK, recipe, "run.name=early"], env=variables, stdout=-1, stderr=-1, text=True)
        ranks.append(process)
    deadline = time.monotonic() + 240
    while not listens(ranks[1].pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks[1].send_signal(signal.SIGTERM)
    go.touch()
    said = [process.communicate(timeout=240) for process in ranks]
    assert [process.returncode for process in ranks] == [75, 75], said
    assert said[0][0] == "stopped  before anything was built; run the same command again\n" and not said[1][0]
    assert not (recipe.parent / "early").exists()


def listens(pid):
    """Whether the process has a handler of SIGTERM: proc(5), SigCgt."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> signal.SIGTERM - 1 & 1


def insist(seconds):
    """Two SIGTERMs so many seconds apart, in the middle of a write. Returns where the second asked as the first did."""
    from shardbook.ranks import signals

    signals.ONE_REQUEST_SECONDS = 0.2
    sys.stdout = Busy()
    flag = signals.StopFlag().listen()
    for pause in (seconds, 0):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(pause)
    os._exit(3 if flag.asked else 4)


@pytest.mark.parametrize(("seconds", "code"), [(0.0, 3), (0.5, 75)])
def test_a_second_sigterm_ends_a_rank_at_once(seconds, code):
    """Unless it is the same request, told by a scheduler and by the launcher."""
    process = forks().Process(target=insist, args=(seconds,))
    process.start()
    process.join(240)
    assert process.exitcode == code


def test_the_same_request_told_to_a_run_of_which_a_flag_listened_before():
    """It comes when the import of torch, which takes seconds, begins."""
    script = """
import os, signal, sys

class AtTorch:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGUSR1)

sys.meta_path.insert(0, AtTorch)
from shardbook.ranks.signals import StopFlag, asked_early, begin_rank
begin_rank()
sys.exit(7 * asked_early() * StopFlag().listen().asked)
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 7


@pytest.mark.parametrize("module", ["shardbook.train", "shardbook.evaluate"])
def test_the_program_of_a_rank_listens_before_it_imports_torch(module):
    script = f"""
import os, runpy, signal, sys

class AtTorch:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGTERM)
            from shardbook.ranks.signals import asked_early
            os._exit(7 * asked_early())

sys.meta_path.insert(0, AtTorch)
runpy.run_module({module!r}, run_name="__main__")
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 7


def test_an_evaluation_ends_at_once():
    """There is nothing that it could save; a rank that has met the others listens no more."""
    script = """
import os, signal
from shardbook.ranks.signals import begin_rank, listen_no_more
begin_rank()
listen_no_more()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGTERM


def test_importing_the_package_does_nothing():
    """No signal is handled, nothing large imported, no process ended, whatever the program is called."""
    script = """
import signal, sys
sys.orig_argv[1:] = ["-m", "shardbook.train", "a-recipe"]
handlers = [signal.getsignal(number) for number in signal.valid_signals()]
import shardbook
assert handlers == [signal.getsignal(number) for number in signal.valid_signals()]
assert not {"torch", "transformers", "datasets", "shardbook.ranks.signals"} & sys.modules.keys()
import shardbook.ranks.signals
assert handlers == [signal.getsignal(number) for number in signal.valid_signals()]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
