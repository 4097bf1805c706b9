"""Turns OOM on a GPU into one line: the predicted and the measured bytes, and the smallest change that would fit."""

from contextlib import AbstractContextManager

import torch
from torch.optim import Optimizer

from shardbook.parallel.sharding import ShardedModel
from shardbook.plan.change import smallest_change
from shardbook.plan.hardware import ROOM
from shardbook.plan.peak import GB, predict_fullest
from shardbook.ranks.exits import RunFailed
from shardbook.run.metrics import memory_metrics, peak_metrics
from shardbook.run.prepare import Job

NONE_FITS = "No single change would fit; shardbook plan also tries parallel.tp_size, cp_size and pp_size"


class OomGuard(AbstractContextManager["OomGuard"]):
    """A context that raises RunFailed in place of torch.OutOfMemoryError; it can be entered again."""

    def __init__(self, job: Job, sharded: ShardedModel):
        self.job, self.sharded = job, sharded
        self.optimizer: Optimizer | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise RunFailed(self.explain(error)) from error

    def explain(self, error: torch.OutOfMemoryError) -> str:
        settings, has_gpu = (self.job.layout, self.job.config, self.job.recipe), torch.cuda.is_available()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if has_gpu else 0
        predicted, measured = predict_fullest(*settings), dict[str, float]()
        for name, count in (memory_metrics(self.sharded, self.optimizer) | peak_metrics()).items():
            measured[name.removeprefix("memory/").removesuffix("_bytes")] = count
        shown = ", ".join(f"{name} {count / GB:.1f}" for name, count in measured.items() if name != "alloc_retries")
        change = smallest_change(*settings, ROOM * total)
        return (
            f"out of memory: {str(error).splitlines()[0]} Predicted at the peak: {predicted}. Measured in GB: {shown}. "
            + (f"The smallest change that would fit: {change}" if change else NONE_FITS)
        )
