"""The held-out loss."""

from collections.abc import Iterable

import torch

from shardbook.data.loader import MicroBatch
from shardbook.objectives import Objective
from shardbook.parallel.sharding import ShardedModel
from shardbook.ranks.distributed import Ranks, sum_over_ranks
from shardbook.ranks.progress import marked


@torch.no_grad()
def evaluate(sharded: ShardedModel, objective: Objective, micros: Iterable[MicroBatch], ranks: Ranks) -> float:
    """Mean loss of the held-out trained tokens, over all ranks. Collective."""
    model = sharded.model.eval()
    loss, tokens = torch.zeros((), device=ranks.device), 0
    for micro in marked(micros, "held-out micro-batch"):
        loss += objective(model, micro.to(ranks.device))
        tokens += len(micro.targets)
    sharded.reshard()
    model.train()
    total, count = sum_over_ranks(loss.item(), tokens)
    return total / count
