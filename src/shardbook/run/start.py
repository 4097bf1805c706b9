"""Starts a run from its newest checkpoint, else the one that the recipe names, else pretrained or random weights."""

import time
from pathlib import Path
from typing import Any

import torch

from shardbook.model.adapter_files import load_adapter
from shardbook.model.adapters import init_adapters, weights_identity
from shardbook.model.weights import SCORE, init_weights, load_weights
from shardbook.parallel.sharding import ShardedModel
from shardbook.recipe import Recipe, RecipeError
from shardbook.run.checkpoint import TrainState, check_checkpoint, load_checkpoint
from shardbook.run.prepare import Job
from shardbook.run.reference import Reference
from shardbook.run.teacher import fill_teacher


def start_from(
    newest: Path | None, job: Job, sharded: ShardedModel, optimizer: torch.optim.Optimizer, reference: Reference
) -> tuple[TrainState, str]:
    """Loads model, optimizer, loader position and `reference`, unless that is stopped before. Returns the run's state,
    and the source of its weights for people. Collective.

    Raises RecipeError where the checkpoint is of another model, or further than the job's steps.
    """
    began, recipe, loader, folder = time.perf_counter(), job.recipe, job.loader, job.folder
    state = TrainState(step=0, tokens=0, loader=loader.state_dict())
    named = "" if newest else recipe.train.resume_from_checkpoint
    earlier = newest or (Path(named) if named else None)
    source = _load_base(recipe, sharded, folder) if recipe.lora.r or not earlier else ""
    fill_teacher(sharded, recipe)
    if earlier:  # check it before the reference is computed, which takes long
        state = check_checkpoint(earlier, sharded)
        loader.load_state_dict(state.loader)
        if state.step > job.steps:
            raise RecipeError(f"checkpoint {earlier} is at step {state.step}, the recipe ends at step {job.steps}")
    if not reference.read(sharded, folder, bool(newest), named):
        source = source or _load_base(recipe, sharded, folder)
        sharded.spread()
        loaded = time.perf_counter()
        reference.ask(sharded)
        if reference.stopped:
            return state, source
        began += time.perf_counter() - loaded
    if earlier:
        state, lost = load_checkpoint(earlier, sharded, optimizer)
        source = str(earlier) + (f" (begun anew: {lost})" if lost else "")
    sharded.spread()
    return state, f"{source}, {time.perf_counter() - began:.1f} s"


def _load_base(recipe: Recipe, sharded: ShardedModel, folder: Path) -> str:
    """Loads every parameter's initial value: from `folder` or random, adapters new or peft's. Returns the source."""
    is_random, seed = recipe.model.init == "random", recipe.train.seed
    if is_random:
        init_weights(sharded.masters, seed)
    else:
        init_weights(sharded.masters, seed, only=SCORE)
        load_weights(sharded.masters, folder)
    model: Any = sharded.model
    if recipe.lora.r:
        model.identity = weights_identity(recipe.model, seed, folder)
    init_adapters(model, seed)
    if recipe.lora.adapter:
        load_adapter(model, Path(recipe.lora.adapter).expanduser(), recipe.lora)
    return ("random" if is_random else str(folder)) + f" and {recipe.lora.adapter}" * bool(recipe.lora.adapter)
