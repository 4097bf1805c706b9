"""Metrics: writes each step's to metrics.jsonl and the trackers, and measures steps' time and resident bytes.

Invariant: a metric that was not measured is absent, never zero. A tracker may fail (trackers.py): the file comes first.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardbook.gpus import gpu_of
from shardbook.model.causal_lm import Flops
from shardbook.optim.elementwise import parts_of
from shardbook.parallel.sharding import ShardedModel
from shardbook.paths import naming, write_whole
from shardbook.recipe import RecipeError, Run, first_line
from shardbook.run.trackers import Trackers
from shardbook.terminal import print_line

Metrics = dict[str, float | int]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines, without a last one that a kill tore. Raises RecipeError where another
    one is damaged."""
    whole, newline, _ = path.read_bytes().rpartition(b"\n")
    rows = []
    for number, line in enumerate(whole.split(b"\n") if newline else (), 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise RecipeError(f"{path}: row {number} is damaged ({first_line(error)})") from None
    return rows


class Recorder(contextlib.AbstractContextManager["Recorder"]):
    """Writes metrics.jsonl, samples.jsonl and the trackers on rank 0; on other ranks it does nothing."""

    def __init__(
        self,
        folder: Path,
        name: str,
        run: Run,
        config: dict[str, Any],
        is_main: bool,
        done_steps: int,
        saved_bytes: int = 0,
    ):
        """Takes `saved_bytes`, the length of the file when `done_steps` were saved; a shorter one is said."""
        self.file, self.path = None, folder / "metrics.jsonl"
        if not is_main:
            return
        path, self.samples = self.path, folder / "samples.jsonl"
        kept = dict[Path, list[str]]()
        for each in [path, *[self.samples] * self.samples.exists()]:
            # A run that died after its last checkpoint repeats steps: their old lines go, so that steps stay unique.
            # not splitlines: a sample may contain Unicode's other line ends. The last line may end inside a character
            lines = each.read_text(errors="replace").split("\n")[:-1] if done_steps and each.exists() else []
            kept[each] = [line for line in lines if _step_of(line) <= done_steps]
            write_whole(each, "".join(line + "\n" for line in kept[each]))
        if (there := path.stat().st_size) < saved_bytes:
            lost = f"{saved_bytes - there:,} of {saved_bytes:,} bytes are gone since step {done_steps} was saved"
            print_line(f"{path}: {lost}; rows of steps before that are absent")
        self.file = path.open("a")
        self.trackers = Trackers(folder, name, run, config)
        self.trackers.log_again([json.loads(line) for line in kept[path]])

    def log(self, step: int, metrics: Metrics) -> None:
        """Appends one object. `step` 0 is before the first step."""
        if self.file is None:
            return
        with naming(self.path):
            self.file.write(json.dumps({"step": step, **metrics}) + "\n")
            self.file.flush()
        self.trackers.log(step, metrics)

    def sync(self) -> int:
        """Makes the rows durable: none is lost that a checkpoint has. Returns the file's bytes; 0 on other ranks."""
        if self.file is None:
            return 0
        with self.path.open("rb") as file:  # its own is closed when the last step is saved
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

    def log_samples(self, samples: list[dict[str, Any]]) -> None:
        """Appends one object for each sample: `step`, `prompt`, `completion`, and its length in `tokens`."""
        if self.file is None:
            return
        with naming(self.samples), self.samples.open("a") as file:
            file.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        self.trackers.log_samples(samples)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Closes the file and the trackers, and passes on to trackers whether the run failed."""
        if self.file is not None:
            with naming(self.path):
                self.file.close()
            self.trackers.finish(failed=error is not None)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:  # cut off by a kill in mid-line
        return float("inf")


def kept_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Returns the resident bytes of `tensors` on this rank: of its own shards, padding included, each storage once."""
    storages = {}
    for tensor in tensors:
        for part in parts_of(tensor) if tensor is not None else ():
            storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())


def memory_metrics(sharded: ShardedModel, optimizer: torch.optim.Optimizer | None) -> Metrics:
    """Returns the persistent bytes of this rank by category, the same in every step. Call it before gradients are
    freed."""
    kept = optimizer.state.values() if optimizer and not sharded.offloaded else ()
    states = [value for state in kept for value in state.values() if isinstance(value, Tensor)]
    measured: Metrics = {
        "memory/params_bytes": kept_bytes(sharded.model.parameters()),
        "memory/grads_bytes": kept_bytes(p.grad for p in sharded.model.parameters()),
        "memory/optimizer_bytes": kept_bytes(states),
    }
    if sharded.offloaded:
        measured |= {f"memory/{where}_bytes": count for where, count in sharded.offloaded.bytes().items()}
    return measured


def peak_metrics() -> Metrics:
    """Returns the peaks of the GPU's allocator since the last call, over steps alone: evaluations and checkpoints are
    left out, as they are of the time. Empty on a CPU."""
    if not torch.cuda.is_available():
        return {}
    peaks: Metrics = {
        "memory/peak_bytes": torch.cuda.max_memory_allocated(),
        "memory/reserved_peak_bytes": torch.cuda.max_memory_reserved(),
        # a retry returned cached blocks to the device and waited for it: too little memory, or fragmentation
        "memory/alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }
    torch.cuda.reset_peak_memory_stats()
    return peaks


class DeviceEvent:
    """The moment at which the device has done all work launched so far. On a CPU that is now."""

    def __init__(self) -> None:
        self.seconds, self.event = time.perf_counter(), None
        if torch.cuda.is_available():
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def has_come(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        if self.event:
            self.event.synchronize()

    def since(self, earlier: "DeviceEvent") -> float:
        """Returns the seconds since an `earlier` moment. Both must have come."""
        if self.event and earlier.event:
            return float(earlier.event.elapsed_time(self.event)) / 1000
        return self.seconds - earlier.seconds


class StepTimer:
    """The timer of steps: sums their time, tokens and pairs of tokens since the last `take`.

    The time leaves out only evaluations, samples and checkpoints (`paused`); the cost of logging is part of it.
    """

    def __init__(self, world_size: int, flops: Flops, first_steps: int = 1):
        """Takes `first_steps`, the number of steps that compile: their memory is in no step's peak."""
        self.world_size, self.flops, self.first_steps = world_size, flops, first_steps
        self.steps_before = 0
        self.begin()

    def begin(self) -> None:
        """Starts the time and counts anew."""
        self.began, self.paused_seconds = DeviceEvent(), 0.0
        self.steps, self.tokens, self.pairs = 0, 0.0, 0.0

    def add(self, tokens: float, pairs: float) -> None:
        """Begins a step. `tokens`: of its rows on all ranks, trained or not, with padding; `pairs`: see MicroBatch."""
        if self.steps_before == self.first_steps and torch.cuda.is_available():  # weights are loaded, code is compiled
            torch.cuda.reset_peak_memory_stats()
        self.steps_before += 1
        self.steps, self.tokens, self.pairs = self.steps + 1, self.tokens + tokens, self.pairs + pairs

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the body out of steps' time and of the device's memory peak."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # work of the steps still counts as theirs
        began = time.perf_counter()
        yield
        self.paused_seconds += time.perf_counter() - began
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def take(self) -> Callable[[], Metrics]:
        """Returns a function that gives the speed of the steps since the last `take`, and their MFU where the GPU's
        peak FLOPs are known. It waits until the device has done these steps."""
        began, paused, steps, tokens, pairs = self.began, self.paused_seconds, self.steps, self.tokens, self.pairs
        self.begin()
        ended = self.began

        def measured() -> Metrics:
            ended.wait()
            seconds = ended.since(began) - paused
            metrics: Metrics = {
                "perf/step_seconds": seconds / steps,
                "perf/tokens_per_second_per_device": tokens / seconds / self.world_size,
            }
            if torch.cuda.is_available() and (gpu := gpu_of(torch.cuda.get_device_name())):
                metrics["perf/mfu"] = self.flops.of(tokens, pairs) / seconds / self.world_size / gpu.flops
            return metrics

        return measured
