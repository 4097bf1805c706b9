"""Preflight: a look at all that a recipe names, before anything large is fetched, read or allocated.

Invariant: rank 0 looks, and every rank is told (`broadcast_from_main`); a dry run looks in its own process. Nothing is
made, and of a model only its small files are fetched. Rows are looked at where they are read (prepare.py).
"""

from math import ceil
from pathlib import Path

import torch

from shardbook.data.files import find_sources, read_template
from shardbook.model import embedded
from shardbook.model.families import load_config
from shardbook.model.hub import config_folder, read_header, tokenizer_folder, weights_files
from shardbook.plan.cluster import build_planner
from shardbook.plan.hardware import ROOM, build_cluster
from shardbook.plan.peak import GB
from shardbook.ranks.machine import memory_bytes
from shardbook.recipe import Model, Recipe, RecipeError
from shardbook.run.directory import check_run_directory
from shardbook.run.push import check_push
from shardbook.run.trackers import check_installed


def preflight(recipe: Recipe, name: str, ranks: int, ranks_per_node: int) -> None:
    """Raises RecipeError where a run of `recipe`, whose file has this name, cannot begin on so many ranks of machines
    like this one: they have less memory than it needs, or `check_run` refuses."""
    if recipe.hardware.memory_gb:  # before a hub is asked for the model
        check_memory(recipe, name, ranks, ranks_per_node)
    check_run(recipe)


def check_run(recipe: Recipe) -> None:
    """Raises RecipeError where a run of `recipe` cannot begin: a tracker is not installed, the run's directory cannot
    be made, its result not be pushed, or `check_named` refuses what it reads."""
    check_installed(recipe.run)
    check_run_directory(recipe.run)
    check_push(recipe.train)
    check_named(recipe)


def check_named(recipe: Recipe) -> None:
    """Raises RecipeError where something that `recipe` reads is missing, of another kind, or broken at its beginning:
    the template, sources of data, checkpoints, models and their configs."""
    read_template(recipe.data.chat_template)
    find_sources(recipe.data.train, "data.train")
    if recipe.data.eval:
        find_sources(recipe.data.eval, "data.eval")
    beside = {"lora.adapter": recipe.lora.adapter, "train.resume_from_checkpoint": recipe.train.resume_from_checkpoint}
    for key, path in beside.items():
        if path and not Path(path).expanduser().is_dir():
            raise RecipeError(f"{key} = {path!r}: no such directory")
    _check_model(recipe.model, recipe.data.max_length, "model.path")
    if recipe.distill.teacher:
        _check_model(recipe.distill.model, recipe.data.max_length, "distill.teacher")
    if recipe.model.tokenizer:
        tokenizer_folder(recipe.model)


def _check_model(model: Model, max_length: int, what: str) -> None:
    if model.path in embedded.MODELS:  # it is converted once, which takes long
        return
    folder = config_folder(model, what)
    if model.init == "pretrained" and Path(model.path).is_dir():
        for weights in weights_files(folder):
            with weights.open("rb", buffering=0) as file:
                read_header(weights, file)
    load_config(model, folder, max_length, what)


def check_memory(recipe: Recipe, name: str, ranks: int, ranks_per_node: int) -> None:
    """Raises RecipeError where machines like this one have less memory than a recipe with
    hardware.memory_gb needs for its state or at the peak of a step."""
    gpus = [torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())]
    nodes, memory = ranks // ranks_per_node, sum(gpus) if gpus else memory_bytes()
    room = ROOM * min(gpus) if gpus else memory / ranks_per_node
    state_bytes, peak = recipe.hardware.memory_gb * GB, _peak_bytes(recipe, ranks, ranks_per_node)
    if memory * nodes >= state_bytes and room >= peak:
        return
    step = f", and {peak / GB:,.0f} GB on each of {ranks} ranks at the peak of a step" if peak else ""
    what = f"{len(gpus)} GPUs with" if gpus else "no GPU,"
    machines = "this machine has" if nodes == 1 else f"each of {nodes} machines like this one has"
    enough = ceil(state_bytes / build_cluster("h100-80gb", 8).room_bytes / 8)  # nodes of 8, for state alone
    raise RecipeError(
        f"{name} needs {recipe.hardware.memory_gb:,.0f} GB for its state{step}, and {machines} {what} "
        f"{memory / GB:,.0f} GB of memory; what it takes on how many GPUs: make plan RECIPE={name} GPUS={8 * enough} "
        f"GPU=h100-80gb; on a cluster, on each machine: make launch NODES={max(2, enough)} NODE_RANK=0 "
        f"HEAD=first-machine RECIPE={name}; hardware.memory_gb=0 tries nevertheless"
    )


def _peak_bytes(recipe: Recipe, ranks: int, ranks_per_node: int) -> int:
    """Returns a rank's predicted peak; 0, so that state alone is checked, for a model or a mesh size unknown here."""
    try:
        planner = build_planner(recipe)
        return planner.lay_out(planner.recipe, build_cluster("h100-80gb", ranks, a_node=ranks_per_node)).peak.total
    except RecipeError:
        return 0
