"""Starts a run from its newest whole checkpoint, else from the one that the recipe names, else from pretrained or
random weights.

Invariant: all ranks start from the same checkpoint, whose bytes are verified. A line says each checkpoint that was
skipped as damaged, each part of the state that begins anew, and another implementation of attention.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardbook.model.adapter_files import load_adapter
from shardbook.model.adapters import init_adapters, weights_identity
from shardbook.model.file_buffers import load_buffers
from shardbook.model.weights import SCORE, init_weights, load_weights
from shardbook.parallel.sharding import ShardedModel
from shardbook.ranks.distributed import broadcast_from_main
from shardbook.recipe import Recipe, RecipeError
from shardbook.run.checkpoint.format import WAY_OUT, Damaged, TrainState, list_checkpoints
from shardbook.run.checkpoint.load import check_checkpoint, load_checkpoint, other_bits
from shardbook.run.checkpoint.save import kept_shapes
from shardbook.run.eval.reference import Reference
from shardbook.run.load_teacher import fill_teacher
from shardbook.run.prepare import Job
from shardbook.terminal import print_line

T = TypeVar("T")


def start_from(
    newest: Path | None, job: Job, sharded: ShardedModel, optimizer: torch.optim.Optimizer, reference: Reference
) -> tuple[TrainState, str]:
    """Loads model, optimizer, loader position and `reference`, unless that is stopped before. Returns the run's state,
    and the source of its weights for people. Collective.

    Raises RecipeError where the checkpoint is of another model, or further than the job's steps.
    """
    began, recipe, loader, folder = time.perf_counter(), job.recipe, job.loader, job.folder
    state = TrainState(step=0, tokens=0, loader=loader.state_dict())
    given = "" if newest else recipe.train.resume_from_checkpoint
    named = str(Path(given).expanduser()) if given else ""
    earlier = [newest] if newest else [Path(named)] if named else []  # to start from the first that is whole
    if newest and recipe.run.checkpoint_fallback:
        earlier = broadcast_from_main(lambda: list_checkpoints(newest.parent))
    source = load_base(recipe, sharded, folder) if recipe.lora.r or not earlier else ""
    if not source and recipe.model.init == "pretrained":
        load_buffers(sharded.masters, folder)
    fill_teacher(sharded, recipe)

    def check(path: Path) -> TrainState:
        stored, train_state = check_checkpoint(path, sharded)
        loader.load_state_dict(train_state.loader)
        if train_state.step > job.steps:
            where = f"checkpoint {path} is at step {train_state.step}, the recipe ends at step {job.steps}"
            raise RecipeError(f"{where}; raise train.steps")
        rows, stored_rows = loader.rows_per_step, train_state.loader["rows_per_step"]
        if not recipe.train.steps and stored_rows != rows:
            differ = f"checkpoint {path}: its steps have {stored_rows} rows, here they have {rows}"
            raise RecipeError(
                f"{differ}, so epochs are other steps; change train.gradient_accumulation_steps, or set train.steps"
            )
        if differs := other_bits(stored):
            print_line(f"warning  checkpoint {path}: {differs}")
        return train_state

    if earlier:  # check it before the reference is computed, which takes long
        state = _first_whole(earlier, check, named)
    if not reference.read(sharded, folder, bool(newest), named):
        source = source or load_base(recipe, sharded, folder)
        sharded.upload_shards()
        loaded = time.perf_counter()
        reference.compute(sharded)
        if reference.stopped:
            return state, source
        began += time.perf_counter() - loaded
    if earlier:
        first = earlier[0]
        state, lost = _first_whole(
            earlier, lambda path: load_checkpoint(path, sharded, optimizer, path == first), named
        )
        loader.load_state_dict(state.loader)
        if named:  # its log is another run's
            state = replace(state, log={})
        source = str(earlier[0])
        if lost:
            print_line(f"warning  begun anew: {lost}")
    sharded.upload_shards()
    return state, f"{source}, {time.perf_counter() - began:.1f} s"


def _first_whole(paths: list[Path], load: Callable[[Path], T], named: str) -> T:
    """Returns the result of `load` for the first of `paths` that is not damaged, and removes those before it from the
    list. All ranks meet the same error. Raises RecipeError where none is whole: the recipe `named` it, or it is one of
    the run's own."""
    went_back = False
    while True:
        try:
            return load(paths[0])
        except Damaged as error:
            reason = str(error).removesuffix(WAY_OUT)
            if not paths[1:]:
                if str(error) != reason and not (named or went_back):
                    raise
                way_out = "name another one" if named else "no other is whole: choose another run.name"
                raise RecipeError(f"{reason}; {way_out}") from None
            del paths[0]
            went_back = True
            print_line(f"warning  {reason}; went back to {paths[0].name}")


def load_base(recipe: Recipe, sharded: ShardedModel, folder: Path) -> str:
    """Loads every parameter's initial value: from `folder` or random, adapters new or peft's. Returns the source."""
    is_random, seed, shapes = recipe.model.init == "random", recipe.train.seed, sharded.layout.file_shapes
    if is_random:
        init_weights(sharded.masters, seed, file_shapes=shapes)
    else:
        init_weights(sharded.masters, seed, only=SCORE, file_shapes=shapes)
        load_weights(sharded.masters, folder, shapes)
    model: Any = sharded.model
    if recipe.lora.r:
        model.identity = weights_identity(recipe.model, seed, folder)
    init_adapters(model, seed)
    if recipe.lora.adapter:
        adapter = Path(recipe.lora.adapter).expanduser()
        load_adapter(model, adapter, recipe.lora, folder, kept_shapes(sharded.layout, model))
    return ("random" if is_random else str(folder)) + f" and {recipe.lora.adapter}" * bool(recipe.lora.adapter)
