"""Memory of a rank, measured: the bytes that it keeps between steps, and the peaks of its GPU's allocator.

Invariant: a storage is counted once, with its padding; what was not measured is absent, never zero.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from shardbook.local_tensors import plain_tensors
from shardbook.parallel.sharding import ShardedModel
from shardbook.run.log.recorder import Metrics


def kept_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Returns the resident bytes of `tensors` on this rank: of its own shards, padding included, each storage once."""
    storages = {}
    for tensor in tensors:
        for part in plain_tensors(tensor) if tensor is not None else ():
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
