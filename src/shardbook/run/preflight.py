"""Preflight: a look at what a recipe names, before its model is asked for and anything is read or allocated.

Invariant: rank 0 looks, and every rank is told (`with_ranks`); a dry run looks in its own process. Nothing is made or
fetched. What each rank reads, the model's small files and rows, is looked at where it is read, once (prepare.py).
"""

from pathlib import Path

from shardbook.data.find import find_sources, read_template
from shardbook.plan.cluster import build_planner
from shardbook.plan.hardware import ROOM, build_cluster
from shardbook.plan.peak import GB
from shardbook.ranks.distributed import Ranks
from shardbook.ranks.machine import gpu_bytes, memory_bytes, too_large
from shardbook.recipe import Recipe, RecipeError
from shardbook.run.directory import check_run_directory
from shardbook.run.log.trackers import check_installed
from shardbook.run.result.hub import check_push


def preflight(recipe: Recipe, name: str, ranks: Ranks) -> None:
    """Raises RecipeError where a run of `recipe`, whose file has this `name`, cannot begin on machines like this one: a
    step takes more memory than they have, or `check_run` refuses."""
    if recipe.hardware.memory_gb:  # before a hub is asked for the model
        check_peak(recipe, name, ranks.world_size, ranks.ranks_per_node)
    check_run(recipe)


def check_run(recipe: Recipe) -> None:
    """Raises RecipeError where a run of `recipe` cannot begin: a tracker is not installed, the run's directory cannot
    be made, its result not be pushed, or `check_named` refuses what it reads."""
    check_installed(recipe.run)
    check_run_directory(recipe.run)
    check_push(recipe.train)
    check_named(recipe)


def check_named(recipe: Recipe) -> None:
    """Raises RecipeError where the template, a source of data, an adapter or a checkpoint that `recipe` names is
    missing, of another kind, or broken at its beginning."""
    read_template(recipe.data.chat_template)
    find_sources(recipe.data.train, "data.train")
    if recipe.data.eval:
        find_sources(recipe.data.eval, "data.eval")
    beside = {"lora.adapter": recipe.lora.adapter, "train.resume_from_checkpoint": recipe.train.resume_from_checkpoint}
    for key, path in beside.items():
        if path and not Path(path).expanduser().is_dir():
            raise RecipeError(f"{key} = {path!r}: no such directory")


def check_peak(recipe: Recipe, name: str, ranks: int, ranks_per_node: int) -> None:
    """Raises RecipeError where a step of a recipe with hardware.memory_gb takes more memory at its peak than machines
    like this one have. Their state the launcher has checked."""
    gpus, peak = gpu_bytes(), _peak_bytes(recipe, ranks, ranks_per_node)
    if peak > (room := ROOM * min(gpus) if gpus else memory_bytes() / ranks_per_node):
        step = f"a step of {name} takes {peak / GB:,.0f} GB on each of {ranks} ranks at its peak"
        raise too_large(f"{step}, and each has {room / GB:,.0f} GB here", name, recipe.hardware.memory_gb)


def _peak_bytes(recipe: Recipe, ranks: int, ranks_per_node: int) -> int:
    """Returns a rank's predicted peak; 0, so that state alone is checked, for a model or a mesh size unknown here."""
    try:
        planner = build_planner(recipe)
        return planner.lay_out(planner.recipe, build_cluster("h100-80gb", ranks, a_node=ranks_per_node)).peak.total
    except RecipeError:
        return 0
