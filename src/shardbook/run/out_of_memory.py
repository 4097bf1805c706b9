"""Turns OOM into one line: the predicted and the measured bytes, and the smallest change that would fit."""

import re
from contextlib import AbstractContextManager

import torch
from torch.optim import Optimizer

from shardbook.parallel.sharding import ShardedModel
from shardbook.plan.hardware import HOST_ROOM, ROOM
from shardbook.plan.peak import GB, predict_fullest
from shardbook.plan.smallest_change import NONE_FITS, smallest_change
from shardbook.ranks.exits import RunFailed
from shardbook.ranks.machine import memory_bytes
from shardbook.run.log.memory import memory_metrics, peak_metrics
from shardbook.run.prepare import Job

ON_CPU = re.compile(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes")  # torch raises a RuntimeError there


class OomGuard(AbstractContextManager["OomGuard"]):
    """A context that raises RunFailed in place of torch.OutOfMemoryError, or of the CPU allocator's error; it can be
    entered again."""

    def __init__(self, job: Job, sharded: ShardedModel):
        self.job, self.sharded = job, sharded
        self.optimizer: Optimizer | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        on_cpu = ON_CPU.search(str(error)) if isinstance(error, RuntimeError) else None
        if isinstance(error, torch.OutOfMemoryError):
            raise RunFailed(self.explain(str(error).splitlines()[0])) from error
        if on_cpu or isinstance(error, MemoryError):
            asked = f" to a tensor of {int(on_cpu[1]) / GB:.1f} GB" if on_cpu else ""
            raise RunFailed(self.explain(f"the machine gives no more memory{asked}.")) from error

    def explain(self, error: str) -> str:
        settings, has_gpu = (self.job.layout, self.job.config, self.job.recipe), torch.cuda.is_available()
        if has_gpu:
            room = ROOM * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        else:
            room = HOST_ROOM * memory_bytes() / self.job.layout.ranks_per_node
        kept = memory_metrics(self.sharded, self.optimizer) | peak_metrics()
        measured = {name.removeprefix("memory/").removesuffix("_bytes"): count for name, count in kept.items()}
        shown = ", ".join(f"{name} {count / GB:.1f}" for name, count in measured.items() if name != "alloc_retries")
        if self.job.no_plan_reason:
            return f"out of memory: {error} Measured in GB: {shown}. Not predicted: {self.job.no_plan_reason}"
        change = smallest_change(*settings, room, has_more=has_gpu)
        return (
            f"out of memory: {error} Predicted at the peak: {predict_fullest(*settings)}. Measured in GB: {shown}. "
            + (f"The smallest change that would fit: {change}" if change else NONE_FITS.capitalize())
        )
