"""Finds a rank that computes wrongly (`train.check_steps`): a micro-batch is run twice, and bits are compared.

Compared are the loss and what the rank hands to each reduction of gradients, so that a wrong bit is known where it
arose, before a sum spreads it. Invariant: no number of the run changes: gradients and random states are put back. Sums
of bits are exact, and equal in any order.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.arithmetic import is_due
from shardbook.comm.ledger import Ledger
from shardbook.data.loader import MicroBatch
from shardbook.local_tensors import local_values
from shardbook.parallel.same_on_ranks import sum_bits
from shardbook.parallel.sharding import ShardedModel
from shardbook.parallel.step import LossFunction, run_step
from shardbook.ranks.distributed import Ranks, sum_over_ranks
from shardbook.ranks.exits import RunFailed


class BitLedger(Ledger):
    """A ledger that adds up the bits of what this rank hands to collectives, but for gathers of its weights."""

    def __init__(self, groups: dict[str, list[int]]):
        super().__init__(groups)
        self.sums = list[Tensor]()

    def _count(self, op: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
        if op != "all_gather":
            self.sums.append(sum_bits(tensor))


@dataclass(frozen=True)
class SdcCheck:
    """A check before each step that is due, but for the `first_step` of a launch, whose collectives a ledger counts."""

    every: int  # steps; 0: none
    sharded: ShardedModel
    ranks: Ranks
    first_step: int

    def before(self, step: int, micro: MicroBatch, loss_function: LossFunction) -> None:
        """Checks this rank with the first `micro` of a step, where that is due. Raises as `check_rank`. Collective."""
        if is_due(step, self.every) and step != self.first_step:
            check_rank(step, self.sharded, micro, loss_function, self.ranks)


def check_rank(step: int, sharded: ShardedModel, micro: MicroBatch, loss_function: LossFunction, ranks: Ranks) -> None:
    """Runs forward and backward of `micro` twice. Raises RunFailed, on all ranks, where a rank's bits differ, and names
    those in which that was seen first. Waits for the device. Collective."""
    once, again = (_run(sharded, micro, loss_function, ranks) for _ in range(2))
    differs = [place for place, pair in enumerate(zip(once, again, strict=True), 1) if pair[0] != pair[1]]
    places = [0.0] * ranks.world_size
    places[ranks.rank] = float(differs[0]) if differs else 0.0
    places = sum_over_ranks(*places)
    if not any(places):
        return
    first = min(filter(None, places))
    named = ", ".join(str(rank) for rank, place in enumerate(places) if place == first)
    raise RunFailed(
        f"step {step}: rank {named} computed one micro-batch twice and got other bits; look at its device (ECC, "
        "nvidia-smi -q), and leave its machine out; what was computed since the last check is in doubt"
    )


def _run(sharded: ShardedModel, micro: MicroBatch, loss_function: LossFunction, ranks: Ranks) -> list[int]:
    """Returns sums of the bits of what was handed on, the loss and, at last, this rank's part of the gradients."""
    on_gpu = ranks.device.type == "cuda"
    ledger = BitLedger(sharded.layout.groups(ranks.rank))
    with torch.random.fork_rng([ranks.device] if on_gpu else []), ledger:
        ledger.open()
        (terms,) = run_step(sharded, [micro], loss_function, ranks.device)
    gradients = (local_values(p.grad) for p in sharded.model.parameters() if p.grad is not None)
    sums = [*ledger.sums, sum_bits(terms), *map(sum_bits, gradients)]
    if on_gpu:
        torch.cuda.synchronize()  # gradients are reduced in a stream of their own
    sharded.model.zero_grad()
    return [int(each) for each in sums]
