"""This machine: how many ranks a recipe starts on it, and whether its memory could hold them at all."""

import os
import re
from math import prod
from pathlib import Path

import torch

from shardbook.parallel.mesh import describe_sizes, resolve_sizes
from shardbook.parallel.stages import check_stage
from shardbook.recipe import Recipe, RecipeError

GB = 10**9


def choose_nproc(recipe: Recipe, asked: int | None = None, nodes: int = 1) -> int:
    """Ranks to start on each of `nodes` machines: those asked for, else this one's share of a fixed mesh, else one a
    GPU, else two on the CPU. Raises RecipeError for stage and mesh, which is sooner and quieter than every rank finding
    out."""
    gpus = torch.cuda.device_count()
    sizes = resolve_sizes(recipe.parallel, check_stage(recipe.parallel).axes, world_size=asked and asked * nodes)
    if asked is not None:
        return asked
    needed = prod(sizes.values())
    if needed < 0:  # an axis takes what there is
        return gpus or 2
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


def check_memory(recipe: Recipe, recipe_path: Path, nodes: int) -> None:
    """Raise RecipeError, in four lines, where `nodes` machines like this one have less memory than the recipe says
    that its state alone takes: before hours of download, not after."""
    gpus = [torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())]
    here = sum(gpus) if gpus else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if here * nodes >= recipe.hardware.memory_gb * GB:
        return
    lines = recipe_path.read_text().splitlines()
    sized = next((line.partition(":")[2] for line in lines if line.startswith("# hardware:")), "")
    count = re.search(r"(\d+) nodes", sized)
    what = f"{len(gpus)} GPUs with" if gpus else "no GPU,"
    machines = "this machine has" if nodes == 1 else f"each of {nodes} machines like this one has"
    raise RecipeError(
        f"{recipe_path.stem} needs {recipe.hardware.memory_gb:,.0f} GB for weights, gradients and optimizer state alone"
        + f" (sized for{sized})" * bool(sized)
        + f"\n  here: {machines} {what} {here / GB:,.0f} GB of memory; hardware.memory_gb=0 tries nevertheless\n"
        f"  what each stage takes on how many GPUs: make plan RECIPE={recipe_path.stem} GPUS=64 GPU=h100-80gb\n"
        f"  on a cluster, on each machine: make launch NODES={count[1] if count else 2} NODE_RANK=0 HEAD=first-machine "
        f"RECIPE={recipe_path.stem}"
    )
