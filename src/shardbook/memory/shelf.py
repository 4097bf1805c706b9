"""Host buffers: the flat buffers, in host memory or on a disk, of a unit's offloaded masters, moments and gradients.

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
STAGINGS = 2  # host buffers through which gradients arrive: one is filled while the other is added up


@dataclass(frozen=True)
class BufferSlot:
    """The slot of one parameter, in elements: this rank's rows, without padding, in the unit's flat host buffers, and
    with padding in the buffer that is all-gathered and the one that is reduce-scattered."""

    start: int  # in the flat host buffers
    numel: int
    shape: tuple[int, ...]
    wire: int  # offset among the unit's padded shards
    padded: int  # elements of the padded shard
    reduced: int  # offset among the padded shards of trained parameters; -1: the parameter is frozen


@dataclass(frozen=True)
class Plan:
    """The sizes, in elements, of one unit's host buffers, and its parameters' slots. Nothing is allocated yet."""

    places: tuple[BufferSlot, ...]  # in the order of the unit's parameters
    masters: int  # of all parameters
    trained: int  # of the trained parameters, which are first in the buffers
    wire: int  # of all padded shards
    reduced: int  # of the trained parameters' padded shards


def plan_shelf(layout: Layout, unit: Unit, rank: int) -> Plan:
    """Returns the host buffers that the global `rank` needs for `unit`. No process group is needed."""
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
        places.append(BufferSlot(starts[number], numel, own, wire, padded, reduced if is_trained else -1))
        wire += padded
        reduced += padded * is_trained
    return Plan(tuple(places), free, trained_end if trained else 0, wire, reduced)


@dataclass
class Shelf:
    """The flat host buffers of one unit. `masters`, `first` and `second` (AdamW's moments) lie in memory or in the
    mapping of a file; `offsets` has their bytes' offsets in the file, -1 in memory."""

    plan: Plan
    masters: Tensor
    first: Tensor
    second: Tensor
    gradients: Tensor
    wire: Tensor | None  # the padded shards that are all-gathered; None where these stay on the device
    offsets: dict[str, int] = field(default_factory=dict)

    def view(self, flat: Tensor, number: int) -> Tensor:
        """Returns the part of `flat` that belongs to the unit's parameter `number`, in the shape of its rows."""
        place = self.plan.places[number]
        return flat[place.start : place.start + place.numel].view(place.shape)


@dataclass(eq=False)
class Held:
    """An offloaded unit: its host buffers, and its gradients and steps under way."""

    number: int  # among the layout's units
    shelf: Shelf
    masters: list[nn.Parameter]  # in the order of the shelf's places
    arrivals: int = 0  # micro-batches of this step whose gradients arrived
    arrived: Future[None] | None = None  # done when the last of them is added up
    ready: Future[None] | None = None  # done when the last step is, its copies to the device queued
    version: int = 0  # of its masters: how many steps began, and loads
    squares: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # sums of squared gradients, by master


def shelf_sizes(layout: Layout, rank: int) -> dict[str, int]:
    """Returns the exact bytes that `allocate_shelves` and the buffers through which gradients arrive take: `host` and,
    where a tier is nvme, `disk`. Buffers of a disk's transfers are not counted."""
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
    """Returns the device bytes of fetched offloaded shards: the largest unit's, twice where one is prefetched here."""
    if layout.offload.params == "none":
        return 0
    most = max(unit.padded_numel(layout.shards) for unit in layout.units) // layout.shards
    return aligned(most * layout.dtype("params").itemsize) * (1 + fetches_ahead(layout))


def gathered_bytes(layout: Layout, plan: Plan) -> dict[str, int]:
    """Returns the bytes that an all-gather of one unit moves: `to_device`, and `disk_read` from a disk."""
    wire = aligned(plan.wire * layout.dtype("params").itemsize) * (layout.offload.params != "none")
    return {"to_device": wire, "disk_read": wire * (layout.offload.params == "nvme")}


def stepped_bytes(layout: Layout, plan: Plan) -> dict[str, int]:
    """Returns the bytes that the step of one unit moves: state and shards to and from a disk, and fp32 masters to the
    device where its shards are there."""
    wire = aligned(plan.wire * layout.dtype("params").itemsize) * (layout.offload.params == "nvme")
    state = 3 * plan.trained * FP32 * (layout.offload.optimizer == "nvme")
    shipped = sum(place.numel for place in plan.places if place.reduced >= 0) * FP32
    to_device = shipped * (layout.offload.params == "none")
    return {"to_device": to_device, "disk_read": state + wire, "disk_written": state + wire}


def allocate_shelves(
    layout: Layout, units: Sequence[Unit], rank: int, file: DirectFile | None, pin: bool
) -> Iterator[Shelf]:
    """Yields the allocated host buffers of each of `units`. `file`: of shelf_sizes' disk bytes. `pin`: for a GPU."""
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
