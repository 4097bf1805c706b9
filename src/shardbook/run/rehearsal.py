"""Rehearses a run's set-up and one step with nothing allocated (`shardbook train --dry-run`), and checks whether this
machine has the memory at all."""

import re
from pathlib import Path

import torch

from shardbook.model.laid_out import World
from shardbook.plan.cluster import build_planner
from shardbook.plan.hardware import ROOM, build_cluster
from shardbook.plan.peak import GB
from shardbook.ranks.machine import memory_bytes
from shardbook.recipe import Recipe, RecipeError
from shardbook.run.checkpoint.format import newest_checkpoint
from shardbook.run.console import Console, readable_bytes
from shardbook.run.prepare import lay_out_run, prepare_job


def rehearse(recipe: Recipe, world_size: int, ranks_per_node: int) -> None:
    """Prepares `recipe` as `world_size` ranks on GPUs would, up to its weights: config, layout, optimizer, tokenizer,
    every row of the data, and one step on fake tensors. Raises RecipeError where the run would."""
    console = Console(is_main=True)
    console.print(
        f"dry run  as on {world_size} GPUs, which compute in bf16 where precision.params is auto; a CPU's in fp32"
    )
    run = Path(recipe.run.dir).expanduser() / recipe.run.name if recipe.run.name else None
    checkpoint = newest_checkpoint(run / "checkpoints") if run else None
    laid = lay_out_run(recipe, World(world_size, ranks_per_node))
    job = prepare_job(laid, run=run, checkpoint=checkpoint or recipe.train.resume_from_checkpoint)
    console.show_job(job)
    from shardbook.plan.simulate import simulate_step  # makes a process group, and loads fake tensors' modules

    beside = {"offload.optimizer": recipe.offload.optimizer != "none", "parallel.pp_size": recipe.parallel.pp_size > 1}
    unsimulated = " and ".join(key for key, is_there in beside.items() if is_there)
    if not unsimulated:
        found = simulate_step(job, job.objective.terms)
        console.print(f"a step   on fake tensors: {readable_bytes(found.peak_bytes)} at its peak, in {found.moment}")
        looked = "config, layout, data and a step; not looked at:"
    else:
        looked = f"config, layout and data; not looked at: a step (none is simulated with {unsimulated}),"
    console.print(f"dry run  done: {looked} weights, processes, links")


def check_memory(recipe: Recipe, recipe_path: Path, nodes: int) -> None:
    """Raises RecipeError, in four lines, where `nodes` machines like this one have less memory than a recipe with
    hardware.memory_gb needs for its state or at the peak of a step: before hours of download, not after."""
    gpus = [torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())]
    here = sum(gpus) if gpus else memory_bytes()
    ranks = nodes * (len(gpus) or 2)
    room = ROOM * min(gpus) if gpus else here * nodes / ranks
    peak = _peak_bytes(recipe, ranks, ranks // nodes)
    if here * nodes >= recipe.hardware.memory_gb * GB and room >= peak:
        return
    lines = recipe_path.read_text().splitlines()
    sized = next((line.partition(":")[2] for line in lines if line.startswith("# hardware:")), "")
    count = re.search(r"(\d+) nodes", sized)
    what = f"{len(gpus)} GPUs with" if gpus else "no GPU,"
    machines = "this machine has" if nodes == 1 else f"each of {nodes} machines like this one has"
    step = f", and {peak / GB:,.0f} GB on each of {ranks} ranks at the peak of a step" if peak else ""
    raise RecipeError(
        f"{recipe_path.stem} needs {recipe.hardware.memory_gb:,.0f} GB for its state{step}"
        + f" (sized for{sized})" * bool(sized)
        + f"\n  here: {machines} {what} {here / GB:,.0f} GB of memory; hardware.memory_gb=0 tries nevertheless\n"
        f"  what each stage takes on how many GPUs: make plan RECIPE={recipe_path.stem} GPUS=64 GPU=h100-80gb\n"
        f"  on a cluster, on each machine: make launch NODES={count[1] if count else 2} NODE_RANK=0 HEAD=first-machine "
        f"RECIPE={recipe_path.stem}"
    )


def _peak_bytes(recipe: Recipe, ranks: int, ranks_per_node: int) -> int:
    """Returns a rank's predicted peak; 0, so that state alone is checked, for a model or a mesh size unknown here."""
    try:
        planner = build_planner(recipe)
        return planner.lay_out(planner.recipe, build_cluster("h100-80gb", ranks, a_node=ranks_per_node)).peak.total
    except RecipeError:
        return 0
