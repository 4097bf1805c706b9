"""Metrics: what a step was, written to metrics.jsonl and to the trackers, and the exact bytes that a rank keeps.

Invariant: a metric that was not measured is absent, never zero. A tracker may fail; the run may not: the file comes
first (trackers.py says the rest).
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardbook.parallel.sharding import ShardedModel
from shardbook.ranks.exits import RunFailed
from shardbook.recipe import Run
from shardbook.run.trackers import Trackers

Metrics = dict[str, float | int]

# Dense bf16 peak of a device, FLOP/s, by a part of its CUDA name; from NVIDIA's data sheets (without sparsity).
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}


class Recorder:
    """metrics.jsonl and the trackers of rank 0; on other ranks it does nothing."""

    def __init__(self, folder: Path, name: str, run: Run, config: dict[str, Any], is_main: bool, done_steps: int):
        self.file = None
        if not is_main:
            return
        path = folder / "metrics.jsonl"
        # A run that died after its last checkpoint repeats steps; dropping what it wrote of them keeps steps unique.
        lines = path.read_text().splitlines() if done_steps and path.exists() else []
        side = path.with_suffix(".partial")
        side.write_text("".join(line + "\n" for line in lines if _step_of(line) <= done_steps))
        side.replace(path)
        self.file = path.open("a")
        self.trackers = Trackers(folder, name, run, config)

    def log(self, step: int, metrics: Metrics) -> None:
        """Append one object. `step` 0 is before the first step."""
        if self.file is None:
            return
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.file.flush()
        self.trackers.log(step, metrics)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close the file and the trackers; a tracker learns whether the run failed."""
        if self.file is not None:
            self.file.close()
            self.trackers.finish(failed=error is not None)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:  # cut off by a kill in mid-line
        return float("inf")


def read_loss(loss: Tensor, norm: Tensor, step: int) -> Metrics:
    """Sum this rank's share of the loss over ranks and read it with the gradient norm: one host sync. Collective.

    Raises RunFailed where one is not finite: to train on would only save broken weights.
    """
    dist.all_reduce(loss)
    values = torch.stack([loss, norm]).tolist()
    if not all(map(math.isfinite, values)):
        raise RunFailed(
            f"step {step}: train/loss is {values[0]} and train/grad_norm {values[1]}; "
            "lower optim.learning_rate, or look at the rows of this step"
        )
    return {"train/loss": values[0], "train/grad_norm": values[1]}


def kept_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes that this rank keeps for `tensors`: its own shards, padding included, each storage once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def memory_metrics(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> Metrics:
    """Persistent bytes of this rank by category, and the GPU allocator's peak. Call it before gradients are freed.
    Residuals of error feedback are absent where there are none."""
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    measured: Metrics = {
        "memory/params_bytes": kept_bytes(sharded.model.parameters()),
        "memory/grads_bytes": kept_bytes(p.grad for p in sharded.model.parameters()),
        "memory/optimizer_bytes": kept_bytes(states),
    }
    if residual := kept_bytes(sharded.residuals.values()):
        measured["memory/residual_bytes"] = residual
    if torch.cuda.is_available():
        measured["memory/peak_bytes"] = torch.cuda.max_memory_allocated()
    return measured


def speed_metrics(seconds: float, steps: int, tokens: float, world_size: int, flops_per_token: float) -> Metrics:
    """Speed of `steps` steps that took `seconds`. `tokens`: of their rows on all ranks, trained or not, with padding.

    MFU only on a GPU with a known peak.
    """
    per_device = tokens / seconds / world_size
    measured: Metrics = {"perf/step_seconds": seconds / steps, "perf/tokens_per_second_per_device": per_device}
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if peak := next((flops for part, flops in PEAK_FLOPS.items() if part in name), None):
            measured["perf/mfu"] = per_device * flops_per_token / peak
    return measured
