"""Signals: a request to stop a rank, which counts from its program's first line on, before torch is imported.

SIGTERM and SIGUSR1 reach a rank from its launcher; a step's sum of flags (run/step_flags.py) tells all ranks, so that
the loop of train.py ends with this step, saves, and its process exits with 75 (PREEMPTED of exits.py).

Invariant: nothing is listened to before a rank's program asks for it. A first signal only asks; the files that a second
one leaves are whole, since nothing that is published is ever open.
"""

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from types import FrameType

from shardbook.comm.versions import check_versions
from shardbook.ranks.exits import PREEMPTED, WRONG, exit_rank
from shardbook.recipe import RecipeError

STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# SIGTERMs that come within so many seconds are one request: a scheduler may signal every process of a job, and the
# launcher passes its own on.
ONE_REQUEST_SECONDS = 2.0
EARLY: list["StopFlag"] = []  # the flag that listens until the run has its own


@dataclass
class StopFlag:
    """The request to stop: SIGTERM, SIGUSR1 or a first Ctrl-C sets it on a rank; a second Ctrl-C, or a later SIGTERM,
    ends that at once. Summed over ranks beside each step (run/step_flags.py), and after an evaluation, samples or a
    save: all stop after the same step."""

    asked: bool = False
    check_before_next_step: bool = False  # since an evaluation, samples or a save went by; the same on every rank
    terminated: float = 0.0  # when a SIGTERM first came
    has_steps: bool = True  # False: it listens before the run does, when there is no step to finish and nothing to save

    def listen(self) -> "StopFlag":
        """Listens from now on, in place of the flag that listened before, whose request counts here."""
        for earlier in EARLY:
            self.asked, self.terminated = earlier.asked, earlier.terminated
        for signum in STOPS:
            signal.signal(signum, self._ask)
        return self

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        # not print: the signal may come while a line is being written, and Python refuses to write two at once
        if signum == signal.SIGTERM:
            now = time.monotonic()
            if self.terminated and now - self.terminated > ONE_REQUEST_SECONDS:
                with contextlib.suppress(OSError):
                    os.write(2, b"shardbook: ended by a second SIGTERM, without saving; run the same command again\n")
                exit_rank(PREEMPTED)
            self.terminated = self.terminated or now
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if os.environ.get("RANK", "0") == "0":
            words = b"after the step under way, or the next; Ctrl-C again to quit without saving"
            with contextlib.suppress(OSError):  # a Ctrl-C also ends the reader of this pipe: train 2>&1 | tee log
                os.write(2, b"stopping %s\n" % (words if self.has_steps else b"before the first step"))


def asked_early() -> bool:
    """Returns whether this rank was asked to stop while its process was being started."""
    return any(flag.asked for flag in EARLY)


def begin_rank() -> None:
    """Begins the program of a rank, before it imports torch: listens for a request to stop, of which the process would
    die alone; and ends it with one line where torch or transformers is too old, or torch lacks a private name, since
    what it imports next would fail in words of its own."""
    EARLY.append(StopFlag(has_steps=False).listen())
    try:
        check_versions()
        import shardbook.comm.torch_private  # noqa: F401
    except RecipeError as error:
        print(f"shardbook: {error}", file=sys.stderr, flush=True)
        exit_rank(WRONG)


def listen_no_more() -> None:
    """Gives signals their default effect again, where `begin_rank` took it: they end this process at once."""
    for signum in STOPS if EARLY else ():
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
