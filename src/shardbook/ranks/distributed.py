"""Processes: the process group, this rank in it, its threads, and its turn on a node.

Invariant: after `start_distributed` the same code runs with one process or many, CPU (gloo) or CUDA (NCCL beside gloo:
host-side sums and checkpoints never touch the device stream). Knows nothing of meshes, models or recipes.
"""

import contextlib
import os
import pickle
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from shardbook.comm.torch_private import backends_of
from shardbook.ranks.exits import RunFailed, watch_launcher
from shardbook.ranks.heartbeat import Heartbeat
from shardbook.ranks.launchers import Rendezvous, read_rendezvous
from shardbook.ranks.peer_errors import is_out_of_reach
from shardbook.ranks.process_env import (
    allocator_default,
    forbid_tf32,
    raise_descriptors,
    record_in,
    start_recorder,
)
from shardbook.ranks.progress import PROGRESS
from shardbook.ranks.rendezvous import INTERFACE, Store, join_ranks, read_member
from shardbook.recipe import RecipeError, first_line

T = TypeVar("T")
Shared = tuple[type[Exception], ...]
SHARED_ERRORS: Shared = (RecipeError, RunFailed, OSError)  # of one rank they are raised on all
TIMEOUT = timedelta(minutes=30)  # rank 0 may convert weights or tokenize while the others wait
CONNECT_TIMEOUT = timedelta(minutes=1)  # gloo tries for five times this long
LATER_SECONDS = 60  # by which NCCL's limit is above that of a hang: a rank that NCCL ends names no reason


@dataclass(frozen=True)
class Ranks:
    """This process among the others, and its device."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int
    device: torch.device
    heartbeat: Heartbeat | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start_distributed(lost_seconds: float = 0, hang_seconds: float = 0) -> Ranks:
    """Joins the process group that the launcher's variables describe; without a launcher, makes a world of one.

    A rank without a heartbeat for `lost_seconds` ends all the others (0: they wait for TIMEOUT), and so does a rank
    without progress for `hang_seconds` inside `watch_steps` (0: off). Raises RecipeError where the launcher would shard
    a second time (`ACCELERATE_USE_FSDP`), its variables are wrong, a rank does not join, or gloo cannot connect the
    ranks.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes"):
        raise RecipeError(
            "ACCELERATE_USE_FSDP is set by the launcher: Shardbook shards the model itself; "
            "use distributed_type: MULTI_GPU in accelerate's config, and choose the stage with parallel.stage"
        )
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # else transformers loads on rank 0 only and broadcasts
    os.environ.update(allocator_default(os.environ))
    raise_descriptors()
    forbid_tf32()
    watch_launcher()
    place = read_rendezvous(os.environ)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if place.local_rank >= (gpus := torch.cuda.device_count()):
            raise RecipeError(
                f"LOCAL_RANK = {place.local_rank}: this process sees {gpus} GPU{'s' * (gpus > 1)}; start one rank a "
                "GPU, and let each see all GPUs of its node"
            )
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        start_recorder()
    PROGRESS.blocks = device.type == "cpu"
    store = join_ranks(place)
    _share_cores(place, store)
    # without device_id: with it every barrier, also one around an hour of tokenizing, would be NCCL's
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    watches = hang_seconds or (lost_seconds and place.world_size > 1)
    heartbeat = Heartbeat(place, store, lost_seconds, hang_seconds) if watches else None
    connect(place, store, backend)
    _barrier(place, store, "connected")  # else a rank may end while another still connects to it
    return Ranks(place.rank, place.world_size, place.local_rank, place.ranks_per_node, device, heartbeat)


def _barrier(place: Rendezvous, store: Store, name: str) -> None:
    """Waits until every rank is here; rank 0, which may host the store, until the others have read that, too."""
    everyone = range(place.world_size)
    store.set(f"{name}/{place.rank}", "")
    if place.rank == 0:
        store.wait([f"{name}/{rank}" for rank in everyone], TIMEOUT)
        store.set(name, "")
    store.wait([name], TIMEOUT)
    store.set(f"{name}/{place.rank}/read", "")
    if place.rank == 0:
        store.wait([f"{name}/{rank}/read" for rank in everyone], TIMEOUT)


def connect(place: Rendezvous, store: Store, backend: str) -> None:
    """Makes the process group of all ranks. Raises RecipeError where gloo does not reach them all."""
    rank, size = place.rank, place.world_size
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=CONNECT_TIMEOUT)
    except RuntimeError as error:
        if not is_out_of_reach(error):  # perhaps a rank ended while others connected
            raise
        host = socket.gethostname()
        message = f"rank {rank} on {host}: gloo does not reach the other ranks ({first_line(error)})"
        raise RecipeError(f"{message}; {INTERFACE}") from None
    cast(dist.ProcessGroup, dist.group.WORLD).set_timeout(TIMEOUT)


def set_time_limit(device_type: str, limit: timedelta) -> None:
    """Sets the limit of a collective on `device_type`, in every group: one that takes longer ends this process.

    Without it a group made for a mesh keeps torch's default, whatever limit the group of all ranks has.
    """
    for backend in backends_of(torch.device(device_type)):
        backend.set_timeout(limit)


@contextlib.contextmanager
def watch_steps(ranks: Ranks, hang_seconds: float, warmup_steps: int = 1) -> Iterator[Callable[[int], None]]:
    """Watches the steps inside. Yields a function to call with the number of each finished step.

    After the `warmup_steps`, which compile, a rank without progress for `hang_seconds` ends the run and is named (0:
    not watched), and NCCL's limit falls from TIMEOUT to LATER_SECONDS more than that. gloo's limit stays: a checkpoint
    waits for the slowest disk.
    """
    limit = timedelta(seconds=hang_seconds + LATER_SECONDS) if hang_seconds else TIMEOUT
    left = count(warmup_steps - 1, -1)

    def finish(step: int) -> None:
        compiles = next(left) > 0
        if not (PROGRESS.watched or compiles) and ranks.device.type == "cuda":
            set_time_limit("cuda", limit)
        PROGRESS.finish(step, watched=not compiles)

    yield finish
    PROGRESS.watched = False
    if ranks.device.type == "cuda":  # (on a CPU gloo serves "cuda" too)
        set_time_limit("cuda", TIMEOUT)  # in an export ranks wait for a disk again


def leave_hangs_in(folder: Path) -> None:
    """Sets `folder` for stacks and records of a hang; it is made when there is something to write."""
    PROGRESS.folder = folder
    record_in(folder)


def stop_distributed(ranks: Ranks) -> None:
    """Leaves the process group; other ranks may end later than this one."""
    if ranks.heartbeat:
        ranks.heartbeat.leave()
    dist.destroy_process_group()


def _share_cores(place: Rendezvous, store: Store) -> None:
    """Sets torch's threads to this rank's share of the cores that it may use: more threads than cores make CPU work
    several times slower, and one (torchrun's default) starves it. A launcher may give each rank its own cores."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and not (threads == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        return  # the user's choice
    first = place.rank - place.rank % place.ranks_per_node
    node = [read_member(store, rank)["cores"] for rank in range(first, first + place.ranks_per_node)]
    torch.set_num_threads(share_of_cores(node, place.rank - first))


def share_of_cores(node: Sequence[Sequence[int]], number: int) -> int:
    """Returns the share of cores, at least 1, of a node's rank `number`: each core that it may use is divided among all
    ranks that may use it. `node`: for each of its ranks the cores that it may use."""
    users = Counter(core for cores in node for core in cores)
    return max(1, int(sum(1 / users[core] for core in node[number]) + 1e-6))


def sum_over_ranks(*values: float) -> list[float]:
    """Returns each value summed over ranks, on the host: no device sync. Exact for integers below 2**53. Collective."""
    return begin_sum(*values)()


def begin_sum(*values: float) -> Callable[[], list[float]]:
    """Begins `sum_over_ranks` and returns a function that waits for its result. Collective."""
    total = torch.tensor(values, dtype=torch.float64)
    work = dist.all_reduce(total, async_op=True)

    def wait() -> list[float]:
        PROGRESS.mark("in a sum over all ranks")  # a rank that waits here is ahead of one that has not begun the sum
        work.wait()
        PROGRESS.mark("after a sum over all ranks")
        return [float(value) for value in total]

    return wait


def broadcast_from_main(make: Callable[[], T], shared: Shared = SHARED_ERRORS) -> T:
    """Returns on every rank the result of `make` on rank 0; raises its error, where that is one of `shared`, on every
    rank: else the others would wait for a rank that has left. Collective."""
    result = _result_or_error(make, shared) if dist.get_rank() == 0 else None
    box: list[Any] = [_to_send(result)]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    if isinstance(box[0], shared):
        raise result if isinstance(result, shared) else box[0]  # its own where it arose, with its traceback
    return cast(T, box[0])


def raise_on_all_ranks(make: Callable[[], T]) -> T:
    """Returns this rank's result of `make`, which need not be sent; raises as `gather_results` does. Collective."""
    results = list[T]()
    gather_results(lambda: results.append(make()))
    return results[0]


def _share_error(error: Exception | None) -> None:
    """Raises as `gather_results` does where this rank, or another one, has an `error`. Collective."""

    def raise_own() -> None:
        if error:
            raise error

    gather_results(raise_own)


def gather_results(make: Callable[[], T], shared: Shared = SHARED_ERRORS) -> list[T]:
    """Returns every rank's result of `make`; where it raised one of `shared` on any rank, every rank raises: else the
    others would wait for a rank that has left. Of errors of several ranks it is the first that is no RecipeError, since
    what one rank refuses may be another's failure, or the first. Collective."""
    result = _result_or_error(make, shared)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _to_send(result))
    if failed := [rank for rank, each in enumerate(everyone) if isinstance(each, shared)]:
        first = min(failed, key=lambda rank: isinstance(everyone[rank], RecipeError))
        is_alike = first == dist.get_rank() or type(result) is type(everyone[first])
        raise result if is_alike and isinstance(result, shared) else everyone[first]  # its own with its traceback
    return everyone


def _result_or_error(make: Callable[[], T], shared: Shared) -> T | Exception:
    try:
        return make()
    except shared as error:
        return error


def _to_send(result: Any) -> Any:
    """Returns what another process can read of `result`: errors of libraries may not be copied."""
    if isinstance(result, OSError):
        return OSError(result.errno, result.strerror, result.filename) if result.errno else OSError(str(result))
    if isinstance(result, Exception) and not isinstance(result, SHARED_ERRORS):
        try:
            pickle.loads(pickle.dumps(result))
        except Exception:  # whatever its class raises when it is copied
            return RuntimeError(f"{type(result).__name__}: {first_line(result)}")
    return result


def check_same_on_all_ranks(facts: dict[str, Any], what: str = "is not started like rank 0") -> None:
    """Raises RecipeError, on every rank, where a rank's `facts` differ from rank 0's: else ranks would wait for each
    other in different collectives, or compute different numbers. `what`: of that rank, in words. Collective."""
    everyone: list[tuple[str, dict[str, Any]]] = [("", {}) for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, (socket.gethostname(), facts))
    host, first = everyone[0]
    for rank, (their_host, theirs) in enumerate(everyone):
        if differ := [name for name in first | theirs if first.get(name) != theirs.get(name)]:
            shown = [f"{name} is {theirs.get(name)!r} there, {first.get(name)!r} here" for name in differ[:3]]
            shown += [f"and {len(differ) - 3} more"] * (len(differ) > 3)
            shown += [f"rank {rank} is on {their_host}, rank 0 on {host}"] * (their_host != host)
            raise RecipeError(f"rank {rank} {what}: {'; '.join(shown)}")


@contextlib.contextmanager
def local_main_process_first(ranks: Ranks) -> Iterator[None]:
    """Runs the body on the node's first rank, then on its others: for work that fills a cache on disk. A RecipeError,
    RunFailed or OSError of one rank is raised on all, and all leave together: else a rank would wait for one that has
    left, or a late one lose the store of rank 0. Collective."""
    error: Exception | None = None
    if ranks.local_rank != 0:
        _share_error(None)  # of the nodes' first ranks
    try:
        yield
    except SHARED_ERRORS as raised:
        error = raised
    if ranks.local_rank == 0:
        _share_error(error)
    _share_error(error)
