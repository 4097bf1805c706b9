"""Host state: a unit's offloaded masters, moments, gradients and shards in flat host buffers, and the bytes of all.

Invariant: a parameter begins at a multiple of ALIGN elements, so that AdamW in pieces of such lengths gives the bits of
AdamW over the whole (its kernel works in vectors), and a piece on the disk begins at a page. Too little host memory or
disk is refused before any is taken.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardbook.arithmetic import ceil_div, round_up
from shardbook.axes import DP_SHARD, rank_along
from shardbook.memory.direct_io import DirectFile, aligned, check_folder, free_bytes, page_buffer
from shardbook.model.file_buffers import stored_buffers
from shardbook.parallel.layout import Layout
from shardbook.parallel.units import Unit, shard_rows
from shardbook.ranks.distributed import share_of_cores
from shardbook.recipe import Offload, RecipeError

ALIGN = 1024  # elements: a page of fp32
FP32 = 4
GB = 1e9
RESERVE = 0.05  # share of available memory left for loading, transfers, the rest of the process
STAGINGS = 2  # host buffers through which gradients arrive: one is filled while the other is added up
STATE = ("masters", "exp_avg", "exp_avg_sq")  # the flat buffers that a step updates, all fp32


@dataclass(frozen=True)
class BufferSlot:
    """The slot of one parameter, in elements: this rank's rows, without padding, in the unit's flat host buffers, and
    with padding in the buffer that is all-gathered and the one that is reduce-scattered."""

    start: int  # in the flat host buffers
    numel: int
    shape: tuple[int, ...]
    gathered: int  # offset among the unit's padded shards
    padded: int  # elements of the padded shard
    reduced: int  # offset among the padded shards of trained parameters; -1: the parameter is frozen

    def overlap(self, first: int, last: int) -> range:
        """Returns the elements of the flat host buffers that are the slot's and between `first` and `last`."""
        return range(max(self.start, first), min(self.start + self.numel, last))


@dataclass(frozen=True)
class UnitPlan:
    """The flat buffers of one unit and its parameters' slots in them. Nothing is allocated yet."""

    slots: tuple[BufferSlot, ...]  # in the order of the unit's parameters
    trained: int  # elements of the trained parameters, which are first in the buffers
    gathered: int  # elements of all padded shards
    reduced: int  # elements of the trained parameters' padded shards
    # by name the bytes of a buffer and its tier (none, cpu or nvme): STATE and "gradients", fp32, and "shards", padded,
    # in the dtype that is gathered, in whole pages, or no bytes where they stay on the device
    buffers: dict[str, tuple[int, str]]


def plan_unit(layout: Layout, unit: Unit, rank: int) -> UnitPlan:
    """Returns the host buffers that the global `rank` needs for `unit`. No process group is needed."""
    ranks, shard = layout.shards_of(unit), rank_along(layout.sizes_of(unit), DP_SHARD, rank)
    shapes = [(shard_rows(shape[0], ranks, shard), *shape[1:]) for shape in unit.shapes]
    offload = layout.offload
    trained = sum(round_up(prod(part), ALIGN) for part, trains in zip(shapes, unit.trained, strict=True) if trains)
    free = {True: 0, False: trained}  # where the next trained, and the next frozen parameter begins
    slots, gathered, reduced = [], 0, 0
    for full, part, trains in zip(unit.shapes, shapes, unit.trained, strict=True):
        padded = ceil_div(full[0], ranks) * prod(full[1:])
        slots.append(BufferSlot(free[trains], prod(part), part, gathered, padded, reduced if trains else -1))
        free[trains] += round_up(prod(part), ALIGN)
        gathered += padded
        reduced += padded * trains
    shards = aligned(gathered * layout.dtype("params").itemsize) * (offload.params != "none")
    buffers: dict[str, tuple[int, str]] = dict.fromkeys(STATE, (trained * FP32, offload.optimizer))
    buffers |= {"masters": (free[False] * FP32, offload.optimizer), "gradients": (trained * FP32, "cpu")}
    return UnitPlan(tuple(slots), trained, gathered, reduced, buffers | {"shards": (shards, offload.params)})


@dataclass(eq=False)
class OffloadedUnit:
    """A unit whose optimizer state is offloaded: its host buffers, and its gradients and step under way."""

    number: int  # among the layout's units
    plan: UnitPlan
    flats: dict[str, Tensor]  # the plan's buffers, in host memory or in the mapping of a file
    offsets: dict[str, int]  # of the buffers in the file: where they begin there, in bytes
    masters: list[nn.Parameter] = field(default_factory=list)  # in the order of the plan's slots
    params: list[Any] = field(default_factory=list)  # the same as torch_private.sharded_parameters returns them
    micros: int = 0  # micro-batches of this step whose gradients came
    accumulated: Future[None] | None = None  # done when the last of them is added up
    ready: Future[None] | None = None  # done when the last step is, its copies to the device queued
    h2d_event: Any = None  # behind the last copy of its masters to the device
    version: int = 0  # of its masters: how many steps began, and loads

    def view(self, name: str, number: int) -> Tensor:
        """Returns the part of a flat buffer that belongs to the unit's parameter `number`, in the shape of its rows."""
        slot = self.plan.slots[number]
        return self.flats[name][slot.start : slot.start + slot.numel].view(slot.shape)

    def split(self, shards: Tensor) -> list[Tensor]:
        """Returns the padded shard of each parameter, flat, in a buffer of all the unit's padded shards."""
        return [shards[slot.gathered : slot.gathered + slot.padded] for slot in self.plan.slots]


def allocate_units(
    layout: Layout, units: Sequence[Unit], rank: int, file: DirectFile | None, pin: bool
) -> Iterator[OffloadedUnit]:
    """Yields each of `units` with its host buffers. `file`: of offloaded_bytes' `disk`. `pin`: for a GPU."""
    offset, dtype = 0, layout.dtype("params")
    for number, unit in enumerate(units):
        plan, flats, offsets = plan_unit(layout, unit, rank), dict[str, Tensor](), dict[str, int]()
        for name, (size, tier) in plan.buffers.items():
            if tier == "nvme":
                assert file is not None
                offsets[name], offset = offset, offset + size
            flat = file.mapped[offset - size : offset] if file and name in offsets else page_buffer(size, pin)
            flats[name] = flat.view(dtype if name == "shards" else torch.float32)
        yield OffloadedUnit(number, plan, flats, offsets)


def masters_tree(model: nn.Module, masters: dict[nn.Parameter, nn.Parameter]) -> nn.Module:
    """Returns a module with the model's config that holds each parameter's master under the parameter's name."""
    root, of = nn.Module(), cast(Any, model)
    for name, _ in [*model.named_modules(remove_duplicate=False)][1:]:
        root.set_submodule(name, nn.Module())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parent, _, last = name.rpartition(".")
        root.get_submodule(parent).register_parameter(last, masters[parameter])
    for name, buffer in stored_buffers(model).items():
        parent, _, last = name.rpartition(".")
        root.get_submodule(parent).register_buffer(last, buffer)
    root.config, root.files, root.vectors = of.config, of.files, of.vectors  # a model's, as files need them
    return root


def offloaded_bytes(layout: Layout, rank: int) -> dict[str, int]:
    """Returns the exact bytes that `allocate_units` and the buffers through which gradients arrive take: `host` and,
    where a tier is nvme, `disk`. Buffers of a disk's transfers are not counted."""
    sizes = Counter(cpu=STAGINGS * staging_bytes(layout))
    for unit in layout.units:
        for size, tier in plan_unit(layout, unit, rank).buffers.values():
            sizes[tier] += size
    return {"host": sizes["cpu"]} | ({"disk": sizes["nvme"]} if layout.offload.optimizer == "nvme" else {})


def largest_bytes(layout: Layout, dtype: torch.dtype, trained_only: bool = False) -> int:
    """Returns the bytes of the largest unit's padded shards, in whole pages."""
    shards = {unit: layout.shards_of(unit) for unit in layout.units}
    most = max(unit.padded_numel(ranks, trained_only) // ranks for unit, ranks in shards.items())
    return aligned(most * dtype.itemsize)


def staging_bytes(layout: Layout) -> int:
    """Returns the bytes of one staging buffer: the reduced gradients of the largest unit."""
    return largest_bytes(layout, layout.dtype("reduce"), trained_only=True)


def prefetches(layout: Layout) -> bool:
    """Returns whether offloaded shards are prefetched here: from a disk, or where fully_shard prefetches nothing,
    because it gathers nothing from one shard."""
    return layout.offload.params == "nvme" or (layout.offload.params == "cpu" and layout.shards == 1)


def fetched_bytes(layout: Layout) -> int:
    """Returns the device bytes of fetched offloaded shards: the largest unit's, twice where one is prefetched here."""
    times = 0 if layout.offload.params == "none" else 1 + prefetches(layout)
    return largest_bytes(layout, layout.dtype("params")) * times


def moved_bytes(layout: Layout, plan: UnitPlan, gathers: int = 0, steps: int = 0, sums: int = 0) -> dict[str, int]:
    """Returns the bytes that all-gathers, steps and reduced gradients (`sums`) of one unit move: `to_host` and
    `to_device` (over PCIe, on a GPU; a step sends fp32 masters there where the shards are there), `disk_read` and
    `disk_written`."""
    offload, (shards, params) = layout.offload, plan.buffers["shards"]
    uploaded = sum(slot.numel for slot in plan.slots if slot.reduced >= 0) * FP32 * (params == "none")
    from_disk = shards * (params == "nvme")
    state = len(STATE) * plan.trained * FP32 * (offload.optimizer == "nvme")
    written = steps * (from_disk + state)
    read = gathers * from_disk + written
    up, down = sums * plan.reduced * layout.dtype("reduce").itemsize, gathers * shards + steps * uploaded
    return {"to_host": up, "to_device": down, "disk_read": read, "disk_written": written}


def threads_here(ranks_here: int, device_type: str) -> int:
    """Returns this rank's share of cores, at least 1; on a CPU less the cores that compute. Collective."""
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, sorted(os.sched_getaffinity(0)))
    number = dist.get_rank() % ranks_here
    first = dist.get_rank() - number
    cores = share_of_cores(everyone[first : first + ranks_here], number)
    return max(1, cores - torch.get_num_threads() if device_type == "cpu" else cores)


def check_room(offload: Offload, sizes: Sequence[dict[str, int]]) -> None:
    """Raises RecipeError where this machine's memory or disk cannot hold the offloaded state of its ranks, which is of
    `sizes`, one rank's `offloaded_bytes` each."""
    needed = sum((Counter(each) for each in sizes), Counter[str]())
    free = available_memory() * (1 - RESERVE)
    if needed["host"] > free:
        to_disk = "set offload.optimizer to nvme (and offload.path)"
        further = to_disk if offload.optimizer == "cpu" else "start more ranks"
        raise RecipeError(
            f"offload.optimizer = {offload.optimizer!r}: {needed['host'] / GB:.1f} GB of this machine's memory are "
            f"needed for {len(sizes)} ranks and {free / GB:.1f} can be had; {further}"
        )
    if offload.optimizer == "nvme":
        folder = Path(offload.path)
        check_folder(folder)
        if needed["disk"] > free_bytes(folder):
            raise RecipeError(
                f"offload.path = {offload.path!r}: {needed['disk'] / GB:.1f} GB are needed for "
                f"{len(sizes)} ranks and {free_bytes(folder) / GB:.1f} are free; choose another disk, or more ranks"
            )


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of host memory that this process may take: the kernel's MemAvailable, or less where its control
    group, or one around that, allows less. A group's inactive page cache counts as free: the kernel reclaims it."""
    text = (root / "proc/meminfo").read_text()
    free = next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable"))
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: one tree for all
            tree, limit, used, idle = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            tree, limit, used = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            idle = "total_inactive_file"  # with the groups inside, as its usage counts them too
        else:
            continue
        cgroup = Path(path.lstrip("/"))
        for group in (cgroup, *cgroup.parents):  # in a container only the root of a path named from outside may exist
            folder = root / "sys/fs/cgroup" / tree / group
            with contextlib.suppress(OSError, ValueError):  # no such file, or `max`
                most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
                stat = folder / "memory.stat"
                counts = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
                free = min(free, most - taken + int(counts.get(idle, 0)))
    return free
