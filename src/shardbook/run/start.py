"""Where a run starts: this run's newest checkpoint, else the one that the recipe names, else pretrained weights, else
random ones.
"""

import time
from pathlib import Path

import torch

from shardbook.data.loader import Loader
from shardbook.model.weights import init_weights, load_weights
from shardbook.parallel.sharding import ShardedModel
from shardbook.recipe import Recipe, RecipeError
from shardbook.run.checkpoint import TrainState, load_checkpoint


def start_from(
    newest: Path | None,
    recipe: Recipe,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    folder: Path,
    steps: int,
) -> tuple[TrainState, str]:
    """Fill model, optimizer and loader. Returns where the run stands, and from where, for people. Collective.

    Raises RecipeError where the checkpoint is of another model, or further than `steps`.
    """
    began = time.perf_counter()
    state = TrainState(step=0, tokens=0, loader=loader.state_dict())
    if newest or recipe.train.resume_from_checkpoint:
        source = str(newest or recipe.train.resume_from_checkpoint)
        state, lost = load_checkpoint(Path(source), sharded, optimizer)
        loader.load_state_dict(state.loader)
        if state.step > steps:
            raise RecipeError(f"checkpoint {source} is at step {state.step}, the recipe ends at step {steps}")
        source += f" (begun anew: {lost})" if lost else ""
    elif recipe.model.init == "pretrained":
        source = str(folder)
        load_weights(sharded.masters, folder)
    else:
        source = "random"
        init_weights(sharded.masters, recipe.train.seed)
    sharded.spread()
    return state, f"{source}, {time.perf_counter() - began:.1f} s"
