"""Exits: a rank's exit code, its last line, and the file that keeps the code where a launcher does not."""

import contextlib
import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from shardbook.recipe import RecipeError

DONE, FAILED, WRONG, PREEMPTED = 0, 1, 2, 75  # exit codes of a rank, and of a run
EXIT_FILE = "SHARDBOOK_EXIT_FILE"
LAUNCHER = "SHARDBOOK_LAUNCHER"  # pid of the process that started this one (a rank, or a run of a comparison)
RERUN_HINT = "run the same command again"
LEAVING = threading.Event()  # set when this rank knows that it ends: its heartbeat stops and watches no rank
ON_FAILURE: list[Callable[[str], None]] = []  # called with the reason why this rank failed: the heartbeat passes it on
ON_EXIT: list[Callable[[], None]] = []  # called where all ranks leave: the heartbeat says that this one does
PEER_SECONDS = 5.0  # for which a rank that lost its peer waits for the reason


class RunFailed(Exception):
    """The error of a run that cannot go on, not because of its recipe; its message is the reason. Exit code 1."""


def report_error(error: BaseException, code: int) -> int:
    """Prints the reason as the last line, after a traceback if it is a bug of this package. Returns `code`.

    The first rank that leaves has the others killed, so a rank that knows the reason must leave first: rank 0 at once,
    since most errors happen on every rank; another rank soon after, a node's first before its others; a rank that only
    lost its peer last, since it knows no reason, and its heartbeat prints the reason if one arrives meanwhile.
    """
    from shardbook.ranks.peer_errors import (  # it imports torch, which signals.py must not
        broken_connection,
        is_lost_peer,
    )

    refused = code == WRONG  # every rank finds this out by itself
    lost_peer = is_lost_peer(error)
    if lost_peer:
        time.sleep(PEER_SECONDS)
    LEAVING.set()
    turn = (os.environ.get("RANK", "0") != "0") + (os.environ.get("LOCAL_RANK", "0") != "0")
    if refused and turn:
        post_leave_notice()  # rank 0 waits for that, since the store may end with it
    time.sleep(0 if lost_peer else (0, 2, 3)[turn])
    if lost_peer and (broke := broken_connection(error)):
        error = RunFailed(f"another rank ended, and said why where it ran ({broke}); {RERUN_HINT}")
    if isinstance(error, OSError) and error.filename and error.errno in (errno.ENOSPC, errno.EDQUOT):
        error = RunFailed(f"{error.filename}: {error.strerror}; free some of that disk, and {RERUN_HINT}")
    ours = not isinstance(error, (RecipeError, RunFailed))
    if ours:
        traceback.print_exception(error)
    reason = " ".join(f"{f'run failed: {type(error).__name__}: ' * ours}{error}".split())
    print(f"shardbook: {reason}", file=sys.stderr, flush=True)
    if refused and not turn:
        post_leave_notice()
    elif not refused and not lost_peer:
        tell_others(reason.removeprefix("run failed: "))
    return code


def tell_others(reason: str) -> None:
    """Passes the reason why this rank ends on to the last line of every other rank."""
    for tell in ON_FAILURE:
        tell(reason)


def post_leave_notice() -> None:
    for say in ON_EXIT:
        say()


def watch_launcher() -> None:
    """Ends this process when its launcher was killed (SIGKILL): an orphan holds run, memory and GPU."""
    if LAUNCHER not in os.environ:
        return
    launcher = int(os.environ[LAUNCHER])

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        reason = f"what started this process was killed; {RERUN_HINT}"
        tell_others(reason)
        end_run(reason)

    threading.Thread(target=watch, daemon=True).start()


def end_run(reason: str) -> NoReturn:
    # not print: the main thread may be writing a line, or hang while it holds the stream
    with contextlib.suppress(OSError):  # the reader may be gone too
        os.write(2, f"shardbook: run failed: {reason}\n".encode())
    exit_rank(FAILED)


def exit_rank(code: int) -> NoReturn:
    """Ends this process with `code`, now, from any thread; files must be closed before.

    After this point only destructors of native libraries would run, and one of their threads was seen to abort a
    finished rank (about once in fifty), which would turn exit code 0 into 134.
    """
    try:
        if path := os.environ.get(EXIT_FILE):
            with Path(path).open("a") as file:
                file.write(f"{code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also where the output is closed, or that file cannot be written
        os._exit(code)
