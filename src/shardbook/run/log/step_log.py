"""The log of a step: its loss and norm, its time, memory and traffic, and the row that they become.

Invariant: a row is written one step late, on every device, once the host has its numbers: it waits only for the step
before the one that it has launched. The first number that is not finite ends the run there, with its own step, its
ranks and rows, before anything later is saved. A metric that was not measured is absent.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.arithmetic import is_due
from shardbook.comm.ledger import Ledger, Traffic, warmup_steps
from shardbook.data.loader import MicroBatch
from shardbook.gpus import gpu_of
from shardbook.model.flops import Flops
from shardbook.parallel.sharding import ShardedModel
from shardbook.plan.block_traffic import read_inside
from shardbook.plan.formulas import predict_traffic
from shardbook.ranks.distributed import Ranks
from shardbook.ranks.exits import RunFailed
from shardbook.ranks.signals import StopFlag
from shardbook.recipe import flatten_recipe
from shardbook.run.checkpoint.format import TrainState
from shardbook.run.directory import RunDirectory
from shardbook.run.log.console import Console
from shardbook.run.log.memory import memory_metrics, peak_metrics
from shardbook.run.log.recorder import Metrics, Recorder
from shardbook.run.log.trackers import flat_config
from shardbook.run.prefetch import StepBatch
from shardbook.run.prepare import Job

LAST_SECONDS = 10.0  # for which a failing run waits for its last row: with a lost rank it would wait for ever
LOSS, NORM = "train/loss", "train/grad_norm"


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


@dataclass
class StepTimer:
    """The time, the tokens and the pairs of tokens of the steps since `began`.

    The time leaves out only evaluations, samples and checkpoints (`paused`); the cost of logging is part of it.
    """

    began: DeviceEvent = field(default_factory=DeviceEvent)
    paused_seconds: float = 0.0
    loader_wait_seconds: float = 0.0
    steps: int = 0
    tokens: float = 0.0  # of rows on all ranks, trained or not, with padding
    pairs: float = 0.0  # see MicroBatch

    def add(self, batch: StepBatch) -> None:
        """Begins the step of a `batch`."""
        tokens, pairs = batch.work
        self.steps, self.tokens, self.pairs = self.steps + 1, self.tokens + tokens, self.pairs + pairs
        self.loader_wait_seconds += batch.waited_seconds

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

    def speed(self, ended: DeviceEvent, flops: Flops, world_size: int) -> Metrics:
        """Returns the speed of the steps, the last of which has `ended` on the device, and their MFU where the GPU's
        peak FLOPs are known."""
        seconds = ended.since(self.began) - self.paused_seconds
        metrics: Metrics = {
            "perf/step_seconds": seconds / self.steps,
            "perf/tokens_per_second_per_device": self.tokens / seconds / world_size,
        }
        if torch.cuda.is_available() and (gpu := gpu_of(torch.cuda.get_device_name())):
            metrics["perf/mfu"] = flops.of(self.tokens, self.pairs) / seconds / world_size / gpu.flops
        metrics["perf/loader_wait_seconds"] = self.loader_wait_seconds / self.steps
        return metrics


@dataclass
class Pending:
    """A step whose row is not written. `values`: of all ranks, the loss, other terms and the norm of gradients;
    `losses`: of this rank's micro-batches; both under way to the host until `done`."""

    step: int
    values: list[Tensor]
    losses: list[Tensor]
    done: DeviceEvent
    row: Metrics  # what is known of it already; empty where the step is not logged
    timer: StepTimer | None = None  # of this step and those since the last logged one; None where it is not logged
    chosen: Tensor | None = None  # of a logged step: the tokens of all ranks that chose each expert


class NotFinite(RunFailed):
    """The error of a step with a number that is not finite (NaN or infinity). All ranks raise it at the same place."""


class StepLog(contextlib.AbstractContextManager["StepLog"]):
    """Measures the steps inside and writes their rows. All ranks make the same calls: `begin` a step, `end` it."""

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer,
        state: TrainState,
        ranks: Ranks,
        console: Console,
        stop: StopFlag,
    ):
        self.job, self.sharded, self.optimizer, self.ranks = job, sharded, optimizer, ranks
        self.console, self.stop = console, stop
        recipe, layout = job.recipe, job.layout
        tracked = flat_config(flatten_recipe(recipe) | {"world_size": ranks.world_size}, layout.mesh)
        self.recorder = Recorder(
            run.path, run.name, recipe.run, tracked, ranks.is_main, state.step, state.log.get("metrics", 0)
        )
        self.warmup_steps = warmup_steps(recipe.train.compile, layout.mesh)
        self.ledger = Ledger(layout.groups(ranks.rank))
        self.predicted: Traffic = {}
        self.first_micros: list[MicroBatch] = []
        self.timer, self.steps_begun, self._memory = StepTimer(), 0, Metrics()
        self.step_before = state.step
        self.rows_before = job.loader.consumed_rows - state.step * job.loader.rows_per_step
        # before the first step it has no numbers, and is written where an evaluation adds some
        self.pending: Pending | None = Pending(state.step, [], [], DeviceEvent(), {})
        self._contexts = contextlib.ExitStack()

    def begin(self, batch: StepBatch) -> None:
        """Begins a step. Of the first the ledger counts all collectives: later ones send the same."""
        if not self.steps_begun:
            self.first_micros = batch.micros
            self.sharded.note_routing()
            self.ledger.open()
            self.timer = StepTimer()
        if self.steps_begun == self.warmup_steps and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # weights are loaded and code is compiled: no step's peak
        self.steps_begun += 1
        self.timer.add(batch)

    def end(self, state: TrainState, terms: list[Tensor], norm: Tensor, rate: float) -> None:
        """Ends a step, of which `run_step` returned `terms`, with the `norm` of its gradients and its learning `rate`:
        sends its numbers to the host, and writes the row of the step before. Call it before gradients are freed, whose
        bytes are measured, and once choices of experts are summed. Raises NotFinite where that step has a number that
        is not finite. Collective."""
        load, is_logged = self.sharded.expert_load, is_due(state.step, self.job.recipe.train.logging_steps)
        if self.ledger.close():
            self.predicted = self._predict_traffic()
            self.console.show_traffic(self.ledger.traffic, self.predicted)
        objective, layout = self.job.objective, self.job.layout
        sums = objective.add_up(terms, self.ranks.device) / layout.term_copies(objective.sequences)
        dist.all_reduce(sums)
        # a pipeline stage without a loss returns a zero for each of its chunks
        losses = [of_micro[:1] for of_micro in terms if of_micro.ndim]
        values, losses = _send_to_host([sums, norm.view(1)]), _send_to_host([torch.cat(losses)] if losses else [])
        chosen = _send_to_host([load.counts])[0] if load and load.counts is not None and is_logged else None
        pending = Pending(state.step, values, losses, DeviceEvent(), {}, chosen=chosen)
        if is_logged:
            pending.row, pending.timer = self._measure(state, rate), self.timer
            self.timer = StepTimer(began=pending.done)
        self.finish_last()
        self.pending = pending

    def _predict_traffic(self) -> Traffic:
        """Returns the traffic of the step that the ledger has counted."""
        recipe, layout, rank = self.job.recipe, self.job.layout, self.ranks.rank
        micros, self.first_micros = self.first_micros, []
        inside = read_inside(layout, self.job.config, recipe, rank, lambda: micros, self.sharded.take_routing())
        how = recipe.train.gradient_accumulation_steps, recipe.optim.name, recipe.forwards_per_micro, rank
        return predict_traffic(layout, *how, inside)

    def _measure(self, state: TrainState, rate: float) -> Metrics:
        """Returns what is known of a logged step without the device."""
        self._memory = self._memory or memory_metrics(self.sharded, self.optimizer)  # the same in every step
        sent = self.ledger.take_metrics(self.ranks.ranks_per_node, self.predicted, self.job.forecast)
        known: Metrics = {"train/learning_rate": rate, "train/tokens": state.tokens}
        return known | self._memory | peak_metrics() | self.sharded.take_metrics() | sent

    def finish_last(self) -> None:
        """Writes and shows the row of the last step, unless it is written. Raises NotFinite where the step has a number
        that is not finite, on all ranks alike: the sums are the same. Waits for that step; collective where it
        raises."""
        if self.pending:
            pending, self.pending = self.pending, None
            self._write(pending, gathers=True)

    def _write(self, pending: Pending, gathers: bool) -> None:
        pending.done.wait()
        numbers, row = self._check(pending, gathers), pending.row
        if pending.timer:  # else the row has only what an evaluation added
            if self.sharded.expert_load and pending.chosen is not None:
                row |= self.sharded.expert_load.metrics("train", pending.chosen)
            row = numbers | row | pending.timer.speed(pending.done, self.job.flops, self.ranks.world_size)
        if row:
            self.recorder.log(pending.step, row)
        self.console.show_step(pending.step, row)

    def _check(self, pending: Pending, gathers: bool) -> Metrics:
        """Returns the numbers that all ranks have of a step, by name. Raises NotFinite where one is not finite. Asks
        the other ranks for its rows where it `gathers`."""
        numbers = [number for tensor in pending.values for number in tensor.tolist()]
        if not numbers:
            return {}
        row: Metrics = dict(zip([*self.job.objective.names("train"), NORM], numbers, strict=True))
        if broken := [name for name, value in row.items() if not math.isfinite(value)]:
            is_usual = LOSS in broken or NORM in broken
            what = f"{broken[0]} is {row[broken[0]]}"
            rows = "[preference], [distill] and its rows"
            if is_usual:
                what = f"{LOSS} is {row[LOSS]:g} and {NORM} {row[NORM]:g}"
                rows = self._locate(pending, gathers)
            if pending.step - 1 == self.step_before > 0:  # else each start from there would end so
                rows += (
                    f". It is the first step from the checkpoint of step {self.step_before}: where that is spoilt "
                    "already, begin another run.name with train.resume_from_checkpoint of an older one"
                )
            raise NotFinite(f"step {pending.step}: {what}; lower optim.learning_rate, or look at {rows}")
        return row

    def _locate(self, pending: Pending, gathers: bool) -> str:
        """Returns a line that names the ranks whose losses are not finite in a step, and their rows; else all rows."""
        loader, losses = self.job.loader, [loss for tensor in pending.losses for loss in tensor.tolist()]
        first = self.rows_before + (pending.step - 1) * loader.rows_per_step
        broken = [micro for micro, loss in enumerate(losses) if not math.isfinite(loss)]
        rows = ", ".join(loader.name_rows(first, micro) for micro in broken)
        of_ranks = {self.ranks.rank: rows}
        if gathers:
            gathered = [""] * self.ranks.world_size
            dist.all_gather_object(gathered, rows)
            of_ranks = dict(enumerate(gathered))
        if named := [f"rank {rank}: {rows}" for rank, rows in of_ranks.items() if rows]:
            return "; ".join(named[:3]) + f"; and {len(named) - 3} more ranks" * (len(named) > 3)
        rows = f"rows {first} to {first + loader.rows_per_step - 1} of the run"
        return f"{rows}: every loss is finite, so it arose in backward"

    def add(self, evaluate: Callable[[], Metrics]) -> None:
        """Adds what `evaluate` returns, outside of steps' time, to the row of the last step, and writes that. Raises as
        `finish_last`, before it evaluates. Collective."""
        assert self.pending, "the row of the last step is written already"
        self.pending.done.wait()
        self._check(self.pending, gathers=True)
        with self._outside_of_steps():
            self.pending.row |= evaluate()
        self.finish_last()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Writes the row of the last step before samples or a save, and leaves the body out of steps' time."""
        self.finish_last()
        with self._outside_of_steps():
            yield

    @contextlib.contextmanager
    def _outside_of_steps(self) -> Iterator[None]:
        with self.timer.paused():
            yield
        self.stop.check_before_next_step = True  # a signal that arrived meanwhile ends the run after it

    def mark(self) -> dict[str, int]:
        """Returns the part of a checkpoint that belongs to the log: the bytes of metrics.jsonl, which are on the disk
        then."""
        return {"metrics": self.recorder.sync()}

    def __enter__(self) -> "StepLog":
        self._contexts.enter_context(self.recorder)
        self._contexts.push(self._write_last)
        self._contexts.enter_context(self.ledger)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._contexts.__exit__(kind, error, None)

    def _write_last(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Writes the last row; of a failing run too, if the device computes it within LAST_SECONDS."""
        if error is None:
            self.finish_last()
        elif pending := self.pending:
            with contextlib.suppress(Exception):  # the run ends by its own error, also where the device is broken
                until = time.perf_counter() + LAST_SECONDS
                while not pending.done.has_come() and time.perf_counter() < until:
                    time.sleep(0.01)
                if pending.done.has_come():
                    self._write(pending, gathers=False)  # the other ranks may have ended


def _send_to_host(tensors: list[Tensor]) -> list[Tensor]:
    """Returns `tensors` on the host, where their values are when the device has done what was launched until now: torch
    takes pinned memory for such a copy by itself; a tensor on the host is not copied."""
    return [tensor.to("cpu", non_blocking=True) for tensor in tensors]
