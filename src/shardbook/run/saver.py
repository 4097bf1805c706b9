"""Saves a run every `train.save_steps` steps, at its end, and where it is asked to stop."""

import shutil
from dataclasses import dataclass, replace

import torch

from shardbook.memory.host_state import available_memory
from shardbook.optim.table import OPTIMIZERS
from shardbook.parallel.sharding import ShardedModel
from shardbook.ranks.distributed import broadcast_from_main, sum_over_ranks
from shardbook.recipe import RecipeError, Train
from shardbook.run.background import Background
from shardbook.run.checkpoint import TrainState, save_checkpoint, whole_shapes
from shardbook.run.directory import RunDirectory
from shardbook.run.meter import Meter, is_due
from shardbook.run.stored_items import in_gb, list_checkpoints


@dataclass
class Saver:
    """Writes the checkpoints of a run that began at step `saved`, in a thread where `behind`. All ranks make the same
    calls."""

    run: RunDirectory
    train: Train
    sharded: ShardedModel
    optimizer: torch.optim.Optimizer
    meter: Meter
    saved: int
    optimizer_name: str
    behind: bool

    def __post_init__(self) -> None:
        """Raises RecipeError where the disk has no room for two checkpoints. Collective."""
        if self.train.save_steps:
            broadcast_from_main(self._check_room)
        self.background = Background() if self.behind and self.train.save_steps and self._has_memory() else None
        if self.background:  # (an offloaded one changes in backward: it is copied at once)
            self.optimizer.register_step_pre_hook(self.background.wait_copied)

    def _has_memory(self) -> bool:
        """Returns whether every node has memory for a copy of what its ranks save, and says where one has not: there
        only what was asked for is tried. Collective."""
        ranks = self.meter.ranks
        needed = predict_bytes(self.sharded, self.optimizer_name) * ranks.ranks_per_node / ranks.world_size
        lacks = self.train.async_save == "auto" and available_memory() < needed
        if not sum_over_ranks(lacks)[0]:
            return True
        if ranks.is_main:
            said = f"no memory for a copy of what a node saves ({in_gb(int(needed))}): steps wait for checkpoints"
            print(f"warning  train.async_save = 'auto': {said}", flush=True)
        return False

    def _check_room(self) -> None:
        """Looks at the disk, as rank 0: there must be one checkpoint to go back to beside the one that is written."""
        if self.train.save_total_limit == 1:
            said = "a damaged checkpoint leaves none to go back to; set it to 2"
            print(f"warning  train.save_total_limit = 1: {said}", flush=True)
        each = predict_bytes(self.sharded, self.optimizer_name)
        count = max(1, 2 - len(list_checkpoints(self.run.checkpoints)))
        if (free := shutil.disk_usage(self.run.path).free) < count * each:
            raise RecipeError(
                f"run directory {self.run.path}: {in_gb(free)} are free there, and {count} checkpoints of "
                f"{in_gb(each)} will be written; free some, set run.dir to another disk, or train.save_steps=0"
            )

    def is_due(self, step: int) -> bool:
        return is_due(step, self.train.save_steps)

    def after(self, state: TrainState) -> None:
        """Saves after a step if due; before, `meter` raises where that step is not finite. Collective."""
        if self.is_due(state.step):
            with self.meter.paused():
                self._save(state, self.background)

    def say(self) -> list[float]:
        """Returns flags to sum over ranks with the next step's counts; `hear` takes the sums."""
        return self.background.say() if self.background else []

    def hear(self, told: list[float]) -> None:
        if self.background:
            self.background.hear(told)

    def finish(self, state: TrainState, stopped: bool) -> None:
        """Saves the last step, unless it is saved, where the recipe saves or the run was `stopped`. Collective."""
        if self.background:
            self.background.finish()
            self.saved = max(self.saved, self.background.published)
        if state.step > self.saved and (self.train.save_steps or stopped):
            self.meter.check()  # a step that was not logged was not checked yet
            self._save(state)

    def _save(self, state: TrainState, background: Background | None = None) -> None:
        run, keep = self.run, self.train.save_total_limit
        state = replace(state, log=self.meter.mark())
        if background:
            background.finish()  # the one before: its buffer is taken again
        save_checkpoint(run.checkpoints, self.sharded, self.optimizer, state, keep, run.check_held, background)
        self.saved = self.saved if background else state.step


def predict_bytes(sharded: ShardedModel, optimizer_name: str) -> int:
    """Returns the bytes of a checkpoint's parameters and optimizer state, of all ranks; Muon's matrices take less."""
    row, itemsize = OPTIMIZERS[optimizer_name], next(sharded.masters.parameters()).element_size()
    counts = [torch.Size(shape).numel() for shape in whole_shapes(sharded.masters).values()]
    return sum(count * itemsize + row.state_bytes(count, itemsize) for count in counts)
