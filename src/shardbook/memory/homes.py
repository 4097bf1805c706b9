"""Homes: where each unit's shard comes from when it is gathered, and where it goes when it was stepped: the device, the
host or a disk.

Invariant: fully_shard asks at every gather, prefetched ones too, through its all-gather extension, so no caller knows a
tier. A unit that is being stepped is waited for, and a read made before its last step is not used.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.comm.torch_private import gather_through, padded_shard
from shardbook.memory.direct_io import DirectFile, page_buffer
from shardbook.memory.shelf import Held, Place


class Homes:
    """Moves shards of `units` to the device and back. `params`: of each unit, fully_shard's own
    (comm/torch_private.sharded_parameters)."""

    def __init__(self, params: dict[int, list[Any]], tier: str, file: DirectFile | None, device: torch.device):
        self.params, self.tier, self.file, self.device = params, tier, file, device
        self.pager: Pager | None = None
        self.outgoing: Tensor | None = None  # a unit's shards on their way to the disk
        self.here: Tensor | None = None  # the unit that is being gathered, on the device
        self.shipped: dict[int, Any] = {}
        self.waited = 0.0  # seconds that gathers waited for steps
        self.gathered: list[Held] = []  # from other homes than the device, in this step

    def settle(self, units: list[Held]) -> None:
        """Have fully_shard ask here. Frees what it holds of shards that lie elsewhere."""
        for unit in units:
            for number, param in enumerate(self.params[unit.number]):
                gather_through(param, self._opens(unit, number), _passes_on)
                if self.tier != "none":
                    padded_shard(param).untyped_storage().resize_(0)
        if self.tier == "nvme":
            assert self.file is not None
            largest = max(unit.shelf.wire.nbytes for unit in units if unit.shelf.wire is not None)
            self.outgoing = page_buffer(largest)
            self.pager = Pager(self.file, largest, self.device.type == "cuda")

    def _opens(self, unit: Held, number: int) -> Callable[..., Any]:
        def fsdp_pre_all_gather(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
            return (self.shard(unit, number),), None

        return fsdp_pre_all_gather

    def shard(self, unit: Held, number: int) -> Tensor:
        """The padded shard of a unit's parameter on the device; its unit is asked for from the first one on."""
        param, place = self.params[unit.number][number], unit.shelf.plan.places[number]
        if number == 0:
            if unit.ready is not None:
                began = time.perf_counter()
                unit.ready.result()
                self.waited += time.perf_counter() - began
            if (event := self.shipped.get(unit.number)) is not None:
                torch.cuda.current_stream().wait_event(event)
            if self.tier != "none":
                wire = unit.shelf.wire
                assert wire is not None
                self.gathered.append(unit)
                source = wire if self.pager is None else self.pager.take(unit).view(wire.dtype)
                self.here = source.to(self.device, non_blocking=True)
                if self.pager is not None and self.here.is_cuda:
                    self.pager.leaves = torch.cuda.current_stream().record_event()
        if self.tier == "none":
            return padded_shard(param).view(param.padded_sharded_param_size)
        assert self.here is not None
        return self.here[place.wire : place.wire + place.padded].view(param.padded_sharded_param_size)

    @torch.no_grad()
    def put(self, unit: Held, first: int, last: int, masters: Tensor) -> None:
        """Elements `first` to `last` of the unit's masters, new, in the dtype of what is gathered."""
        for number, place in enumerate(unit.shelf.plan.places):
            begin, end = max(place.start, first), min(place.start + place.numel, last)
            if begin < end:
                here = self._target(unit, number, place)[begin - place.start : end - place.start]
                here.copy_(masters[begin - first : end - first].to(here.device, non_blocking=True))

    def _target(self, unit: Held, number: int, place: Place) -> Tensor:
        wire = unit.shelf.wire
        if wire is None:
            return padded_shard(self.params[unit.number][number])
        flat = wire if self.outgoing is None else self.outgoing[: wire.nbytes].view(wire.dtype)
        return flat[place.wire : place.wire + place.padded]

    def begin(self, unit: Held) -> None:
        """Before parts of `unit` are put: on the disk what does not change, or is padding, is written too."""
        if self.outgoing is not None and self.file is not None and unit.shelf.wire is not None:
            self.file.read(self.outgoing[: unit.shelf.wire.nbytes], unit.shelf.offsets["wire"])

    def seal(self, unit: Held) -> None:
        """All of `unit` was put."""
        if self.outgoing is not None and self.file is not None and unit.shelf.wire is not None:
            self.file.write(self.outgoing[: unit.shelf.wire.nbytes], unit.shelf.offsets["wire"])
        if self.device.type == "cuda" and self.tier == "none":
            self.shipped[unit.number] = torch.cuda.current_stream().record_event()


def _passes_on(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
    """The gathered tensor is the parameter."""
    return None if out is not None else (outputs[0], ())


class Pager:
    """Reads units from the disk into two buffers, the next one ahead: the one that followed last time."""

    def __init__(self, file: DirectFile, size: int, pin: bool):
        self.file = file
        self.slots = [page_buffer(size, pin) for _ in range(2)]
        self.pool = ThreadPoolExecutor(1, "pager")
        self.slot = 0  # in use
        self.leaves: Any = None  # an event: what is in use is on the device then
        self.ahead: tuple[Held, int, Future[Tensor]] | None = None
        self.trail: tuple[int, int] = (-1, -1)  # numbers of the last two units
        self.follows: dict[tuple[int, int], Held] = {}

    def take(self, unit: Held) -> Tensor:
        """The wire of `unit`, bytes, until the one after the next is taken."""
        ahead, self.ahead = self.ahead, None
        self.slot ^= 1
        data = ahead[2].result() if ahead else None
        is_found = ahead is not None and ahead[0] is unit and ahead[1] == unit.version
        if data is None or not is_found:
            data = self._read(unit, self.slot, self.leaves)  # what was there may be on its way to the device
        self.follows[self.trail] = unit
        self.trail = (self.trail[1], unit.number)
        if (guess := self.follows.get(self.trail)) is not None and guess is not unit:
            leaves, other = self.leaves, self.slot ^ 1
            self.ahead = (guess, guess.version, self.pool.submit(self._read, guess, other, leaves))
        return data

    def _read(self, unit: Held, slot: int, leaves: Any = None) -> Tensor:
        if leaves is not None:
            leaves.synchronize()
        if unit.ready is not None:  # its step began, and writes what is read here
            unit.ready.result()
        assert unit.shelf.wire is not None
        buffer = self.slots[slot][: unit.shelf.wire.nbytes]
        self.file.read(buffer, unit.shelf.offsets["wire"])
        return buffer


def masters_tree(model: nn.Module, masters: dict[nn.Parameter, nn.Parameter]) -> nn.Module:
    """A module that has `masters` under the names that `model` has their parameters under, and its config."""
    root: Any = nn.Module()
    root.config = model.config
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, (*path, last) = root, name.split(".")
        for step in path:
            if step not in dict(module.named_children()):
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(last, masters[parameter])
    return root
