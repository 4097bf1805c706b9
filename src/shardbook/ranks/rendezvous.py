"""Joining: the store where all ranks of a run meet, and what each wrote of itself there.

Invariant: every rank of the run gets the store, or every rank that joined says in one line what was wrong. Each finds
that out by itself from what the ranks wrote, so no rank has to tell the others. Knows nothing of process groups and
devices.
"""

import contextlib
import json
import os
import socket
import threading
import time
from datetime import timedelta
from itertools import takewhile
from typing import Any

import torch.distributed as dist

# public (torch.distributed.Store in its documentation), but mypy does not see that it is exported
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import Store as Store  # type: ignore[attr-defined]

from shardbook.ranks.exits import RERUN_HINT, RunFailed
from shardbook.ranks.launchers import Rendezvous
from shardbook.recipe import RecipeError

SILENT_SECONDS = 15  # for a head that does not answer at all, or a name that is not known (yet)
JOIN_SECONDS = 300  # for ranks that do not join
TELL_SECONDS, TELL_AGAIN_SECONDS = 10, 30
LOOK_SECONDS = 0.1  # between two looks at who has come
STORE_TIMEOUT = timedelta(seconds=60)  # of one call; a call is made only once its answer is there
VERDICT = "verdict"  # the key that the first rank sets that has met all, or has waited for JOIN_SECONDS
ALL_CAME, CLOSED = b"all came", b"closed"
INTERFACE = (
    "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, on each machine, to its interface (as in `ip addr`) to the others"
)
Member = dict[str, Any]  # what a rank writes of itself


def join_ranks(place: Rendezvous) -> Store:
    """Returns the store of all ranks, once all have joined; `read_member` reads what each wrote of itself there.

    Raises RecipeError, on each rank that joined, where a rank has not after JOIN_SECONDS, two claim the same number,
    the head cannot be reached or its port is taken; RunFailed where rank 0 ends meanwhile.
    """
    is_host = place.rank == 0 and not place.hosted
    if not is_host:
        _await_head(place)
    store = open_store(place, is_host)
    member = _describe(place)
    try:
        number = store.add("joined", 1)
        # without its cores, which only its node asks for: every rank reads this of every other
        store.set(f"joined/{number}", json.dumps({name: member[name] for name in member if name != "cores"}))
        # beyond the run's size it is no member of the run, but finds out why
        _await_members(store, place, [member] if number > place.world_size else [], is_host)
        store.set(f"beat/{place.rank}", "0")
        store.set(f"member/{place.rank}", json.dumps(member))
    except dist.DistNetworkError:  # no refusal, for which rank 0 would have stayed: ranks may be started again
        ended = f"rank 0 at {place.address} ended before all ranks had come, and said why where it ran"
        raise RunFailed(f"{ended}; {RERUN_HINT}") from None
    return store


def open_store(place: Rendezvous, is_host: bool = False) -> Store:
    """Opens a new connection to the store of the run. Raises RecipeError where there is no store."""
    opened: list[Store] = []
    reasons: list[str] = []

    def connect() -> None:
        words: tuple[Any, ...] = (place.host, place.port, place.world_size, is_host, STORE_TIMEOUT)
        try:
            opened.append(TCPStore(*words, wait_for_workers=False))
        except (dist.DistError, ValueError) as error:
            reasons.append(str(error).splitlines()[0])

    # In a thread: where another program listens on that port and does not answer, the call would never return.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SILENT_SECONDS)
    if opened:
        return PrefixStore(f"shardbook/{place.attempt}", opened[0])
    silent = "no address of this machine, where rank 0 listens" if is_host else "what listens there says nothing"
    reason = reasons[0] if reasons else silent
    if is_host and "EADDRINUSE" in reason:
        taken = f"the port is taken on {socket.gethostname()}, where rank 0 should listen"
        raise RecipeError(f"{place.address}: {taken}; end what holds it, or choose another port")
    raise RecipeError(f"{place.address}: rank {place.rank} finds no run there ({reason})")


def read_member(store: Store, rank: int) -> Member:
    """Returns what a rank that has joined wrote of itself: `host`, `pid`, `cores` (that it may use) and `address` (of
    its host name)."""
    return json.loads(store.get(f"member/{rank}"))


def name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def find_refusal(members: list[Member], world_size: int) -> str:
    """Returns why `members`, in the order in which they came, make no run; empty where nothing is wrong so far. Every
    rank that has read the same beginning of them says the same."""
    claims = dict[int, Member]()
    for member in members:
        first = members[0]
        if member["world_size"] != first["world_size"]:
            sizes = (f"{each['world_size']} on rank {each['rank']} ({each['host']})" for each in (first, member))
            return f"WORLD_SIZE is {' and '.join(sizes)}; start every node alike"
        if other := claims.get(member["rank"]):
            both = ", ".join(f"{each['pid']} on {each['host']}" for each in (other, member))
            return f"RANK = {member['rank']} is claimed by two processes: {both}; each rank must be started once"
        claims[member["rank"]] = member
    is_alone = [member["address"].startswith(("127.", "::1")) for member in members]
    if len(members) < world_size or not any(is_alone) or len({member["host"] for member in members}) == 1:
        return ""
    ranks = sorted(member["rank"] for member, alone in zip(members, is_alone, strict=True) if alone)
    lowest = claims[ranks[0]]
    listens = f"{name_ranks(ranks)} would listen at {lowest['address']}, which is what {lowest['host']} means there"
    return f"{listens}, and no other machine reaches that; {INTERFACE}"  # gloo would try for hours


def _describe(place: Rendezvous) -> Member:
    host, cores = socket.gethostname(), sorted(os.sched_getaffinity(0))
    facts = {"host": host, "pid": os.getpid(), "cores": cores, "address": _listening_address(host)}
    return {"rank": place.rank, "world_size": place.world_size, **facts}


def _await_members(store: Store, place: Rendezvous, beyond: list[Member], is_host: bool) -> None:
    """Waits until all have joined; rank 0 prints now and then who has not. `beyond`: this rank, where it came after as
    many as the run has. Raises RecipeError."""
    members, began, tell_at = list[Member](), time.monotonic(), TELL_SECONDS
    pause = LOOK_SECONDS * max(1, place.world_size // 512)  # one store answers all ranks
    while True:
        is_decided, came = store.check([VERDICT]), min(store.add("joined", 0), place.world_size)
        newer = [f"joined/{number}" for number in range(len(members) + 1, came + 1)]
        if newer and not store.check(newer):  # one is about to be written, or its rank has ended
            newer = list(takewhile(lambda key: store.check([key]), newer))
        members += map(json.loads, store.multi_get(newer) if newer else ())
        refusal, waited = find_refusal([*members, *beyond], place.world_size), time.monotonic() - began
        absent = sorted({*range(place.world_size)} - {member["rank"] for member in members})
        missing = f"{name_ranks(absent)} of {place.world_size}"
        if not refusal and (not absent or is_decided or waited > JOIN_SECONDS):
            # one decides for all: else a rank that comes last would go on while the others give up
            verdict = store.compare_set(VERDICT, "", (CLOSED if absent else ALL_CAME).decode())
            if verdict == ALL_CAME and not absent:
                return
            if verdict == CLOSED:
                late = f"rank {place.rank} came to {place.address} when the others had given up"
                refusal = f"{missing} did not come to {place.address} in {waited:.0f} s" if absent else late
                refusal += "; start the run on every node, with this address"
        if refusal:
            time.sleep(10 * pause * is_host)  # until the others have looked: the store ends with this process
            raise RecipeError(refusal)
        if place.rank == 0 and waited > tell_at:
            print(f"waiting for {missing} at {place.address}", flush=True)
            tell_at += TELL_AGAIN_SECONDS
        time.sleep(pause)  # not a wait for a key: where its time is over, torch prints two warnings


def _await_head(place: Rendezvous) -> None:
    """Waits for a listening head: JOIN_SECONDS if it answers (it may be starting), else SILENT_SECONDS. RecipeError."""
    began = time.monotonic()
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=5).close()
            return
        except OSError as error:
            answers = isinstance(error, ConnectionRefusedError)
            reason = "no machine of that name" if isinstance(error, socket.gaierror) else error.strerror or "no answer"
        waited = time.monotonic() - began
        if waited > (JOIN_SECONDS if answers else SILENT_SECONDS):
            reason = "that machine answers, but rank 0 does not listen there" if answers else reason
            came = f"rank {place.rank} on {socket.gethostname()} did not reach rank 0 there in {waited:.0f} s"
            raise RecipeError(f"{place.address}: {came} ({reason})")
        time.sleep(0.2)


def _listening_address(host: str) -> str:
    """Returns the address at which gloo would listen: the host name's first that belongs to this machine, else
    127.0.0.1. Empty where GLOO_SOCKET_IFNAME sets it."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
    return "127.0.0.1"
