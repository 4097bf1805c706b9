"""The held-out loss, and what else the objective measures."""

import torch

from shardbook.data.loader import Batching, eval_micro_batches
from shardbook.data.tokenized import Documents
from shardbook.objectives import Objective
from shardbook.parallel.pipeline import run_forward
from shardbook.parallel.sharding import ShardedModel
from shardbook.ranks.distributed import Ranks, sum_over_ranks
from shardbook.ranks.progress import marked
from shardbook.run.metrics import Metrics


@torch.no_grad()
def evaluate(
    sharded: ShardedModel, objective: Objective, held_out: Documents, batching: Batching, ranks: Ranks
) -> Metrics:
    """The loss and metrics of all `held_out` rows, over all ranks. Collective."""
    model, shares_of = sharded.model.eval(), objective.of(held_out.totals)
    seen = torch.zeros(1 + len(objective.metrics), device=ranks.device)
    for micro in marked(eval_micro_batches(held_out, batching), "held-out micro-batch"):
        seen += run_forward(sharded, micro, shares_of, ranks.device)
    sharded.reshard()
    model.train()
    return dict(zip(objective.names("eval"), sum_over_ranks(*(seen / batching.alike).tolist()), strict=True))
