"""The meter: measures each step, from its first collective to its line in metrics.jsonl.

Invariant: nothing here makes the host wait for a GPU inside a step, and a metric that was not measured is absent. In a
step: `begin`, then `finish` before its gradients are freed, since it counts their bytes; then `log`.
"""

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from shardbook.comm.ledger import Ledger, first_steps
from shardbook.data.loader import MicroBatch
from shardbook.parallel.pipeline import LossFunction
from shardbook.parallel.sharding import ShardedModel
from shardbook.plan.axes import read_inside
from shardbook.plan.formulas import predict_traffic
from shardbook.ranks.distributed import Ranks
from shardbook.ranks.signals import StopFlag
from shardbook.recipe import flatten_recipe
from shardbook.run.checkpoint.format import TrainState
from shardbook.run.console import Console
from shardbook.run.directory import RunDirectory
from shardbook.run.metrics import Metrics, Recorder, StepTimer, memory_metrics, peak_metrics
from shardbook.run.nonfinite import FirstNonFinite
from shardbook.run.prepare import Job
from shardbook.run.repeat import check_results
from shardbook.run.rows import RowPart, Rows
from shardbook.run.trackers import flat_config


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class Meter(contextlib.AbstractContextManager["Meter"]):
    """Measures, reads and logs the steps inside. All ranks make the same calls."""

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
        self.job, self.sharded, self.optimizer, self.ranks, self.console = job, sharded, optimizer, ranks, console
        recipe, layout = job.recipe, job.layout
        tracked = flat_config(flatten_recipe(recipe) | {"world_size": ranks.world_size}, layout.mesh)
        self.recorder = Recorder(
            run.path, run.name, recipe.run, tracked, ranks.is_main, state.step, state.log.get("metrics", 0)
        )
        self.first_steps = first_steps(recipe.train.compile, layout.mesh)
        self.pace = StepTimer(ranks.world_size, job.flops, self.first_steps)
        self.nonfinite = FirstNonFinite(job.loader, state.step, ranks.device)
        self.rows = Rows(self.recorder, console, job.objective.names("train"), self.pace, stop, self.nonfinite)
        self.ledger = Ledger(layout.groups(ranks.rank))
        inside = read_inside(layout, job.config, recipe, ranks.rank, job.loader.peek)
        how = recipe.train.gradient_accumulation_steps, recipe.optim.name, recipe.forwards_per_micro, ranks.rank
        self.predicted = predict_traffic(layout, *how, inside)
        self.paused = self.rows.paused
        self._row, self._kept = list[RowPart](), Metrics()
        self._open = contextlib.ExitStack()

    def start(self, take_wait: Callable[[], Metrics]) -> None:
        """Begins to time steps, and to count the first one's collectives: the others send the same. `take_wait`:
        returns the metric of the seconds that a step waited for its rows."""
        self._take_wait = take_wait
        self.ledger.open()
        self.pace.begin()

    def begin(self, work: Iterable[float]) -> None:
        """Begins a step with its `work` on all ranks: tokens of rows, and pairs of tokens."""
        self.pace.add(*work)

    def check_results(self, step: int, micro: MicroBatch, loss_function: LossFunction) -> None:
        """Runs a micro-batch twice where `train.check_steps` asks for it. Raises RunFailed, on all ranks, where a rank
        computed other bits. Not while the ledger counts. Collective."""
        if is_due(step, self.job.recipe.train.check_steps) and not self.ledger.is_open:
            check_results(step, self.sharded, micro, loss_function, self.ranks)

    def finish(self, state: TrainState, terms: list[Tensor], norm: Tensor, rate: float, saves: bool) -> None:
        """Finishes a step, of which `run_step` returned `terms`, at the learning `rate`, and remembers it where its
        `norm` is the first that is not finite. Where it is logged or saved, or is the last, begins to read its loss and
        norm: on a GPU while the next step computes. Collective."""
        if self.ledger.close():
            self.console.show_traffic(self.ledger.traffic, self.predicted)
        self.nonfinite.note(state.step, norm, terms)
        logs = is_due(state.step, self.job.recipe.train.logging_steps)
        self._last = state.step, terms, norm
        if logs or saves or state.step == self.job.steps:
            measured = self._read_last()
        if logs:
            if not self._kept.get("memory/optimizer_bytes"):  # else the same in every step
                self._kept = memory_metrics(self.sharded, self.optimizer)
            known = {"train/learning_rate": rate, "train/tokens": state.tokens}
            self._row = [measured, known, self.pace.take(), self._kept, peak_metrics(), self._take_wait()]
            sent = self.ledger.take_metrics(self.ranks.ranks_per_node, self.predicted, self.job.forecast)
            self._row += [self.sharded.take_metrics(), sent]

    def add(self, metrics: Metrics) -> None:
        """Adds `metrics` to the row of the last finished step."""
        self._row.append(metrics)

    def log(self, step: int) -> None:
        """Logs the row of `step`, once its values are on the host."""
        self.rows.log(step, self._row)
        self._row = []

    def check(self) -> None:
        """Raises RunFailed where a value is not finite and must not be saved. Collective."""
        self._read_last()()

    def mark(self) -> dict[str, int]:
        """Returns the part of a checkpoint that belongs to the log: the bytes of metrics.jsonl, which are on the disk
        then."""
        return {"metrics": self.recorder.sync()}

    def _read_last(self) -> Callable[[], Metrics]:
        step, terms, norm = self._last
        sums = self.job.objective.add_up(terms, self.ranks.device) / self.job.layout.tp_size
        return self.rows.read(step, sums, norm)

    def __enter__(self) -> "Meter":
        for each in (self.recorder, self.rows, self.ledger):
            self._open.enter_context(each)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._open.__exit__(kind, error, None)
