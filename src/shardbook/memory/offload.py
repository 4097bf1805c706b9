"""Offload: puts a sharded model's master weights, moments and shards where `[offload]` says, before a load.

Invariant: a tier changes where bytes lie and who waits for whom, never a number: each gives the bits of no offload on a
CPU. Too little host memory or disk is refused before any is taken.
"""

import contextlib
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardbook.comm.torch_private import sharded_parameters, start_fully_shard, whole_shape
from shardbook.memory.direct_io import DirectFile, check_folder, free_bytes
from shardbook.memory.homes import Homes, masters_tree
from shardbook.memory.host_adamw import HostAdamW
from shardbook.memory.shelf import Held, allocate_shelves, fetches_ahead, gathered_bytes, shelf_sizes
from shardbook.model.causal_lm import CausalLM, materialize
from shardbook.optim import build_optimizer, parameter_groups
from shardbook.optim.table import adamw_settings
from shardbook.parallel.layout import Layout
from shardbook.parallel.sharding import ShardedModel
from shardbook.parallel.units import Unit
from shardbook.ranks.distributed import agree, share_of_cores
from shardbook.recipe import Optim, RecipeError

GB = 1e9
RESERVE = 0.05  # share of available memory left for loading, transfers, the rest of the process


def settle(model: CausalLM, sharded: ShardedModel, optim: Optim, device: torch.device) -> torch.optim.Optimizer:
    """Gives the model memory, on the device and wherever its layout's offload says, and returns its optimizer. The
    memory is uninitialized: load into `sharded.masters`, then `sharded.spread()` copies it to where it is used.

    Raises RecipeError, the same on every rank, where host or disk of a node have too little room. Collective.
    """
    layout = sharded.layout
    if layout.offload.optimizer == "none":
        materialize(model, device)
        return build_optimizer(model, optim)
    sizes, here = shelf_sizes(layout, dist.get_rank()), layout.ranks_per_node
    is_first = dist.get_rank() % here == 0
    # one rank a node, before any of its ranks reserves: else a late rank counts what others reserved as not free
    agree(lambda: check_room(layout, here) if is_first else None)
    file = agree(lambda: DirectFile(Path(layout.offload.path), sizes["disk"]) if "disk" in sizes else None)
    materialize(model, device)
    sharded.offloaded = Offloaded(model, layout, optim, device, file)
    return sharded.offloaded.optimizer


class Offloaded:
    """The offloaded state: master weights by name, the optimizer that steps them, and the tiers of their shards."""

    def __init__(self, model: CausalLM, layout: Layout, optim: Optim, device: torch.device, file: DirectFile | None):
        self.layout = layout
        start_fully_shard(layout.units[-1].handle)
        params = {n: sharded_parameters(unit.handle) for n, unit in enumerate(layout.units) if unit.shapes}
        self.homes = Homes(params, layout.offload.params, file, device, fetches_ahead(layout))
        self.file, self.units, masters = file, list[Held](), dict[nn.Parameter, nn.Parameter]()
        units = [_as_reduced(unit, params.get(number, [])) for number, unit in enumerate(layout.units)]
        shelves = allocate_shelves(layout, units, dist.get_rank(), file, pin=device.type == "cuda")
        for number, (unit, shelf) in enumerate(zip(units, shelves, strict=True)):
            if not unit.shapes:
                continue
            own = []
            for place, param in enumerate(params[number]):
                master = param.to_sharded_dtensor(shelf.view(shelf.masters, place))
                own.append(nn.Parameter(master, requires_grad=param.sharded_param.requires_grad))
                masters[param.sharded_param] = own[-1]
            self.units.append(Held(number, shelf, own))
        assert masters.keys() == set(model.parameters())
        self.tree = masters_tree(model, masters)
        self.optimizer = HostAdamW(
            parameter_groups(self.tree, optim),
            adamw_settings(optim),
            self.units,
            self.homes,
            list(self.tree.parameters()),
            layout,
            threads=layout.offload.threads or threads_here(layout.ranks_per_node, device.type),
        )
        for held in self.units:
            layout.units[held.number].handle.set_all_reduce_hook(partial(self.optimizer.arrive, held))
            for param in params[held.number]:
                if param.sharded_param.requires_grad:
                    param.sharded_param.register_post_accumulate_grad_hook(_drop)
        self.homes.settle(self.units)

    def masters(self) -> nn.Module:
        """Returns a module of the parameters at rest, fp32, by the model's names. Waits for every step that began."""
        self.optimizer.wait()
        return self.tree

    def spread(self) -> None:
        """Copies loaded masters to the shards that are gathered, and flushes masters and moments to the disk."""
        self.optimizer.wait()
        if self.file is not None:
            self.file.flush()
        for unit in self.units:
            unit.version += 1
            self.homes.begin(unit)
            self.homes.put(unit, 0, unit.shelf.plan.masters, unit.shelf.masters)
            self.homes.seal(unit)
        if self.file is not None:
            self.file.flush()

    def begin_step(self) -> None:
        self.optimizer.moved.clear()
        self.homes.gathered.clear()

    def begin(self, is_last: bool) -> None:
        """Notes that a micro-batch's backward begins; `is_last`: the last one of its step."""
        self.optimizer.is_last = is_last

    def take_metrics(self) -> dict[str, float]:
        """Returns the bytes that the last step moved, the seconds since the last call that all-gathers waited for the
        host's steps, and the seconds that these steps took. Call it between a step and its zero_grad."""
        moved = self.optimizer.moved.copy()
        for unit in self.homes.gathered:
            moved.update(gathered_bytes(self.layout, unit.shelf.plan))
        seconds = {"wait": self.homes.waited, "step": self.optimizer.seconds}
        self.homes.waited = self.optimizer.seconds = 0.0
        found = {f"perf/offload_{what}_seconds": value for what, value in seconds.items()}
        return found | {f"offload/{what}_bytes": float(count) for what, count in moved.items()}

    def bytes(self) -> dict[str, int]:
        """Returns the measured bytes of offloaded state: `host` and, where a file is used, `disk`."""
        flats = [
            flat
            for unit in self.units
            for flat in (unit.shelf.masters, unit.shelf.first, unit.shelf.second, unit.shelf.gradients, unit.shelf.wire)
            if flat is not None
        ]
        mapped = None if self.file is None else self.file.map().untyped_storage().data_ptr()
        host = sum(flat.nbytes for flat in flats if flat.untyped_storage().data_ptr() != mapped)
        host += sum(staging.buffer.nbytes for staging in self.optimizer.stagings)
        return {"host": host} | ({"disk": self.file.size} if self.file else {})


def _as_reduced(unit: Unit, params: list[Any]) -> Unit:
    """Returns `unit` with its parameters in the order in which fully_shard concatenates them."""
    shapes, trained = (tuple(found) for found in (map(whole_shape, params), [p.sharded_param for p in params]))
    assert sorted(shapes) == sorted(unit.shapes), "a unit is another one under fully_shard"
    return replace(unit, shapes=shapes, trained=tuple(parameter.requires_grad for parameter in trained))


def _drop(parameter: torch.Tensor) -> None:
    """Frees the device's copy of a gradient, rounded to the shard's dtype: the host has the unrounded one already."""
    parameter.grad = None


def threads_here(ranks_here: int, device_type: str) -> int:
    """Returns this rank's share of cores, at least 1; on a CPU less the cores that compute. Collective."""
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, sorted(os.sched_getaffinity(0)))
    number = dist.get_rank() % ranks_here
    first = dist.get_rank() - number
    cores = share_of_cores(everyone[first : first + ranks_here], number)
    return max(1, cores - torch.get_num_threads() if device_type == "cpu" else cores)


def check_room(layout: Layout, ranks_here: int) -> None:
    """Raises RecipeError where this machine's memory or disk cannot hold the offloaded state of its ranks."""
    sizes = shelf_sizes(layout, 0)  # no rank needs more than rank 0
    needed, there = sizes["host"] * ranks_here, available_memory() * (1 - RESERVE)
    if needed > there:
        further = "nvme (and offload.path)" if layout.offload.optimizer == "cpu" else "more ranks"
        raise RecipeError(
            f"offload.optimizer = {layout.offload.optimizer!r}: {needed / GB:.1f} GB of this machine's memory are "
            f"needed for {ranks_here} ranks and {there / GB:.1f} can be had; set offload.optimizer to {further}"
        )
    if "disk" in sizes:
        folder = Path(layout.offload.path)
        check_folder(folder)
        if sizes["disk"] * ranks_here > free_bytes(folder):
            raise RecipeError(
                f"offload.path = {layout.offload.path!r}: {sizes['disk'] * ranks_here / GB:.1f} GB are needed for "
                f"{ranks_here} ranks and {free_bytes(folder) / GB:.1f} are free; choose another disk, or more ranks"
            )


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of host memory that this process may take: the kernel's MemAvailable, or less where its control
    group, or one around that, allows less. A group's inactive page cache counts as free: the kernel reclaims it."""
    text = (root / "proc/meminfo").read_text()
    there = next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable"))
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
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):  # in a container a path named from outside may be absent: its root is not
            folder = root / "sys/fs/cgroup" / tree / group
            with contextlib.suppress(OSError, ValueError):  # no such file, or `max`
                most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
                stat = folder / "memory.stat"
                counts = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
                there = min(there, most - taken + int(counts.get(idle, 0)))
    return there
