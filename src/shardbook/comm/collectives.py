"""The two collectives that torch 2.13 has renamed, by one name each.

Invariant: torch's function is looked up at each call, since the ledger replaces it while it is open.
"""

import torch.distributed as dist
from torch import Tensor


def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
    """Gathers the `shard` [n] of each rank of `group` into `output` [ranks * n]."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch before 2.13
    gather(output, shard, group=group)


def reduce_scatter(output: Tensor, full: Tensor, group: dist.ProcessGroup) -> None:
    """Sums `full` [ranks * n] over the ranks of `group` and leaves this rank's part in `output` [n]."""
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch before 2.13
    reduce(output, full, group=group)
