"""This machine: its GPUs and memory, and the number of ranks that a recipe starts on it."""

import os
from math import ceil, lcm, prod
from pathlib import Path

from shardbook.parallel.mesh import describe_sizes, resolve_sizes
from shardbook.recipe import Parallel, RecipeError, find_stage

DRIVERS = ("nvidiactl", "nvidia0", "kfd", "dxg", "nvhost-gpu")  # in /dev: CUDA, ROCm, WSL, Jetson
GPUS, GPU_GB = 8, 80  # of a node of a cluster, as a way out
RANK_BYTES = 300 << 20  # at least, of a rank that has imported torch and has no model yet


def has_driver() -> bool:
    """Returns whether this machine has a GPU's driver; without one ranks compute on its CPU."""
    return any((Path("/dev") / name).exists() for name in DRIVERS)


def count_gpus() -> int:
    """Returns the number of GPUs. Without a driver torch is not imported, the longest wait of a launcher on a CPU."""
    if not has_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def memory_bytes() -> int:
    """Returns the bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gpu_bytes() -> list[int]:
    """Returns the bytes of memory of each GPU."""
    if not (count := count_gpus()):
        return []
    import torch

    return [torch.cuda.get_device_properties(number).total_memory for number in range(count)]


def check_state(memory_gb: float, name: str, nodes: int) -> None:
    """Raises RecipeError where `nodes` machines like this one have less memory than `memory_gb`, which the state of the
    recipe `name` needs: before ranks are started, of which its mesh may want hundreds."""
    if not memory_gb:  # else CUDA would begin here, before ranks are started
        return
    gpus = gpu_bytes()
    memory = sum(gpus) or memory_bytes()
    if memory * nodes < memory_gb * 1e9:
        what = f"{len(gpus)} GPUs with" if gpus else "no GPU,"
        machines = "this machine has" if nodes == 1 else f"each of {nodes} machines like this one has"
        state = (
            f"{name} needs {memory_gb:,.0f} GB for its state, and {machines} {what} {memory / 1e9:,.0f} GB of memory"
        )
        raise too_large(state, name, memory_gb)


def too_large(what: str, name: str, memory_gb: float) -> RecipeError:
    """Returns the refusal of a recipe `name` that is too large for this machine: `what`, and the ways out."""
    nodes = ceil(memory_gb / (GPUS * GPU_GB))  # at least
    return RecipeError(
        f"{what}; what it takes on how many GPUs: make plan RECIPE={name} GPUS={GPUS * nodes} GPU=h100-80gb; on a "
        f"cluster, on each machine: make launch NODES={max(2, nodes)} NODE_RANK=0 HEAD=first-machine RECIPE={name}; "
        "hardware.memory_gb=0 tries nevertheless"
    )


def choose_nproc(parallel: Parallel, asked: int | None = None, nodes: int = 1) -> int:
    """Returns the number of ranks to start on each of `nodes` machines: `asked`, else this one's share of a fixed mesh,
    else one a GPU, else two on the CPU. Raises RecipeError for stage and mesh here, before every rank would."""
    gpus = count_gpus()
    sizes = resolve_sizes(parallel, find_stage(parallel.stage).axes, world_size=asked and asked * nodes)
    if asked is not None:
        if asked > (most := memory_bytes() // RANK_BYTES):
            filled = f"so many fill {memory_bytes() / 1e9:.0f} GB before they have a model"
            raise RecipeError(f"--nproc {asked}: must be at most {most} here: {filled}")
        return asked
    needed = prod(sizes.values())
    if needed < 0:  # a free axis takes all GPUs; without GPUs 2 ranks, or the product of the fixed axes
        return gpus or lcm(-needed * max(1, 2 // -needed), -needed * parallel.ep_size)
    if needed % nodes:
        raise RecipeError(
            f"mesh {describe_sizes(sizes)} needs {needed} ranks, which {nodes} machines cannot share evenly: "
            "change the sizes, or --nodes"
        )
    needed //= nodes
    room, what = (gpus, "GPUs") if gpus else (2 * (os.cpu_count() or 1), "ranks on its CPU cores")
    if needed > room:
        raise RecipeError(
            f"mesh {describe_sizes(sizes)} needs {needed} ranks and this machine has room for {room} {what}: "
            "change the sizes, or insist with --nproc"
        )
    return needed
