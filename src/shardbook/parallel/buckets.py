"""Buckets of replicated data parallel: units whose gradients one all-reduce sums over replicas (replicated.py)."""

from shardbook.parallel.layout import Layout
from shardbook.parallel.per_layout import cached_per_layout
from shardbook.parallel.units import Unit, backward_order

BUCKET_BYTES = 25 * 2**20  # torch DDP's bucket_cap_mb: an all-reduce of less costs its latency, not its bytes


@cached_per_layout
def bucket_units(layout: Layout) -> list[list[Unit]]:
    """Returns the units whose gradients one all-reduce sums over replicas, where there is one shard, in the order in
    which they are sent. Small neighbours are joined; a unit above BUCKET_BYTES is alone, and with one replica, where
    nothing is sent, every unit is alone."""
    joined, room = list[list[Unit]](), 0
    for unit in sorted(backward_order(layout.units), key=lambda unit: unit.is_root_like):
        if not (size := unit.padded_numel(1, trained_only=True) * layout.sum_dtype.itemsize):
            continue
        if joined and size <= room:
            joined[-1].append(unit)
            room -= size
        else:
            joined.append([unit])
            room = (BUCKET_BYTES - size) * (layout.replicas > 1)
    return joined
