"""A signal that comes while a line is being written is a request to stop, not a crash."""

import os
import signal
import sys

from world import run_world


class Busy:
    """A standard output in the middle of a write."""

    def write(self, text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    flush = write


def signalled():
    from shardbook.dist import StopFlag, start_distributed

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
