"""Evaluation between steps: the held-out loss, the objective's other metrics, and samples."""

import torch

from shardbook.arithmetic import is_due
from shardbook.data.loader import Batching, eval_micro_batches
from shardbook.data.tokenized import Documents
from shardbook.objectives import Objective
from shardbook.parallel.sharding import ShardedModel
from shardbook.parallel.step import run_forward
from shardbook.ranks.distributed import Ranks, sum_over_ranks
from shardbook.ranks.progress import mark_each
from shardbook.run.eval.generate import Generation
from shardbook.run.log.console import Console
from shardbook.run.log.recorder import Metrics
from shardbook.run.log.step_log import StepLog
from shardbook.run.prepare import Job


class Observer:
    """Evaluates, logs and takes samples after steps; step 0 is before the first. All ranks make the same calls."""

    def __init__(
        self, job: Job, sharded: ShardedModel, held_out: Documents | None, ranks: Ranks, log: StepLog, console: Console
    ):
        self.job, self.sharded, self.held_out, self.ranks, self.log = job, sharded, held_out, ranks, log
        self.samples = Generation(job, sharded, ranks, log.recorder, console)

    def after(self, step: int) -> None:
        """Evaluates if due, into the row of `step`, and takes samples if due. Collective."""
        job = self.job
        if self.held_out and (step in (0, job.steps) or is_due(step, job.recipe.train.eval_steps)):
            given = self.sharded, job.objective, self.held_out, job.batching, self.ranks
            self.log.add(lambda: evaluate(*given))
        self.samples.take(step, self.log.paused)


@torch.no_grad()
def evaluate(
    sharded: ShardedModel, objective: Objective, held_out: Documents, batching: Batching, ranks: Ranks
) -> Metrics:
    """Returns the loss and metrics of all `held_out` rows, over all ranks. Collective."""
    model, loss_function = sharded.model.eval(), objective.with_totals(held_out.totals, sharded.sum_slices)
    micros = mark_each(eval_micro_batches(held_out, batching), "held-out micro-batch")
    if load := sharded.expert_load:
        load.clear()
    terms = (run_forward(sharded, micro, loss_function, ranks.device) for micro in micros)
    sums = objective.add_up(terms, ranks.device)
    sharded.reshard()
    model.train()
    shared = sums / sharded.layout.term_copies(objective.sequences)
    metrics: Metrics = dict(zip(objective.names("eval"), sum_over_ranks(*shared.tolist()), strict=True))
    return metrics | (load.metrics("eval", load.sum().cpu()) if load else {})
