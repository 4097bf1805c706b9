"""A signal that comes while a line is being written is a request to stop, not a crash."""

import os
import signal
import sys

from world import forks, run_world


class Busy:
    """A standard output in the middle of a write."""

    def write(self, text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    flush = write


def signalled():
    from shardbook.ranks.distributed import StopFlag, start_distributed

    start_distributed()
    stop, real = StopFlag().listen(), sys.stdout
    sys.stdout = Busy()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        sys.stdout = real
    return stop.asked


def test_a_signal_in_mid_write():
    assert run_world(1, signalled) == [True]


def ending(folder):
    from shardbook.ranks.exits import exit_rank

    os.environ["SHARDBOOK_EXIT_FILE"] = f"{folder}/none/such"
    exit_rank(3)


def test_a_rank_that_must_end_ends_where_its_exit_file_cannot_be_written(tmp_path):
    process = forks().Process(target=ending, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 3


def stopped_late():
    """The signal comes when the process group is gone: the run is done."""
    from shardbook.ranks.distributed import StopFlag, start_distributed, stop_distributed

    ranks, stop = start_distributed(), StopFlag().listen()
    stop_distributed(ranks)
    os.kill(os.getpid(), signal.SIGTERM)
    return stop.asked


def test_a_signal_after_the_end():
    assert run_world(1, stopped_late) == [True]
