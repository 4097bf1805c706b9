"""Saves a run every `train.save_steps` steps, at its end, and where it is asked to stop."""

from dataclasses import dataclass

import torch

from shardbook.parallel.sharding import ShardedModel
from shardbook.recipe import Train
from shardbook.run.checkpoint import TrainState, save_checkpoint
from shardbook.run.directory import RunDirectory
from shardbook.run.meter import Meter, is_due


@dataclass
class Saver:
    """Writes the checkpoints of a run that began at step `saved`. All ranks make the same calls."""

    run: RunDirectory
    train: Train
    sharded: ShardedModel
    optimizer: torch.optim.Optimizer
    meter: Meter
    saved: int

    def is_due(self, step: int) -> bool:
        return is_due(step, self.train.save_steps)

    def after(self, state: TrainState) -> None:
        """Saves after a step if due; before, `meter` raises where that step is not finite. Collective."""
        if self.is_due(state.step):
            with self.meter.paused():
                self._save(state)

    def finish(self, state: TrainState, stopped: bool) -> None:
        """Saves the last step, unless it is saved, where the recipe saves or the run was `stopped`. Collective."""
        if state.step > self.saved and (self.train.save_steps or stopped):
            self.meter.check()  # a step that was not logged was not checked yet
            self._save(state)

    def _save(self, state: TrainState) -> None:
        run, keep = self.run, self.train.save_total_limit
        save_checkpoint(run.checkpoints, self.sharded, self.optimizer, state, keep, run.check_held)
        self.saved = state.step
