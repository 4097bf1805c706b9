"""This machine: its GPUs and memory, and the number of ranks that a recipe starts on it."""

import os
from math import prod
from pathlib import Path

from shardbook.parallel.mesh import describe_sizes, resolve_sizes
from shardbook.recipe import Parallel, RecipeError, find_stage

DRIVERS = ("nvidiactl", "nvidia0", "kfd", "dxg", "nvhost-gpu")  # in /dev: CUDA, ROCm, WSL, Jetson
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


def choose_nproc(parallel: Parallel, asked: int | None = None, nodes: int = 1) -> int:
    """Returns the number of ranks to start on each of `nodes` machines: `asked`, else this one's share of a fixed mesh,
    else one a GPU, else two on the CPU. Raises RecipeError for stage and mesh here, before every rank would."""
    gpus = count_gpus()
    sizes = resolve_sizes(parallel, find_stage(parallel.stage).axes, world_size=asked and asked * nodes)
    if asked is not None:
        if asked > (most := memory_bytes() // RANK_BYTES):
            said = f"must be at most {most} here: so many fill {memory_bytes() / 1e9:.0f} GB before they have a model"
            raise RecipeError(f"--nproc {asked}: {said}")
        return asked
    needed = prod(sizes.values())
    if needed < 0:  # a free axis takes all GPUs; without GPUs 2 ranks, or the product of the fixed axes
        return gpus or -needed * max(1, 2 // -needed)
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
