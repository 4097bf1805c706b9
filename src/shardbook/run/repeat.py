"""Finds a rank that computes wrongly (`train.check_steps`): a micro-batch is run twice, and bits are compared.

Compared are the loss and what the rank hands to each reduction of gradients, so that a wrong bit is known where it
arose, before a sum spreads it. Invariant: no number of the run changes: gradients and random states are put back. Sums
of bits are exact, and equal in any order.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.comm.ledger import Ledger
from shardbook.data.loader import MicroBatch
from shardbook.optim.elementwise import local_values
from shardbook.parallel.library import sum_bits
from shardbook.parallel.pipeline import LossFunction, run_step
from shardbook.parallel.sharding import ShardedModel
from shardbook.ranks.distributed import Ranks, sum_over_ranks
from shardbook.ranks.exits import RunFailed


class Handed(Ledger):
    """A ledger that adds up the bits of what this rank hands to collectives, but for gathers of its weights."""

    def __init__(self, groups: dict[str, list[int]]):
        super().__init__(groups)
        self.sums = list[Tensor]()

    def _count(self, op: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
        if op != "all_gather":
            self.sums.append(sum_bits(tensor))


def check_results(
    step: int, sharded: ShardedModel, micro: MicroBatch, loss_function: LossFunction, ranks: Ranks
) -> None:
    """Runs forward and backward of `micro` twice. Raises RunFailed, on all ranks, where a rank's bits differ, and names
    those in which that was seen first. Waits for the device. Collective."""
    once, again = (_run(sharded, micro, loss_function, ranks) for _ in range(2))
    differs = [place for place, pair in enumerate(zip(once, again, strict=True), 1) if pair[0] != pair[1]]
    own = [0.0] * ranks.world_size
    own[ranks.rank] = float(differs[0]) if differs else 0.0
    found = sum_over_ranks(*own)
    if not any(found):
        return
    first = min(filter(None, found))
    named = ", ".join(str(rank) for rank, place in enumerate(found) if place == first)
    raise RunFailed(
        f"step {step}: rank {named} computed one micro-batch twice and got other bits; look at its device (ECC, "
        "nvidia-smi -q), and leave its machine out; what was computed since the last check is in doubt"
    )


def _run(sharded: ShardedModel, micro: MicroBatch, loss_function: LossFunction, ranks: Ranks) -> list[int]:
    """Returns sums of the bits of what was handed on, the loss and, at last, this rank's part of the gradients."""
    on_gpu = ranks.device.type == "cuda"
    handed = Handed(sharded.layout.groups(ranks.rank))
    with torch.random.fork_rng([ranks.device] if on_gpu else []), handed:
        handed.open()
        (terms,) = run_step(sharded, [micro], loss_function, ranks.device)
    gradients = (local_values(p.grad) for p in sharded.model.parameters() if p.grad is not None)
    sums = [*handed.sums, sum_bits(terms), *map(sum_bits, gradients)]
    if on_gpu:
        torch.cuda.synchronize()  # gradients are reduced in a stream of their own
    sharded.model.zero_grad()
    return [int(each) for each in sums]
