"""The heartbeat, a watchdog: a rank that vanishes, fails or hangs ends the others in bounded time, with a line that
names it, and a launcher that is killed ends its ranks.

A machine that loses its link or its power closes no connection, and NCCL notices no closed one, so the others would
wait for their time limit. Invariant: a rank counts as lost, or hung, only after seconds without a new beat, or without
progress, in which the rank that counts them was running; a rank that leaves says so. Knows nothing of ranks' work.
"""

import contextlib
import faulthandler
import math
import threading
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but mypy does not see it

from shardbook.comm.torch_private import collectives_record
from shardbook.ranks.exits import LEAVING, ON_EXIT, ON_FAILURE, RERUN_HINT, end_run
from shardbook.ranks.launchers import Rendezvous
from shardbook.ranks.peer_errors import is_closed_store
from shardbook.ranks.progress import PROGRESS, RankProgress, find_stragglers
from shardbook.ranks.rendezvous import Store, name_ranks, open_store, read_member
from shardbook.recipe import RecipeError

BEAT_SECONDS = 2.0  # at most: an eighth of the shorter limit where that is less
STAY_SECONDS = 30.0  # for which rank 0 waits at its end for other ranks to leave
REFUSED_SECONDS = 5.0  # the same where the run is refused, which every rank finds out at about the same moment
GONE_SECONDS = 10.0  # for which a rank goes on after rank 0 ended: it may end too, and know the reason
EVIDENCE_SECONDS = 10.0  # for writing stacks: the disk may be what hangs
LEFT = b"left"


class Heartbeat:
    """Beats for this rank, and watches: rank 0 all others, the others rank 0.

    A rank without a beat for `lost_seconds` is lost, one without progress for `hang_seconds` hangs (0: neither is
    watched). The reason goes into the store's key `lost`, and is the last line of every rank.

    Two threads, because one may block in a socket that no longer answers: it beats and reads, on a connection of its
    own; the other only counts for how long the first has had no answer.
    """

    def __init__(self, place: Rendezvous, store: Store, lost_seconds: float, hang_seconds: float = 0):
        self.place = place
        self.seconds = lost_seconds or math.inf
        self.hang_seconds = hang_seconds or math.inf
        self.every = min(BEAT_SECONDS, self.seconds / 8, self.hang_seconds / 8)
        self.watched = [rank for rank in range(place.world_size) if rank and place.rank == 0] or [0]
        self.names = [f"beat/{rank}" for rank in self.watched]
        self.hosts = {rank: read_member(store, rank)["host"] for rank in {*self.watched, place.rank}}
        self.store = open_store(place) if place.world_size > 1 else HashStore()
        self.unanswered = 0.0
        self.ending = threading.Lock()
        ON_FAILURE[:] = [self.pass_on]
        ON_EXIT[:] = [lambda: self.leave(REFUSED_SECONDS)]
        self.beating = _start(self._beat)
        _start(self._count_unanswered)

    def leave(self, seconds: float = STAY_SECONDS) -> None:
        """Announces that this rank ends, so that no other ends for it, and stops watching the others. Rank 0 waits up
        to `seconds` for ranks that are not so far, since the store may end with it."""
        LEAVING.set()
        ON_FAILURE.clear()
        self.beating.join(min(seconds, self.seconds))
        if self.beating.is_alive():
            return
        with contextlib.suppress(dist.DistError):  # rank 0 did not stay so long
            self.store.set(f"beat/{self.place.rank}", LEFT.decode())
            until = time.monotonic() + min(seconds, self.seconds)
            while self.place.rank == 0 and time.monotonic() < until:
                if all(counter == LEFT for counter in self.store.multi_get(self.names)):
                    return
                time.sleep(0.05)

    def pass_on(self, reason: str) -> None:
        """Writes the reason why this rank fails for all ranks, unless another rank was first."""
        message = f"rank {self.place.rank} (host {self.hosts[self.place.rank]}) ended: {reason}"
        keeps_store = self.place.rank == 0 and not self.place.hosted
        is_told = _soon(lambda: self.store.compare_set("lost", "", message))
        if is_told and keeps_store and self.place.world_size > self.place.ranks_per_node:
            time.sleep(2 * self.every)  # until other nodes have read it

    def _beat(self) -> None:
        seen: dict[int, bytes] = {}
        silent = dict.fromkeys(self.watched, 0.0)
        count, passed, before = 0, 0.0, time.monotonic()
        while not LEAVING.wait(self.every):
            count += 1
            standing = PROGRESS.stand(passed)
            try:
                self.store.set(f"beat/{self.place.rank}", standing.dump(count))
                if self.store.check(["lost"]):
                    hangs = self.store.check(["hang"])
                    self._end(self.store.get("lost").decode(), hangs)
                counters = self.store.multi_get(self.names)
            except dist.DistError as error:
                self._lose_store(error, left=seen.get(0) == LEFT)
                return
            self.unanswered = 0.0
            now = time.monotonic()
            # At most two beats count: a pause of this process, stopped or starved, is no silence of the others.
            passed, before = min(now - before, 2 * self.every), now
            for rank, counter in zip(self.watched, counters, strict=True):
                still = counter == seen.get(rank) and counter != LEFT
                silent[rank] = silent[rank] + passed if still else 0.0
                seen[rank] = counter
            if max(silent.values()) > self.seconds:
                # names all ranks of a lost node: their last beats were not at the same moment
                self._announce(self._explain([rank for rank in silent if silent[rank] > self.seconds - 2 * self.every]))
            elif self.place.rank == 0 and self.hang_seconds < math.inf:
                beats = {0: standing.dump(count).encode()} | seen
                standings = {rank: RankProgress.parse(beat) for rank, beat in beats.items() if beat not in (LEFT, b"0")}
                if behind := find_stragglers(standings, self.hang_seconds):
                    self.store.set("hang", "")
                    self._announce(self._explain_hang(standings, behind), hangs=True)

    def _announce(self, reason: str, hangs: bool = False) -> None:
        """Ends the run with `reason`, or with the reason that another rank wrote before."""
        first_reason = self.store.compare_set("lost", "", reason).decode()
        if not hangs:
            time.sleep(2 * self.every)  # until the others have read it: the store may end with this process
        self._end(first_reason, hangs)

    def _lose_store(self, error: Exception, left: bool) -> None:
        """Ends the run where the store's process closed the connection, so has ended, and has not `left`. Any other
        error is silence, which the other thread counts."""
        if is_closed_store(error) and not left and self.place.rank and not LEAVING.wait(GONE_SECONDS):
            who = f"the launcher at {self.place.address}" if self.place.hosted else f"rank 0 (host {self.hosts[0]})"
            self._end(f"{who} ended, and said why where it ran; {RERUN_HINT}")

    def _count_unanswered(self) -> None:
        before = time.monotonic()
        while not LEAVING.wait(self.every):
            now = time.monotonic()
            self.unanswered += min(now - before, 2 * self.every)
            before = now
            if self.unanswered > self.seconds:
                self._end(self._explain([0]))

    def _explain(self, lost: list[int]) -> str:
        """Returns the reason for `lost` ranks: [0] on rank 0 is the launcher's agent, which hosts the store."""
        agent = lost == [0] and self.place.rank == 0
        who_has = f"the launcher at {self.place.address} has" if agent else self._who_has(lost)
        return f"{who_has} not been heard of for {self.seconds:g} s; {RERUN_HINT}"

    def _explain_hang(self, standings: dict[int, RankProgress], behind: list[int]) -> str:
        first = standings[behind[0]]
        everyone = len(behind) == len(standings) > 1
        who_has = f"all {len(standings)} ranks have" if everyone else self._who_has(behind)
        at = f"step {first.step}, {first.doing}" + f" ({first.line})" * bool(first.line)
        others = ("; the others wait" + " for it" * (len(behind) == 1)) * (len(behind) < len(standings))
        device = ": a collective on the device that does not end, or a disk that does not answer" * everyone
        where = f"; stacks and records of collectives are in {PROGRESS.folder}" * bool(PROGRESS.folder)
        return f"{who_has} stood still for {first.seconds:.0f} s at {at}{device}{others}{where}; {RERUN_HINT}"

    def _who_has(self, ranks: list[int]) -> str:
        hosts = " and ".join(dict.fromkeys(self.hosts[rank] for rank in ranks))
        return f"{name_ranks(ranks)} (host {hosts}) {'has' if len(ranks) == 1 else 'have'}"

    def _end(self, reason: str, hangs: bool = False) -> None:
        with self.ending:  # only one of the two threads prints
            if not LEAVING.is_set():
                if hangs:
                    _soon(lambda: leave_evidence(self.place.rank), EVIDENCE_SECONDS)
                    time.sleep(2 * self.every + 3)  # until the others have written theirs
                # the node's first rank prints first: its launcher then ends the others
                time.sleep(min(2, self.seconds) if self.place.local_rank else 0)
                end_run(reason)


def leave_evidence(rank: int) -> None:
    """Writes this process's stacks (`stacks-<rank>.txt`) and torch's record of its last collectives
    (`collectives-<rank>`; NCCL's is for `torchfrtrace`) into the run's folder for hangs."""
    if PROGRESS.folder is None:
        return
    PROGRESS.folder.mkdir(exist_ok=True)
    with (PROGRESS.folder / f"stacks-{rank}.txt").open("w") as file:
        faulthandler.dump_traceback(file)
    (PROGRESS.folder / f"collectives-{rank}").write_bytes(collectives_record(PROGRESS.blocks))


def tell_run(place: Rendezvous, reason: str, keeps_store: bool) -> None:
    """Writes, from a launcher, the reason why one of its ranks ended for the ranks of all nodes, unless a rank wrote
    one. `keeps_store`: the launcher is about to end rank 0, and the store with it."""

    def tell() -> None:
        with contextlib.suppress(RecipeError):  # the store may have ended
            open_store(place).compare_set("lost", "", reason)

    if _soon(tell) and keeps_store:
        time.sleep(2 * BEAT_SECONDS)  # until the ranks have read it


def _soon(work: Callable[[], object], seconds: float = 3.0) -> bool:
    """Returns whether `work` ended within `seconds`. It runs in a thread, since the store may never answer."""

    def try_it() -> None:
        with contextlib.suppress(dist.DistError, OSError):
            work()

    thread = _start(try_it)
    thread.join(seconds)
    return not thread.is_alive()


def _start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
