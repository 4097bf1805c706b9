"""The heartbeat: a rank that vanishes ends the others in bounded time, and a launcher that is killed ends its ranks.

A machine that loses its link or its power closes no connection, so collectives would wait for their time limit of half
an hour. Invariant: a rank is lost only after a number of seconds in which its counter stood still while the watching
rank itself was running; a rank that leaves says so. Knows nothing of what the ranks do.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from shardbook.ranks.exits import FAILED, LEAVING, exit_rank
from shardbook.ranks.join import Rendezvous, Store, name_ranks, open_store, read_member

LAUNCHER = "SHARDBOOK_LAUNCHER"  # the pid of what started this process: a rank, or a run of a comparison
BEAT_SECONDS = 2.0  # at most: an eighth of the limit where that is shorter
STAY_SECONDS = 30.0  # of rank 0 at its end, for ranks that are not yet there
LEFT = b"left"


class Heartbeat:
    """Beats for this rank, and watches: rank 0 all others, the others rank 0. `seconds` without a beat is lost.

    Two threads, because one may block in a socket that nobody answers any more: that one beats and reads, on a
    connection of its own; the other only counts how long the first has had no answer.
    """

    def __init__(self, place: Rendezvous, store: Store, seconds: float):
        self.place = place
        self.seconds = seconds
        self.every = min(BEAT_SECONDS, seconds / 8)
        self.watched = [rank for rank in range(place.world_size) if rank and place.rank == 0] or [0]
        self.names = [f"beat/{rank}" for rank in self.watched]
        self.hosts = {rank: read_member(store, rank)["host"] for rank in self.watched}
        self.store = open_store(place)
        self.unanswered = 0.0
        self.ending = threading.Lock()
        self.beating = _start(self._beat)
        _start(self._count_unanswered)

    def leave(self) -> None:
        """Say that this rank ends, well; from here on the others' fate is not its own. Rank 0 stays a little for those
        who are not so far, since the store may end with it."""
        LEAVING.set()
        self.beating.join(min(STAY_SECONDS, self.seconds))
        if self.beating.is_alive():
            return
        with contextlib.suppress(dist.DistError):  # rank 0 did not stay so long
            self.store.set(f"beat/{self.place.rank}", LEFT.decode())
            until = time.monotonic() + min(STAY_SECONDS, self.seconds)
            while self.place.rank == 0 and time.monotonic() < until:
                if all(counter == LEFT for counter in self.store.multi_get(self.names)):
                    return
                time.sleep(0.05)

    def _beat(self) -> None:
        seen: dict[int, bytes] = {}
        silent = dict.fromkeys(self.watched, 0.0)
        count, before = 0, time.monotonic()
        while not LEAVING.wait(self.every):
            count += 1
            try:
                self.store.set(f"beat/{self.place.rank}", str(count))
                if self.store.check(["lost"]):
                    self._end(self.store.get("lost").decode())
                counters = self.store.multi_get(self.names)
            except dist.DistError:
                return  # the store is gone; how long is counted in the other thread
            self.unanswered = 0.0
            now = time.monotonic()
            # A pause of this process, stopped or starved, is no silence of the others.
            passed, before = min(now - before, 2 * self.every), now
            for rank, counter in zip(self.watched, counters, strict=True):
                still = counter == seen.get(rank) and counter != LEFT
                silent[rank] = silent[rank] + passed if still else 0.0
                seen[rank] = counter
            if max(silent.values()) > self.seconds:
                # with all of its node, whose last beats were not at the same moment
                lost = [rank for rank in self.watched if silent[rank] > self.seconds - 2 * self.every]
                said = self._explain(lost)
                self.store.set("lost", said)
                time.sleep(2 * self.every)  # until the others have read it: the store may end with this process
                self._end(said)

    def _count_unanswered(self) -> None:
        before = time.monotonic()
        while not LEAVING.wait(self.every):
            now = time.monotonic()
            self.unanswered += min(now - before, 2 * self.every)
            before = now
            if self.unanswered > self.seconds:
                self._end(self._explain([0]))

    def _explain(self, lost: list[int]) -> str:
        """`lost` [0] on rank 0 itself: where the launcher's agent keeps the store, and is gone."""
        hosts = " and ".join(dict.fromkeys(self.hosts[rank] for rank in lost if rank in self.hosts))
        who = f"{name_ranks(lost)} (host {hosts})" if hosts else f"the launcher at {self.place.address}"
        have = "has" if len(lost) == 1 else "have"
        return f"{who} {have} not been heard of for {self.seconds:g} s; run the same command again"

    def _end(self, reason: str) -> None:
        with self.ending:  # one of the two threads speaks
            if not LEAVING.is_set():
                # the node's first rank speaks for the others: its launcher then ends them
                time.sleep(min(2, self.seconds) if self.place.local_rank else 0)
                end_run(reason)


def watch_launcher() -> None:
    """End this process when the launcher that started it is gone without having ended it (SIGKILL): an orphan would
    hold the run, its memory and its GPU."""
    if LAUNCHER not in os.environ:
        return
    launcher = int(os.environ[LAUNCHER])

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        end_run("what started this process was killed; run the same command again")

    _start(watch)


def end_run(reason: str) -> NoReturn:
    # not print: the main thread may be writing a line, or hang while it holds the stream
    with contextlib.suppress(OSError):  # who read it may be gone too
        os.write(2, f"shardbook: run failed: {reason}\n".encode())
    exit_rank(FAILED)


def _start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
