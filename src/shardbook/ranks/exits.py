"""How a rank ends: its exit code, its last line, and the file that keeps the code where a launcher does not.

torchrun and accelerate turn every code into 1. Where SHARDBOOK_EXIT_FILE names a file, each rank adds its code to it as
one line, in the order in which they ended, so that a script around them can exit as `shardbook train` does.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from shardbook.ranks.lost import broken_connection, is_lost_peer
from shardbook.recipe import RecipeError

DONE, FAILED, WRONG, PREEMPTED = 0, 1, 2, 75  # exit codes of a rank, and of a run
EXIT_FILE = "SHARDBOOK_EXIT_FILE"
LEAVING = threading.Event()  # set when this rank knows that it ends: its heartbeat stops and waits for nobody
LAST_WORDS: list[Callable[[str], None]] = []  # who is told why this rank failed: its heartbeat passes it on
GOODBYES: list[Callable[[], None]] = []  # how this rank leaves others who leave as well: its heartbeat says so
PEER_SECONDS = 5.0  # in which a rank that lost its peer may hear why


class RunFailed(Exception):
    """The run cannot go on, and not because of its recipe; the message is the reason. The process exits with 1."""


def report_error(error: BaseException, code: int) -> int:
    """Print the reason as the last line, after a traceback if it is our bug. Returns `code`.

    The first rank that leaves has the others killed, so the rank that knows must leave first: rank 0 at once, since
    most errors meet every rank; another rank soon after, a node's first before its others; one that only lost its peer
    last, for it knows nothing, and its heartbeat speaks for it where it hears the reason meanwhile.
    """
    refused = code == WRONG  # which every rank finds out by itself
    lost_peer = is_lost_peer(error)
    if lost_peer:
        time.sleep(PEER_SECONDS)
    LEAVING.set()
    turn = (os.environ.get("RANK", "0") != "0") + (os.environ.get("LOCAL_RANK", "0") != "0")
    if refused and turn:
        say_goodbye()  # rank 0, with whom the store may end, waits for that
    time.sleep(0 if lost_peer else (0, 2, 3)[turn])
    if lost_peer and (broke := broken_connection(error)):
        error = RunFailed(f"another rank ended, and said why where it ran ({broke}); run the same command again")
    ours = not isinstance(error, (RecipeError, RunFailed))
    if ours:
        traceback.print_exception(error)
    reason = " ".join(f"{f'run failed: {type(error).__name__}: ' * ours}{error}".split())
    print(f"shardbook: {reason}", file=sys.stderr, flush=True)
    if refused and not turn:
        say_goodbye()
    elif not refused and not lost_peer:
        tell_others(reason.removeprefix("run failed: "))
    return code


def tell_others(reason: str) -> None:
    """Say in every other rank's last line why this one ends."""
    for tell in LAST_WORDS:
        tell(reason)


def say_goodbye() -> None:
    for say in GOODBYES:
        say()


def exit_rank(code: int) -> NoReturn:
    """End this process with `code`, now, from any thread; what is written must be closed.

    Past this point only destructors of native libraries would run, and one of their threads was seen to abort a
    finished rank (about once in fifty), which would turn exit code 0 into 134.
    """
    try:
        if path := os.environ.get(EXIT_FILE):
            with Path(path).open("a") as file:
                file.write(f"{code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also where nobody reads any more, or that file cannot be written
        os._exit(code)
