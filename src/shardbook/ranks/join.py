"""Joining: this process's rank, by its launcher's variables, and the store where all ranks of a run meet.

Invariant: either every rank of the run gets the store, or every rank that joined ends with one line that names the
absent ranks and the address. Knows nothing of process groups and devices.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# public (torch.distributed.Store in its documentation), but mypy does not see that it is exported
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import Store as Store  # type: ignore[attr-defined]

from shardbook.ranks.exits import RERUN_HINT, RunFailed
from shardbook.ranks.launchers import JOB, SEVERAL, find_several
from shardbook.recipe import RecipeError

SILENT_SECONDS = 15  # for a head that does not answer at all, or a name that is not known (yet)
JOIN_SECONDS = 300  # for ranks that do not join
TELL_SECONDS, TELL_AGAIN_SECONDS = 10, 30
MEET_SECONDS, READ_SECONDS = 1, 10  # for which a rank that refuses stays: for ranks that just come, to read why
STORE_TIMEOUT = timedelta(seconds=60)  # of one call; a call is made only once its answer is there
START = "start with shardbook train, torchrun, accelerate launch, or srun through launch/slurm.sbatch"
ALL_CAME = "all came"
INTERFACE = (
    "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, on each machine, to its interface (as in `ip addr`) to the others"
)


@dataclass(frozen=True)
class Rendezvous:
    """This rank among all, and the store's address. `hosted`: the launcher's agent hosts the store, not rank 0."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    ranks_per_node: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    hosted: bool = False
    attempt: int = 0  # torchrun starts its ranks again on the same store

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def read_rendezvous(variables: Mapping[str, str]) -> Rendezvous:
    """Returns the rendezvous of a launcher's `variables`, a world of one without a launcher. Raises RecipeError."""
    if "RANK" not in variables:
        if several := find_several(variables, (JOB, *SEVERAL)):
            name, _, program = several[0]
            alone = f"{program} alone makes no run of its processes"
            raise RecipeError(f"{name} = {variables[name]} and no RANK: {alone}; {START}")
        return Rendezvous()
    absent = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if absent:
        raise RecipeError(f"the launcher set RANK but not {', '.join(absent)}; {START}")

    def number(name: str, default: str = "") -> int:
        text = variables.get(name) or default
        if not (text.isascii() and text.isdigit()):
            raise RecipeError(f"{name} = {text!r}: must be a whole number; {START}")
        return int(text)

    rank, world = number("RANK"), number("WORLD_SIZE")
    local_rank, ranks_per_node = number("LOCAL_RANK", "0"), number("LOCAL_WORLD_SIZE", str(world))
    port, wanted = number("MASTER_PORT"), "the same number of ranks a node"
    uneven = ranks_per_node < 1 or world % ranks_per_node
    for wrong, said in (
        (rank >= world, f"RANK = {rank}: must be below WORLD_SIZE = {world}"),
        (uneven, f"LOCAL_WORLD_SIZE = {ranks_per_node}: must divide WORLD_SIZE = {world}: {wanted}"),
        (local_rank >= ranks_per_node, f"LOCAL_RANK = {local_rank}: must be below LOCAL_WORLD_SIZE = {ranks_per_node}"),
        (not 0 < port < 2**16, f"MASTER_PORT = {port}: must be from 1 to 65535"),
    ):
        if wrong:
            raise RecipeError(f"{said}; {START}")
    hosted = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = number("TORCHELASTIC_RESTART_COUNT", "0")
    return Rendezvous(rank, world, local_rank, ranks_per_node, variables["MASTER_ADDR"], port, hosted, attempt)


def join_ranks(place: Rendezvous) -> Store:
    """Returns the store of all ranks, once all have joined; `read_member` reads what each wrote of itself there.

    Raises RecipeError, on each rank that joined, where a rank has not after JOIN_SECONDS, two claim the same number,
    the head cannot be reached or its port is taken; RunFailed where rank 0 ends meanwhile.
    """
    is_host = place.rank == 0 and not place.hosted
    if not is_host:
        _await_head(place)
    store = open_store(place, is_host)
    host = socket.gethostname()
    member = {"host": host, "pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0)), "address": _own_address(host)}
    size = f"{place.world_size} on rank {place.rank} ({host})"
    try:
        store.add("came", 1)
        if not (first := store.compare_set("size", "", size).decode()).startswith(f"{place.world_size} "):
            raise RecipeError(_refuse(store, f"WORLD_SIZE is {first} and {size}; start every node alike"))
        if store.add(f"claims/{place.rank}", 1) > 1:
            other = read_member(store, place.rank)
            said = f"RANK = {place.rank} is claimed by two processes: {other['pid']} on {other['host']}, "
            raise RecipeError(_refuse(store, f"{said}{os.getpid()} on {host}; each rank must be started once"))
        store.set(f"beat/{place.rank}", "0")
        store.set(f"member/{place.rank}", json.dumps(member))
        verdict = _await_ranks(store, place) if place.rank == 0 else _await_verdict(store, place)
    except dist.DistNetworkError:  # no refusal, which it would have written: ranks may be started again
        said = f"rank 0 at {place.address} ended before all ranks had come, and said why where it ran"
        raise RunFailed(f"{said}; {RERUN_HINT}") from None
    if verdict != ALL_CAME:
        raise RecipeError(verdict)
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


def read_member(store: Store, rank: int) -> dict[str, Any]:
    """Returns `host`, `pid`, `cores` (that it may use) and `address` (of its host name) of a rank that has joined."""
    return json.loads(store.get(f"member/{rank}"))


def name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


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


def _await_ranks(store: Store, place: Rendezvous) -> str:
    """Waits, on rank 0, until all have joined, printing now and then who has not. Returns the verdict for all ranks."""
    keys = [f"member/{rank}" for rank in range(place.world_size)]
    began, tell_at = time.monotonic(), TELL_SECONDS
    while not store.check(keys):
        if store.check(["verdict"]):
            return _refuse(store, store.get("verdict").decode())
        waited = time.monotonic() - began
        if waited > min(tell_at, JOIN_SECONDS):
            missing = name_ranks([rank for rank, key in enumerate(keys) if not store.check([key])])
            if waited > JOIN_SECONDS:
                said = f"{missing} of {place.world_size} did not come to {place.address} in {waited:.0f} s"
                return _refuse(store, f"{said}; start the run on every node, with this address")
            print(f"waiting for {missing} of {place.world_size} at {place.address}", flush=True)
            tell_at += TELL_AGAIN_SECONDS
        time.sleep(0.05)
    if said := _find_loopback([json.loads(member) for member in store.multi_get(keys)]):
        return _refuse(store, said)
    store.set("verdict", ALL_CAME)
    return ALL_CAME


def _own_address(host: str) -> str:
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


def _find_loopback(members: list[dict[str, Any]]) -> str:
    """Returns a refusal of loopback addresses among several machines: gloo would try for hours. Empty where none is."""
    alone = [rank for rank, member in enumerate(members) if member["address"].startswith(("127.", "::1"))]
    hosts = dict.fromkeys(member["host"] for member in members)
    if not alone or len(hosts) == 1:
        return ""
    first = members[alone[0]]
    said = f"{name_ranks(alone)} would listen at {first['address']}, which is what {first['host']} means there"
    return f"{said}, and no other machine reaches that; {INTERFACE}"


def _refuse(store: Store, verdict: str) -> str:
    """Writes the verdict, and waits until all that came have read it: the store may end with this process."""
    store.set("verdict", verdict)
    _note_read(store)
    time.sleep(MEET_SECONDS)
    until = time.monotonic() + READ_SECONDS
    with contextlib.suppress(dist.DistError):  # rank 0 has ended
        while store.add("read", 0) < store.add("came", 0) and time.monotonic() < until:
            time.sleep(0.05)
    return verdict


def _note_read(store: Store) -> None:
    with contextlib.suppress(dist.DistError):  # the verdict is known, whether rank 0 is still there or not
        store.add("read", 1)


def _await_verdict(store: Store, place: Rendezvous) -> str:
    try:
        store.wait(["verdict"], timedelta(seconds=JOIN_SECONDS + 60))
        verdict = store.get("verdict").decode()
    except dist.DistStoreError:
        return f"rank 0 of {place.world_size} did not come to {place.address} in {JOIN_SECONDS + 60} s"
    _note_read(store)
    return verdict
