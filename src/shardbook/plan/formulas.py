"""Closed formulas: what a rank sends in a step and what it keeps, from a layout.

Invariant: exact. Tests hold each number equal to what a run measures, padding of uneven shards included: a tensor of
s rows over N ranks is cut into N shards of ceil(s / N) rows. The ZeRO paper's own count is `paper_resident`.
Needs no process group and no memory: the units may lie on the meta device.
"""

from dataclasses import asdict, dataclass
from itertools import compress
from math import prod

from shardbook.axes import DP_REPLICATE, DP_SHARD, INSIDE, WORLD
from shardbook.comm.ledger import Traffic, Volume
from shardbook.comm.quantize import buffer_bytes
from shardbook.optim import state_bytes
from shardbook.parallel.layout import Layout
from shardbook.parallel.mesh import rank_along
from shardbook.parallel.stages import Stage
from shardbook.parallel.units import Unit, backward_order

COUNTS_BYTES = 4 * 8  # the step's counts and stop flags: four fp64 numbers summed over all ranks
NORM_BYTES = 8  # the squared gradient norm, one fp64 number


@dataclass(frozen=True)
class Resident:
    """Bytes that one rank keeps from step to step (gradients: from backward to the optimizer)."""

    params_bytes: float
    grads_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.params_bytes + self.grads_bytes + self.optimizer_bytes


def shard_rows(rows: int, ranks: int, rank: int) -> int:
    """Rows of dim 0 that shard `rank` of `ranks` really has: the last ones may be shorter, or empty."""
    padded = -(-rows // ranks)
    return max(0, min(padded, rows - rank * padded))


def predict_traffic(layout: Layout, micros: int) -> Traffic:
    """Calls and payload bytes of one optimizer step of one rank, by operation and mesh axis.

    A group of one rank gathers and reduces nothing. Every unit is taken to run forward and backward in each of the
    step's `micros` micro-batches.
    """
    shards, switches = layout.shards, layout.switches
    wire, reduced = layout.dtype("params").itemsize, layout.dtype("reduce").itemsize
    reductions = sum(layout.stage.syncs(is_last_micro=micro == micros - 1) for micro in range(micros))
    traffic: Traffic = {}

    def add(op: str, axis: str, calls: int, payload_bytes: int) -> None:
        if calls and payload_bytes:
            traffic[op, axis] = traffic.get((op, axis), Volume()) + Volume(calls, calls * payload_bytes)

    for unit in layout.units:
        whole, trained = unit.padded_numel(shards), unit.padded_numel(shards, trained_only=True)
        if shards > 1:
            quantized = switches.quantizes(unit.numel)
            gathers = unit.gathers(micros)
            full = whole * wire
            if quantized and switches.weights_bits:
                full = shards * buffer_bytes(whole // shards, switches.weights_bits, switches.block)
            if switches.secondary and unit.gathers_again:  # backward's half stays inside, unquantised
                add("all_gather", INSIDE, micros, whole * wire)
                gathers -= micros
            add("all_gather", DP_SHARD, gathers, full)
            hops, slices = layout.hops if quantized and trained else [], shards
            for axis, ranks, bits in hops:  # each leaves a rank with one slice of every `ranks`
                add("all_to_all", axis, reductions, slices * buffer_bytes(trained // shards, bits, switches.block))
                slices //= ranks
            if not hops:
                add("reduce_scatter", DP_SHARD, reductions, trained * reduced)
        if layout.replicas > 1:  # once a step, of a rank's shard
            add("all_reduce", DP_REPLICATE, 1, trained // shards * reduced)
    if shards > 1:
        add("all_reduce", DP_SHARD, 1, NORM_BYTES)
    everyone = next((axis for axis, size in layout.sizes.items() if size == layout.world_size), WORLD)
    add("all_reduce", everyone, 1, COUNTS_BYTES)
    return traffic


def predict_resident(layout: Layout, rank: int, optimizer_name: str = "adamw") -> Resident:
    """What the global `rank` keeps. Parameters and gradients lie in padded storage; the moments of `optimizer_name`, as
    optim.name has it, have the true rows of the rank."""
    shards, master, shard = layout.shards, layout.dtype("master").itemsize, rank_along(layout.sizes, DP_SHARD, rank)
    params = grads = optimizer = 0
    for unit in layout.units:
        params += unit.padded_numel(shards) // shards * master
        grads += unit.padded_numel(shards, trained_only=True) // shards * master
        for shape in compress(unit.shapes, unit.trained):
            numel = shard_rows(shape[0], shards, shard) * prod(shape[1:])
            optimizer += state_bytes(optimizer_name, numel, master)
    return Resident(params, grads, optimizer)


def predict_secondary(layout: Layout) -> int:
    """Bytes of a rank's secondary shards (hpZ) after a whole forward: each unit's parameters over `secondary` ranks."""
    if not layout.switches.secondary:
        return 0
    whole = sum(unit.padded_numel(layout.shards) for unit in layout.units if unit.gathers_again)
    return whole // layout.switches.secondary * layout.dtype("params").itemsize


def predict_residual(layout: Layout) -> int:
    """Bytes that error feedback keeps on a rank, in fp32."""
    return sum(map(layout.residual_numel, layout.units)) * 4


def paper_resident(stage: Stage, parameters: int, ranks: int) -> Resident:
    """The ZeRO paper's count (arXiv 1910.02054, section 3.1 and figure 1): 2 bytes a parameter, 2 a gradient, 12 of
    optimizer state (fp32 copy, momentum, variance), each split over `ranks` or not. Not what this program keeps."""
    split = ranks if stage.shards else 1
    return Resident(
        params_bytes=2 * parameters / (split if stage.reshard_after_forward else 1),
        grads_bytes=2 * parameters / (split if stage.reduce_every_micro else 1),
        optimizer_bytes=12 * parameters / split,
    )


def predict_memory_metrics(layout: Layout, optimizer_name: str, peak_bytes: int) -> dict[str, float]:
    """The metrics `predicted/memory/<what>_bytes` of the first rank, and `paper/memory/<what>_bytes` beside them."""
    count = sum(unit.numel for unit in layout.units)
    paper = asdict(paper_resident(layout.stage, count, layout.shards))
    kept = asdict(predict_resident(layout, 0, optimizer_name))
    metrics = {f"predicted/memory/{what}": value for what, value in kept.items()}
    metrics |= {f"paper/memory/{what}": value for what, value in paper.items()}
    if residual := predict_residual(layout):
        metrics["predicted/memory/residual_bytes"] = residual
    return metrics | {"predicted/memory/peak_bytes": peak_bytes}


def predict_gathered_peak(layout: Layout) -> int:
    """Most bytes of gathered parameters that exist at once: those never freed inside a pass, the running unit, and as
    many units ahead of it as are prefetched. (A gather in flight holds its output buffer as long again.)"""
    if layout.shards == 1:  # nothing is gathered: the whole model in the dtype of compute, or as it is at rest
        is_cast = layout.dtype("params") != layout.dtype("master")
        return sum(unit.numel for unit in layout.units) * layout.dtype("params").itemsize * is_cast
    kept = {unit for unit in layout.units if unit.spans or not unit.frees}

    def size(live: set[Unit]) -> int:
        return sum(unit.padded_numel(layout.shards) for unit in live) * layout.dtype("params").itemsize

    peak = size(kept)
    order = [unit for unit in layout.units if not unit.spans]
    back = [unit for unit in backward_order(order) if unit.read_in_backward]
    for run, ahead in ((order, layout.forward_prefetch), (back, layout.backward_prefetch)):
        for number, running in enumerate(run):
            around = {unit for unit in run if running.modules[0] in set(unit.modules[0].modules())}  # itself too
            peak = max(peak, size(kept | around | set(run[number : number + 1 + ahead])))
    return peak
