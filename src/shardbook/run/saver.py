"""Saves a run every `train.save_steps` steps, at its end, and where it is asked to stop."""

from dataclasses import dataclass, replace
from math import prod

import torch

from shardbook.arithmetic import is_due
from shardbook.memory.host_state import available_memory
from shardbook.optim.table import OPTIMIZERS
from shardbook.parallel.sharding import ShardedModel
from shardbook.plan.formulas import predict_copied
from shardbook.ranks.distributed import sum_over_ranks
from shardbook.ranks.exits import RunFailed
from shardbook.run.background import Background
from shardbook.run.checkpoint import TrainState, save_checkpoint, whole_shapes
from shardbook.run.directory import RunDirectory
from shardbook.run.log.step_log import StepLog
from shardbook.run.prepare import Job
from shardbook.run.stored_items import in_gb
from shardbook.terminal import print_line


@dataclass
class Saver:
    """Writes the checkpoints of a run that began at step `saved`. All ranks make the same calls."""

    run: RunDirectory
    job: Job
    sharded: ShardedModel
    optimizer: torch.optim.Optimizer
    log: StepLog
    saved: int

    def __post_init__(self) -> None:
        self.train = self.job.recipe.train
        self.background = None
        if not self.train.save_steps:
            return
        copied = predict_copied(self.job.layout, self.log.ranks.rank, self.job.recipe.optim.name)
        next_due = (self.saved // self.train.save_steps + 1) * self.train.save_steps
        if next_due <= self.job.steps and self.job.recipe.saves_behind and self._has_memory(copied):
            device, waits = next(self.sharded.masters.parameters()).device, self.train.async_save == "wait"
            self.background = Background(copied, device, waits)
            self.optimizer.register_step_pre_hook(self.background.wait_copied)  # (an offloaded one is copied at once)

    def _has_memory(self, copied: int) -> bool:
        """Returns whether every node has memory for what its ranks save, `copied` bytes each, and says where one has
        not: there only what was asked for is tried. Collective."""
        needed = copied * self.log.ranks.ranks_per_node
        lacks = self.train.async_save == "auto" and available_memory() < needed
        if not sum_over_ranks(lacks)[0]:
            return True
        reason = f"no memory for a copy of what a node saves ({in_gb(needed)}): steps wait for checkpoints"
        print_line(f"warning  train.async_save = 'auto': {reason}")
        return False

    def is_due(self, step: int) -> bool:
        return is_due(step, self.train.save_steps)

    def after(self, state: TrainState) -> None:
        """Saves after a step if due; before, `log` raises where that step is not finite. Collective."""
        if self.is_due(state.step):
            with self.log.paused():
                self._save(state, self.background)

    def flags(self) -> list[float]:
        """Returns flags to sum over ranks beside the next step; `take_flag_sums` takes the sums."""
        return self.background.flags() if self.background else [0.0, 0.0, 0.0]

    def take_flag_sums(self, sums: list[float]) -> None:
        if self.background:
            self.background.take_flag_sums(sums)

    def finish(self, state: TrainState, stopped: bool) -> None:
        """Saves the last step, unless it is saved, where the recipe saves or the run was `stopped`. Collective."""
        if self.background:
            self.background.finish()
            self.saved = max(self.saved, self.background.published)
        if state.step > self.saved and (self.train.save_steps or stopped):
            self._save(state)

    def _save(self, state: TrainState, background: Background | None = None) -> None:
        run, keep = self.run, self.train.save_total_limit
        state = replace(state, log=self.log.mark())
        if background:
            background.finish()  # the one before: its buffer is taken again
        try:
            save_checkpoint(run.checkpoints, self.sharded, self.optimizer, state, keep, run.check_held, background)
        except RunFailed as error:
            if not (background and error.__cause__):  # without a cause of the disk's no other try helps
                raise
            background.fail(str(error), self.log.ranks.is_main)
        self.saved = self.saved if background else state.step


def predict_bytes(job: Job) -> int:
    """Returns the bytes of a checkpoint's parameters and optimizer state, of all ranks; Muon's matrices take
    less. 0 where a run saves nothing."""
    if not job.recipe.train.save_steps:
        return 0
    row, itemsize = OPTIMIZERS[job.recipe.optim.name], job.layout.dtype("master").itemsize
    counts = [prod(shape) for shape in whole_shapes(job.model).values()]
    return sum(count * itemsize + row.state_bytes(count, itemsize) for count in counts)
