"""Shelves: where masters, moments and gradients of a unit lie on the host, or on a disk, when they left the device.

Invariant: a parameter begins at a multiple of ALIGN elements, so that AdamW in pieces of such lengths gives the bits of
AdamW over the whole (its kernel works in vectors), and a piece on the disk begins at a page.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import compress
from math import prod

import torch
from torch import Tensor, nn

from shardbook.arithmetic import ceil_div, round_up
from shardbook.axes import DP_SHARD
from shardbook.memory.direct_io import DirectFile, aligned, page_buffer
from shardbook.parallel.layout import Layout
from shardbook.parallel.mesh import rank_along
from shardbook.parallel.units import Unit, shard_rows

ALIGN = 1024  # elements: a page of fp32
FP32 = 4
STAGINGS = 2  # buffers through which gradients come: one is filled while one is taken in


@dataclass(frozen=True)
class Place:
    """Where one parameter of a unit lies: its rows of this rank, without padding, in the flats of its shelf, and with
    padding in what is gathered and reduced."""

    start: int
    numel: int
    shape: tuple[int, ...]
    wire: int  # where it begins among the unit's padded shards
    padded: int
    reduced: int  # the same among those that are trained; -1: it is not


@dataclass(frozen=True)
class Plan:
    """The shelf of one unit, before anything is allocated: elements of each flat."""

    places: tuple[Place, ...]  # in the order of the unit's parameters
    masters: int  # of all
    trained: int  # of the trained, which come first
    wire: int  # of padded shards together
    reduced: int  # of those that are trained


def plan_shelf(layout: Layout, unit: Unit, rank: int) -> Plan:
    """What the global `rank` needs for `unit`. No process group is needed."""
    shard = rank_along(layout.sizes, DP_SHARD, rank)
    rows = [shard_rows(shape[0], layout.shards, shard) for shape in unit.shapes]
    numels = [count * prod(shape[1:]) for count, shape in zip(rows, unit.shapes, strict=True)]
    paddeds = [ceil_div(shape[0], layout.shards) * prod(shape[1:]) for shape in unit.shapes]
    starts, free = dict[int, int](), 0
    trained = list(compress(range(len(numels)), unit.trained))
    for number in [*trained, *(number for number in range(len(numels)) if number not in trained)]:
        starts[number] = free
        free += round_up(numels[number], ALIGN)
        if number in trained:
            trained_end = free
    places, wire, reduced = [], 0, 0
    for number, (shape, numel, padded) in enumerate(zip(unit.shapes, numels, paddeds, strict=True)):
        is_trained = unit.trained[number]
        own = (rows[number], *shape[1:])
        places.append(Place(starts[number], numel, own, wire, padded, reduced if is_trained else -1))
        wire += padded
        reduced += padded * is_trained
    return Plan(tuple(places), free, trained_end if trained else 0, wire, reduced)


@dataclass
class Shelf:
    """The flats of one unit. `masters`, `first` and `second` (AdamW's moments) lie in memory or in the mapping of a
    file, whose offsets in bytes are in `offsets` then."""

    plan: Plan
    masters: Tensor
    first: Tensor
    second: Tensor
    gradients: Tensor
    wire: Tensor | None  # padded shards as they are gathered, where these do not lie on the device
    offsets: dict[str, int] = field(default_factory=dict)

    def view(self, flat: Tensor, number: int) -> Tensor:
        """The part of `flat` that belongs to the unit's parameter of that number, in its shape."""
        place = self.plan.places[number]
        return flat[place.start : place.start + place.numel].view(place.shape)


@dataclass(eq=False)
class Held:
    """A unit whose state is off the device: its shelf, and what is under way with it."""

    number: int  # among the layout's units
    shelf: Shelf
    masters: list[nn.Parameter]  # in the order of its places
    arrivals: int = 0  # gradients of this step that came
    arrived: Future[None] | None = None
    ready: Future[None] | None = None  # its last step, to the end of its way to the device
    version: int = 0  # of its masters: steps that began, and loads
    squares: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # of the gradients, by master


def shelf_sizes(layout: Layout, rank: int) -> dict[str, int]:
    """Bytes that `allocate_shelves` takes of the host, with the buffers through which gradients come, and, where a tier
    lies there, of the disk, exactly; buffers of a disk's transfers are not in it."""
    host, disk = STAGINGS * staging_bytes(layout), 0
    for unit in layout.units:
        plan = plan_shelf(layout, unit, rank)
        host += plan.trained * FP32
        state = (plan.masters + 2 * plan.trained) * FP32
        wire = aligned(plan.wire * layout.dtype("params").itemsize)
        if layout.offload.optimizer == "nvme":
            disk += state
        else:
            host += state
        if layout.offload.params == "nvme":
            disk += wire
        elif layout.offload.params == "cpu":
            host += wire
    return {"host": host} | ({"disk": disk} if "nvme" in (layout.offload.optimizer, layout.offload.params) else {})


def staging_bytes(layout: Layout) -> int:
    """Returns the bytes of one staging buffer: the reduced gradients of the largest unit."""
    most = max(unit.padded_numel(layout.shards, trained_only=True) for unit in layout.units) // layout.shards
    return aligned(most * layout.dtype("reduce").itemsize)


def fetches_ahead(layout: Layout) -> bool:
    """Returns whether offloaded shards are prefetched here: from a disk, or where fully_shard prefetches nothing,
    because it gathers nothing from one shard."""
    return layout.offload.params == "nvme" or (layout.offload.params == "cpu" and layout.shards == 1)


def fetched_bytes(layout: Layout) -> int:
    """Returns the device bytes for offloaded shards that are fetched: of the largest unit, and of one more ahead."""
    if layout.offload.params == "none":
        return 0
    most = max(unit.padded_numel(layout.shards) for unit in layout.units) // layout.shards
    return aligned(most * layout.dtype("params").itemsize) * (1 + fetches_ahead(layout))


def step_bytes(layout: Layout, rank: int, micros: int) -> dict[str, int]:
    """What one rank moves in an optimizer step of `micros` micro-batches, by `to_host`, `to_device` (over PCIe, on a
    GPU), `disk_read` and `disk_written`. Every unit is taken to run forward and backward in each micro-batch."""
    moved = dict.fromkeys(("to_host", "to_device", "disk_read", "disk_written"), 0)
    if layout.offload.optimizer == "none":
        return {}
    # what crosses replicas, or waits for the last micro-batch, comes once
    arrivals = micros if layout.stage.reduce_every_micro and layout.replicas == 1 else 1
    for unit in layout.units:
        plan = plan_shelf(layout, unit, rank)
        for key, size in gathered_bytes(layout, plan).items():
            moved[key] += size * unit.gathers(micros)
        moved["to_host"] += arrivals * plan.reduced * layout.dtype("reduce").itemsize
        for key, size in stepped_bytes(layout, plan).items():
            moved[key] += size
    return moved


def gathered_bytes(layout: Layout, plan: Plan) -> dict[str, int]:
    """What a gather of one unit brings to the device."""
    wire = aligned(plan.wire * layout.dtype("params").itemsize) * (layout.offload.params != "none")
    return {"to_device": wire, "disk_read": wire * (layout.offload.params == "nvme")}


def stepped_bytes(layout: Layout, plan: Plan) -> dict[str, int]:
    """What the step of one unit moves: state through the host, and masters, in fp32, to shards on the device."""
    wire = aligned(plan.wire * layout.dtype("params").itemsize) * (layout.offload.params == "nvme")
    state = 3 * plan.trained * FP32 * (layout.offload.optimizer == "nvme")
    shipped = sum(place.numel for place in plan.places if place.reduced >= 0) * FP32
    to_device = shipped * (layout.offload.params == "none")
    return {"to_device": to_device, "disk_read": state + wire, "disk_written": state + wire}


def allocate_shelves(
    layout: Layout, units: Sequence[Unit], rank: int, file: DirectFile | None, pin: bool
) -> Iterator[Shelf]:
    """A shelf for each of `units`. `file`: of shelf_sizes' disk bytes."""
    offset, offload, dtype = 0, layout.offload, layout.dtype("params")

    def take(size: int, tier: str) -> tuple[Tensor, int]:
        nonlocal offset
        if tier == "cpu":
            return page_buffer(size, pin), -1
        assert file is not None
        offset += size
        return file.map()[offset - size : offset], offset - size

    for unit in units:
        plan = plan_shelf(layout, unit, rank)
        flats, offsets = dict[str, Tensor](), dict[str, int]()
        sizes = {"masters": plan.masters, "first": plan.trained, "second": plan.trained}
        for name, numel in sizes.items():
            flat, offsets[name] = take(numel * FP32, offload.optimizer)
            flats[name] = flat.view(torch.float32)
        flats["gradients"] = take(plan.trained * FP32, "cpu")[0].view(torch.float32)
        wire = None
        if offload.params != "none":
            wire, offsets["wire"] = take(aligned(plan.wire * dtype.itemsize), offload.params)
        yield Shelf(plan, **flats, wire=None if wire is None else wire.view(dtype), offsets=offsets)
