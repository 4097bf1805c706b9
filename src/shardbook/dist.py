"""Processes: the process group, this rank's place in it, who speaks, who goes first, who asked to stop.

Invariant: after `start_distributed` the same code runs with one process or many, CPU (gloo) or CUDA (NCCL
beside gloo: host-side sums and checkpoints never touch the device stream).
Knows nothing of meshes, models or recipes.
"""

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from shardbook.recipe import RecipeError

DONE, FAILED, WRONG, PREEMPTED = 0, 1, 2, 75  # exit codes of a rank, and of a run
T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # rank 0 may convert weights or tokenise while the others wait


class RunFailed(Exception):
    """The run cannot go on, and not because of its recipe; the message is the reason. The process exits with 1."""


@dataclass(frozen=True)
class Ranks:
    """This process among the others, and its device."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start_distributed() -> Ranks:
    """Join the process group that the launcher's variables describe; without a launcher, be a world of one.

    Raises RecipeError where the launcher would shard a second time (`ACCELERATE_USE_FSDP`) or left out a variable.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes"):
        raise RecipeError(
            "ACCELERATE_USE_FSDP is set by the launcher: Shardbook shards the model itself; "
            "use distributed_type: MULTI_GPU in accelerate's config, and choose the stage with parallel.stage"
        )
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # else transformers loads on rank 0 only and broadcasts
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
    absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise RecipeError(
            f"the launcher set RANK but not {', '.join(absent)}: "
            "start with torchrun, accelerate launch or shardbook train"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        # without device_id: with it every barrier, also one around an hour of tokenising, would be NCCL's
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=TIMEOUT)
    return Ranks(dist.get_rank(), dist.get_world_size(), local_rank, ranks_per_node, device)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sum_over_ranks(*values: float) -> list[float]:
    """Each value summed over all ranks, on the host: no device synchronisation. Exact for integers below 2**53."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(value) for value in total]


def from_main(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on every rank; its RecipeError too is raised on every rank."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [make()]
        except RecipeError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    if isinstance(box[0], RecipeError):
        raise box[0]
    return cast(T, box[0])


def check_alike(facts: dict[str, Any]) -> None:
    """Raise RecipeError, on every rank, where a rank's `facts` are not rank 0's: else they would wait for each other in
    unlike collectives, or compute unlike numbers. Collective."""
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, facts)
    for rank, theirs in enumerate(everyone):
        if differ := [name for name in everyone[0] | theirs if everyone[0].get(name) != theirs.get(name)]:
            shown = (f"{name} is {theirs.get(name)!r} there, {everyone[0].get(name)!r} here" for name in differ[:3])
            raise RecipeError(
                f"rank {rank} is not started like rank 0: {'; '.join(shown)}"
                + (f"; and {len(differ) - 3} more" if len(differ) > 3 else "")
            )


@contextlib.contextmanager
def first_on_node(ranks: Ranks) -> Iterator[None]:
    """The node's first rank runs the body, then the others: for work whose result is a cache on disk."""
    if ranks.local_rank != 0:
        dist.barrier()
    yield
    if ranks.local_rank == 0:
        dist.barrier()


@dataclass
class StopFlag:
    """Set on this rank by SIGTERM, SIGUSR1 or a first Ctrl-C (a second ends the rank at once); summed over ranks with
    each step's tokens, so that all stop after the same step."""

    asked: bool = False

    def listen(self) -> "StopFlag":
        def ask(signum: int, frame: FrameType | None) -> None:
            self.asked = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if dist.get_rank() == 0:
                # not print: the signal may come while a line is being written, and Python refuses to write two at once
                os.write(1, b"stopping after this step; Ctrl-C again to quit without saving\n")

        for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(signum, ask)
        return self


def report_error(error: BaseException, code: int) -> int:
    """Print the reason as the last line, after a traceback if it is our bug. Returns `code`.

    The first rank that leaves has the others killed, so the rank that knows must leave first: rank 0 at once, since
    most errors meet every rank; another rank soon after; one that only lost its peer last, for it knows nothing.
    """
    lost_peer = isinstance(error, dist.DistError) or "gloo" in str(error)
    time.sleep(4 if lost_peer else 2 if int(os.environ.get("RANK", "0")) else 0)
    ours = not isinstance(error, (RecipeError, RunFailed))
    if ours:
        traceback.print_exception(error)
    reason = " ".join(f"{f'run failed: {type(error).__name__}: ' * ours}{error}".split())
    print(f"shardbook: {reason}", file=sys.stderr, flush=True)
    return code
