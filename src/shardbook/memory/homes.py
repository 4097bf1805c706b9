"""Storage tiers (device, host or disk): where an all-gather reads each unit's shards, and where a step writes them.

Invariant: fully_shard asks at every all-gather, prefetched ones too, through its all-gather extension, so no caller
knows a tier. A gather waits for a running step of its unit, and never uses a read made before the unit's last step.

Streams: an all-gather reads in the stream that it runs in, after the event of the copy that it reads from; new masters
are copied to the device in the stream of the host's AdamW, and prefetched units in the pager's.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.comm.torch_private import gather_through, padded_shard
from shardbook.memory.direct_io import DirectFile, page_buffer
from shardbook.memory.shelf import BufferSlot, Held
from shardbook.model.weights import stored_buffers


class Homes:
    """Moves units' shards from their storage tier (`tier`: none, cpu or nvme) to the device and back. `params`: each
    unit's parameters as fully_shard has them (comm/torch_private.sharded_parameters), by the unit's number."""

    def __init__(
        self, params: dict[int, list[Any]], tier: str, file: DirectFile | None, device: torch.device, is_ahead: bool
    ):
        self.params, self.tier, self.file, self.device, self.is_ahead = params, tier, file, device, is_ahead
        self.pager: Pager | None = None
        self.outgoing: Tensor | None = None  # host buffer: a unit's shards on their way to the disk
        self.here: Tensor | None = None  # device buffer: shards of the unit that is being gathered
        self.shipped: dict[int, Any] = {}  # by unit: events behind the copy of its masters to the device
        self.waited = 0.0  # seconds that gathers waited for steps
        self.gathered: list[Held] = []  # units fetched from the host or the disk in this step

    def settle(self, units: list[Held]) -> None:
        """Makes fully_shard gather from here, and frees its own storage of shards that are not on the device."""
        for unit in units:
            for number, param in enumerate(self.params[unit.number]):
                gather_through(param, self._opens(unit, number), _passes_on)
                if self.tier != "none":
                    padded_shard(param).untyped_storage().resize_(0)
        if self.is_ahead:
            largest = max(unit.shelf.wire.nbytes for unit in units if unit.shelf.wire is not None)
            is_disk = self.tier == "nvme"
            self.outgoing = page_buffer(largest) if is_disk else None
            self.pager = Pager(self.file if is_disk else None, largest, self.device)

    def _opens(self, unit: Held, number: int) -> Callable[..., Any]:
        def fsdp_pre_all_gather(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
            return (self.shard(unit, number),), None

        return fsdp_pre_all_gather

    def shard(self, unit: Held, number: int) -> Tensor:
        """Returns the padded shard of a unit's parameter on the device. Number 0 waits for the unit's step, and fetches
        the whole unit from the host or the disk."""
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
                if self.pager is None:
                    self.here = wire.to(self.device, non_blocking=True)
                else:
                    self.here = self.pager.take(unit).view(wire.dtype)
        if self.tier == "none":
            return padded_shard(param).view(param.padded_sharded_param_size)
        assert self.here is not None
        return self.here[place.wire : place.wire + place.padded].view(param.padded_sharded_param_size)

    @torch.no_grad()
    def put(self, unit: Held, first: int, last: int, masters: Tensor) -> None:
        """Writes elements `first` to `last` of the unit's new `masters`, cast to the shards' dtype, to their tier."""
        pinned = masters.is_pinned()  # masters in a file's mapping, after a load, are not
        for number, place in enumerate(unit.shelf.plan.places):
            begin, end = max(place.start, first), min(place.start + place.numel, last)
            if begin < end:
                here = self._target(unit, number, place)[begin - place.start : end - place.start]
                here.copy_(masters[begin - first : end - first].to(here.device, non_blocking=pinned))

    def _target(self, unit: Held, number: int, place: BufferSlot) -> Tensor:
        wire = unit.shelf.wire
        if wire is None:
            return padded_shard(self.params[unit.number][number])
        flat = wire if self.outgoing is None else self.outgoing[: wire.nbytes].view(wire.dtype)
        return flat[place.wire : place.wire + place.padded]

    def begin(self, unit: Held) -> None:
        """Prepares `unit` for `put`; call it before the first part. On the disk tier it reads the unit's old shards,
        since frozen parameters and padding are written back with the new ones."""
        if self.pager is not None:
            self.pager.let_go(unit)
        if self.outgoing is not None and self.file is not None and unit.shelf.wire is not None:
            self.file.read(self.outgoing[: unit.shelf.wire.nbytes], unit.shelf.offsets["wire"])

    def seal(self, unit: Held) -> None:
        """Completes `unit` after its last `put`: writes it to the disk, or records the event of its copies."""
        if self.outgoing is not None and self.file is not None and unit.shelf.wire is not None:
            self.file.write(self.outgoing[: unit.shelf.wire.nbytes], unit.shelf.offsets["wire"])
        if (event := self.sent()) is not None:
            self.shipped[unit.number] = event

    def sent(self) -> Any:
        """Returns a new event behind the copies of masters to the device; None where no masters are copied there."""
        return (
            torch.cuda.current_stream().record_event() if self.device.type == "cuda" and self.tier == "none" else None
        )


def _passes_on(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
    """Returns the gathered tensor as the parameter: the all-gather extension changes nothing after the gather."""
    return None if out is not None else (outputs[0], ())


class Pager:
    """Copies units to the device and prefetches the next one: the unit that followed last time. Used for units on a
    disk, and where there is one shard: fully_shard gathers nothing there, and so prefetches nothing.

    It has two slots: one is gathered while a thread fills the other, in a stream of its own."""

    def __init__(self, file: DirectFile | None, size: int, device: torch.device):
        self.file, self.device, is_cuda = file, device, device.type == "cuda"
        self.pages = [page_buffer(size, is_cuda) for _ in range(2)] if file else []  # for reads from the disk
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)] if is_cuda else []
        self.landed: list[Any] = [None, None]  # events behind the copy from the host to the slot
        # events behind the slot's last reader; at first behind whatever used its memory before
        self.free = [torch.cuda.current_stream().record_event() if is_cuda else None for _ in range(2)]
        self.reader: Any = None  # the stream that gathers from the slot in use
        self.pool = ThreadPoolExecutor(1, "pager", self._begin)
        self.slot = 0  # in use
        self.ahead: tuple[Held, int, Future[tuple[Tensor, Any]]] | None = None
        # reads under way, by a unit's number and version, until the unit's next step rewrites the bytes that they read
        self.asked: dict[int, dict[int, Future[tuple[Tensor, Any]]]] = {}
        self.trail: tuple[int, int] = (-1, -1)  # numbers of the last two units
        self.follows: dict[tuple[int, int], Held] = {}

    def _begin(self) -> None:
        if self.slots:  # else the thread's first CUDA call makes a context on the node's first GPU
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream())

    def take(self, unit: Held) -> Tensor:
        """Returns the padded shards of `unit` as bytes. The current stream may read them until the next `take`."""
        if self.reader is not None:
            self.free[self.slot] = self.reader.record_event()
        ahead, self.ahead = self.ahead, None
        self.slot ^= 1
        if ahead is None or ahead[0] is not unit or ahead[1] != unit.version:
            ahead = (unit, unit.version, self._ask(unit, self.slot))
        self.follows[self.trail] = unit
        self.trail = (self.trail[1], unit.number)
        here, landed = ahead[2].result()
        if (guess := self.follows.get(self.trail)) is not None and guess is not unit:
            self.ahead = (guess, guess.version, self._ask(guess, self.slot ^ 1))
        if landed is not None:
            self.reader = torch.cuda.current_stream()
            self.reader.wait_event(landed)
        return here

    def _ask(self, unit: Held, slot: int) -> "Future[tuple[Tensor, Any]]":
        asked = self.pool.submit(self._bring, unit, slot, self.free[slot], unit.ready)
        self.asked.setdefault(unit.number, {})[unit.version] = asked
        return asked

    def let_go(self, unit: Held) -> None:
        """Waits for prefetches of `unit` from before its step, which overwrites the bytes that they read. Later
        prefetches wait for the step."""
        for version, asked in list(self.asked.get(unit.number, {}).items()):
            if version < unit.version:
                _, landed = asked.result()
                if landed is not None:
                    landed.synchronize()
                del self.asked[unit.number][version]

    def _bring(self, unit: Held, slot: int, free: Any, ready: Future[None] | None) -> tuple[Tensor, Any]:
        if ready is not None:  # the unit's step is under way, and writes the bytes that are read here
            ready.result()
        assert unit.shelf.wire is not None
        source = unit.shelf.wire.view(torch.uint8)
        if self.file is not None:
            if self.landed[slot] is not None:
                self.landed[slot].synchronize()  # its last copy to the device may still run
            source = self.pages[slot][: source.nbytes]
            self.file.read(source, unit.shelf.offsets["wire"])
        if not self.slots:
            return source, None
        torch.cuda.current_stream().wait_event(free)
        here = self.slots[slot][: source.nbytes]
        here.copy_(source, non_blocking=True)
        self.landed[slot] = torch.cuda.current_stream().record_event()
        return here, self.landed[slot]


def masters_tree(model: nn.Module, masters: dict[nn.Parameter, nn.Parameter]) -> nn.Module:
    """Returns a module with the model's config that holds each parameter's master under the parameter's name."""
    root: Any = nn.Module()
    root.config, root.files, root.vectors = model.config, model.files, model.vectors  # a model's, as files need them
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, (*path, last) = root, name.split(".")
        for step in path:
            if step not in dict(module.named_children()):
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(last, masters[parameter])
    for name, buffer in stored_buffers(model).items():
        owner, _, last = name.rpartition(".")
        root.get_submodule(owner).register_buffer(last, buffer)
    return root
