"""Closed formulas for the bytes that a rank sends in a step and keeps, from a layout.

Invariant: exact. Tests hold each number equal to a run's measurement, padding of uneven shards included: a tensor of
s rows over N ranks is split into N shards of ceil(s / N) rows. The ZeRO paper's own count is `paper_resident`.
Needs no process group and no memory: the units may lie on the meta device.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from math import prod

from shardbook.axes import DP_SHARD, rank_along
from shardbook.comm.ledger import Traffic, Volume
from shardbook.memory.direct_io import COPY_ALIGN
from shardbook.memory.host_state import moved_bytes, offloaded_bytes, plan_unit
from shardbook.optim.table import OPTIMIZERS
from shardbook.parallel.layout import Layout
from shardbook.parallel.per_layout import cached_per_layout
from shardbook.parallel.router_bias import ITEMSIZE
from shardbook.parallel.units import shard_rows
from shardbook.plan.events import BlockTraffic, Event, step_events, step_passes
from shardbook.recipe import Offload, Stage


@dataclass(frozen=True)
class Resident:
    """The bytes that one rank keeps from step to step (gradients: from backward to the optimizer)."""

    params_bytes: float
    grads_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.params_bytes + self.grads_bytes + self.optimizer_bytes


def predict_traffic(
    layout: Layout,
    micros: int,
    optimizer_name: str = "adamw",
    forwards: int = 1,
    rank: int = 0,
    inside: Sequence[BlockTraffic] = (),
) -> Traffic:
    """Returns calls and payload bytes of one optimizer step of the global `rank`, by operation and mesh axis.

    A group of one rank gathers and reduces nothing. Every unit is taken to run forward and backward in each of the
    step's `micros` micro-batches, after `forwards` - 1 forwards without a backward. `inside`: of `read_inside`.
    """
    return count_traffic(step_events(layout, micros, optimizer_name, forwards, rank, inside))


def count_traffic(events: Iterable[Event]) -> Traffic:
    """Returns calls and payload bytes of `events`, by operation and mesh axis."""
    traffic: Traffic = {}
    for op, axis, payload in (each for event in events for each in event.sends):
        if payload or op == "all_to_all":  # experts that no token chose take part in the exchange, and send nothing
            traffic[op, axis] = traffic.get((op, axis), Volume()) + Volume(1, payload)
    return traffic


@cached_per_layout
def predict_resident(layout: Layout, rank: int, optimizer_name: str = "adamw") -> Resident:
    """Returns the bytes that the global `rank` keeps on its device. Parameters and gradients are in padded storage; the
    moments of `optimizer_name`, as optim.name has it, have the true rows of the rank."""
    master = layout.dtype("master").itemsize
    params = grads = optimizer = 0
    if layout.steps_on_host:  # what is on the device are copies in the dtype of compute, or nothing
        at_rest = layout.dtype("params").itemsize * (layout.offload.params == "none")
        shards_of = {unit: layout.shards_of(unit) for unit in layout.units}
        numel = sum(unit.padded_numel(shards) // shards for unit, shards in shards_of.items())
        return Resident(numel * at_rest, 0, 0)
    for unit in layout.units:
        shards, shard = layout.shards_of(unit), rank_along(layout.sizes_of(unit), DP_SHARD, rank)
        params += unit.rest_bytes(shards, master)
        grads += unit.padded_numel(shards, trained_only=True) // shards * master
        for shape, is_matrix in compress(zip(unit.shapes, unit.is_block_matrix, strict=True), unit.trained):
            numel = shard_rows(shape[0], shards, shard) * prod(shape[1:])
            optimizer += OPTIMIZERS[optimizer_name].state_bytes(numel, master, is_matrix)
    return Resident(params, grads, optimizer)


@cached_per_layout
def predict_copied(layout: Layout, rank: int, optimizer_name: str) -> int:
    """Returns the most bytes of host memory for the global `rank`'s copy of a save that is written while steps go on.
    Of replicas each writes a part, in whole tensors. (8 bits: 7 parts of a parameter; random states: 5 KB.)"""
    each, biases = 0, layout.biases.values() if layout.bias_update_rate else ()
    for units in filter(None, ([unit for unit in layout.units if not unit.is_experts], layout.expert_units)):
        kept = predict_resident(replace(layout, offload=Offload(), units=tuple(units)), rank, optimizer_name)
        shapes, replicas = [shape for unit in units for shape in unit.shapes], layout.replicas_of(units[0])
        most = max(map(prod, shapes)) * 4 // layout.shards_of(units[0]) * (replicas > 1)
        each += int(kept.grads_bytes + kept.optimizer_bytes) // replicas + most + COPY_ALIGN * 8 * len(shapes)
    return each + 2**13 + sum(prod(shape) * ITEMSIZE + COPY_ALIGN for shape in biases)


def predict_secondary(layout: Layout) -> int:
    """Returns the bytes of a rank's hpZ shards after a whole forward: each unit's parameters over `secondary` ranks."""
    if not layout.switches.secondary:
        return 0
    gathered = sum(unit.padded_numel(layout.shards) for unit in layout.units if unit.gathers_again)
    return gathered // layout.switches.secondary * layout.dtype("params").itemsize


def paper_resident(stage: Stage, parameters: int, ranks: int) -> Resident:
    """Returns the ZeRO paper's count (arXiv 1910.02054, section 3.1 and figure 1): 2 bytes a parameter, 2 a gradient,
    12 of optimizer state (fp32 copy, momentum, variance), each split over `ranks` or not; not this program's bytes."""
    split = ranks if stage.shards else 1
    return Resident(
        params_bytes=2 * parameters / (split if stage.reshard_after_forward else 1),
        grads_bytes=2 * parameters / (split if stage.reduce_every_micro else 1),
        optimizer_bytes=12 * parameters / split,
    )


def count_moves(layout: Layout, rank: int, micros: int) -> dict[str, Counter[str]]:
    """Returns the bytes that each kind of event of an offloaded step of the global `rank` moves: `to_host`, `to_device`
    (over PCIe, on a GPU), `disk_read` and `disk_written`. Partial sums go to the device, and back once they are
    summed."""
    plans = {unit: plan_unit(layout, unit, rank) for unit in layout.units}
    moves = {what: Counter[str]() for what in ("fetch", "arrive", "update", "sum")}
    for what, unit, sends in step_events(layout, micros, rank=rank):
        if unit and what in moves:
            moves[what].update(moved_bytes(layout, plans[unit], what == "fetch", what == "update", what == "arrive"))
        elif what == "sum":
            moves[what].update(dict.fromkeys(("to_host", "to_device"), sum(size for _, _, size in sends)))
    return moves


def step_bytes(layout: Layout, rank: int, micros: int) -> dict[str, int]:
    """Returns the bytes that one rank moves in an optimizer step with offload, by all events; without it nothing."""
    if not layout.steps_on_host:
        return {}
    moves = count_moves(layout, rank, micros).values()
    return {key: sum(moved[key] for moved in moves) for key in ("to_host", "to_device", "disk_read", "disk_written")}


def predict_memory_metrics(layout: Layout, optimizer_name: str, peak: dict[str, int], micros: int) -> dict[str, float]:
    """Returns the metrics `predicted/memory/<what>_bytes` of the first rank, `paper/memory/<what>_bytes` beside them,
    and `predicted/peak/<term>_bytes` of a step's `peak` (empty: not known); with offload also the bytes that a step of
    `micros` moves."""
    paper = asdict(paper_resident(layout.stage, sum(unit.parameters for unit in layout.units), layout.shards))
    kept = asdict(predict_resident(layout, 0, optimizer_name))
    metrics = {f"predicted/memory/{what}": value for what, value in kept.items()}
    metrics |= {f"paper/memory/{what}": value for what, value in paper.items()}
    metrics |= {f"predicted/peak/{term}_bytes": value for term, value in peak.items()}
    if layout.steps_on_host:
        metrics |= {f"predicted/memory/{where}_bytes": size for where, size in offloaded_bytes(layout, 0).items()}
        metrics |= {f"predicted/offload/{what}_bytes": size for what, size in step_bytes(layout, 0, micros).items()}
    return metrics | ({"predicted/memory/peak_bytes": sum(peak.values())} if peak else {})


def predict_gathered_peak(layout: Layout) -> int:
    """Returns the most bytes of gathered parameters that exist at once: units never freed inside a pass, the running
    unit, and units that are prefetched ahead of it. (A gather in flight also holds its output buffer, not counted.)"""
    compute, now, most = layout.dtype("params").itemsize, 0, 0
    for event in (event for each in step_passes(layout, layout.steady_micros) for event in each.events):
        if event.unit and event.what in ("gather", "free"):
            unit, sign = event.unit, 1 if event.what == "gather" else -1
            is_replicated = layout.is_replicated
            now += sign * (unit.cast_numel(compute) if is_replicated else unit.padded_numel(layout.shards_of(unit)))
            most = max(most, now)
    return most * compute
