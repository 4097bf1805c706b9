"""Storage tiers: the device, host memory or a disk. `fetch` reads a unit's shards for an all-gather, `store` writes
them from new masters; masters and moments in a file pass through host buffers.

Invariant: a fetch never uses a read made before the unit's last step. host_adamw.py waits for a running step before.

Streams: an all-gather reads in the stream that it runs in, after the event of the copy that it reads from; new masters
are copied to the device in the stream of the host's AdamW, and prefetched units in the prefetcher's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from shardbook.comm.torch_private import padded_shard
from shardbook.memory.direct_io import DirectFile, page_buffer
from shardbook.memory.host_state import FP32, STATE, OffloadedUnit, prefetches
from shardbook.parallel.layout import Layout

RING = 4  # buckets in flight between disk and AdamW
Updates = Iterable[tuple[int, int, Tensor]]  # first and last element in the flat buffer of masters, and these masters


class Device:
    """Shards stay where fully_shard has them."""

    def __init__(self, device: torch.device):
        self.is_cuda = device.type == "cuda"

    def fetch(self, unit: OffloadedUnit) -> list[Tensor]:
        """Returns the padded shard of each of the unit's parameters, flat, on the device: in every tier."""
        if unit.h2d_event is not None:
            torch.cuda.current_stream().wait_event(unit.h2d_event)
        return [padded_shard(param) for param in unit.params]

    def store(self, unit: OffloadedUnit, updates: Updates) -> None:
        """Writes new masters of `unit`, cast to the shards' dtype, to the tier: in every tier. Frozen parameters and
        padding stay."""
        cast_masters(unit, updates, [padded_shard(param) for param in unit.params])
        if self.is_cuda:
            unit.h2d_event = torch.cuda.current_stream().record_event()


class Host:
    """Shards are in host memory. fully_shard prefetches them, or, where it has one shard, the prefetcher here."""

    def __init__(self, device: torch.device, prefetcher: "Prefetcher | None"):
        self.device, self.prefetcher = device, prefetcher

    def fetch(self, unit: OffloadedUnit) -> list[Tensor]:
        if self.prefetcher is not None:
            return unit.split(self.prefetcher.fetch(unit))
        return unit.split(unit.flats["shards"].to(self.device, non_blocking=True))

    def store(self, unit: OffloadedUnit, updates: Updates) -> None:
        if self.prefetcher is not None:
            self.prefetcher.finish_reads(unit)
        cast_masters(unit, updates, unit.split(unit.flats["shards"]))


class Disk:
    """Shards are in a file: read by the prefetcher, written through a host buffer for `size` bytes."""

    def __init__(self, file: DirectFile, size: int, device: torch.device):
        self.file, self.buffer, self.prefetcher = file, page_buffer(size), Prefetcher(file, size, device)

    def fetch(self, unit: OffloadedUnit) -> list[Tensor]:
        return unit.split(self.prefetcher.fetch(unit))

    def store(self, unit: OffloadedUnit, updates: Updates) -> None:
        self.prefetcher.finish_reads(unit)
        shards, offset = unit.flats["shards"], unit.offsets["shards"]
        buffer = self.buffer[: shards.nbytes]
        self.file.read(buffer, offset)  # frozen parameters and padding are written back with the new shards
        cast_masters(unit, updates, unit.split(buffer.view(shards.dtype)))
        self.file.write(buffer, offset)


def build_tier(
    layout: Layout, units: Sequence[OffloadedUnit], file: DirectFile | None, device: torch.device
) -> Device | Host | Disk:
    """Returns the tier that `offload.params` names."""
    largest = max((unit.flats["shards"].nbytes for unit in units), default=0)
    if layout.offload.params == "none":
        return Device(device)
    if layout.offload.params == "cpu":
        return Host(device, Prefetcher(None, largest, device) if prefetches(layout) else None)
    assert file is not None
    return Disk(file, largest, device)


@torch.no_grad()
def cast_masters(unit: OffloadedUnit, updates: Updates, shards: Sequence[Tensor]) -> None:
    """Writes `updates` of the unit's masters to its parameters' padded `shards`, cast to their dtype."""
    for first, last, masters in updates:
        pinned = masters.is_pinned()  # masters in a file's mapping, after a load, are not
        for slot, shard in zip(unit.plan.slots, shards, strict=True):
            if shared := slot.overlap(first, last):
                target = shard[shared.start - slot.start : shared.stop - slot.start]
                target.copy_(masters[shared.start - first : shared.stop - first].to(target.device, non_blocking=pinned))


def own_stream(device: torch.device) -> None:
    """Gives the current thread a stream of its own on a GPU."""
    if device.type == "cuda":  # else the thread's first CUDA call makes a context on the node's first GPU
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())


class Prefetcher:
    """Copies units to the device and prefetches the next one: the unit that followed last time. Used for units on a
    disk, and where there is one shard: fully_shard gathers nothing there, and so prefetches nothing.

    It has two slots: one is gathered while a thread fills the other, in a stream of its own."""

    def __init__(self, file: DirectFile | None, size: int, device: torch.device):
        self.file, self.device, is_cuda = file, device, device.type == "cuda"
        self.pages = [page_buffer(size, is_cuda) for _ in range(2)] if file else []  # for reads from the disk
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)] if is_cuda else []
        self.h2d_events: list[Any] = [None, None]  # behind the copy from the host to the slot
        # events behind the slot's last reader; at first behind whatever used its memory before
        self.free = [torch.cuda.current_stream().record_event() if is_cuda else None for _ in range(2)]
        self.reader: Any = None  # the stream that gathers from the slot in use
        self.pool = ThreadPoolExecutor(1, "prefetcher", own_stream, (device,))
        self.slot = 0  # in use
        # reads by a unit's number and version, until the unit's next step rewrites the bytes that they read
        self.reads: dict[tuple[int, int], Future[tuple[Tensor, Any]]] = {}
        self.prefetched = (-1, -1)  # number and version of the unit whose read is for the other slot
        self.last_two = (-1, -1)  # numbers of units
        self.follows: dict[tuple[int, int], OffloadedUnit] = {}

    def fetch(self, unit: OffloadedUnit) -> Tensor:
        """Returns the padded shards of `unit` on the device. The current stream may read them until the next fetch."""
        if self.reader is not None:
            self.free[self.slot] = self.reader.record_event()
        self.slot ^= 1
        if self.prefetched != (unit.number, unit.version):
            self._request(unit, self.slot)
        self.follows[self.last_two] = unit
        self.last_two = (self.last_two[1], unit.number)
        read, h2d_event = self.reads[unit.number, unit.version].result()
        self.prefetched = (-1, -1)
        if (guess := self.follows.get(self.last_two)) is not None and guess is not unit:
            self.prefetched = (guess.number, guess.version)
            self._request(guess, self.slot ^ 1)
        if h2d_event is not None:
            self.reader = torch.cuda.current_stream()
            self.reader.wait_event(h2d_event)
        return read.view(unit.flats["shards"].dtype)

    def _request(self, unit: OffloadedUnit, slot: int) -> None:
        read = self.pool.submit(self._read, unit, slot, self.free[slot], unit.ready)
        self.reads[unit.number, unit.version] = read

    def finish_reads(self, unit: OffloadedUnit) -> None:
        """Waits for prefetches of `unit` from before its step, which overwrites the bytes that they read. Later
        prefetches wait for the step."""
        for number, version in [*self.reads]:
            if number == unit.number and version < unit.version:
                _, h2d_event = self.reads.pop((number, version)).result()
                if h2d_event is not None:
                    h2d_event.synchronize()

    def _read(self, unit: OffloadedUnit, slot: int, free: Any, ready: Future[None] | None) -> tuple[Tensor, Any]:
        if ready is not None:  # the unit's step is under way, and writes the bytes that are read here
            ready.result()
        source = unit.flats["shards"].view(torch.uint8)
        if self.file is not None:
            if self.h2d_events[slot] is not None:
                self.h2d_events[slot].synchronize()  # its last copy to the device may still run
            source = self.pages[slot][: source.nbytes]
            self.file.read(source, unit.offsets["shards"])
        if not self.slots:
            return source, None
        torch.cuda.current_stream().wait_event(free)
        view = self.slots[slot][: source.nbytes]
        view.copy_(source, non_blocking=True)
        self.h2d_events[slot] = torch.cuda.current_stream().record_event()
        return view, self.h2d_events[slot]


class DiskState:
    """Masters and moments in a file, stepped through RING host buffers: a bucket is updated while later ones are read
    and earlier ones written. `uploads`: masters are copied on to a GPU."""

    def __init__(self, file: DirectFile, bucket: int, is_cuda: bool, uploads: bool):
        self.file, self.bucket, self.uploads = file, bucket, uploads
        self.slots = [page_buffer(len(STATE) * bucket * FP32, is_cuda) for _ in range(RING)]
        self.reader, self.writer = ThreadPoolExecutor(1, "reads"), ThreadPoolExecutor(1, "writes")

    def buckets(self, unit: OffloadedUnit, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Yields `spans`, first and last elements, with the unit's STATE between these, to be updated in place."""
        ahead, size, written = len(self.slots) - 1, self.bucket * FP32, list[Future[None]]()

        def parts(number: int) -> list[tuple[Tensor, int]]:
            slot, (first, last) = self.slots[number % len(self.slots)], spans[number]
            cut = [slot[n * size : n * size + (last - first) * FP32] for n in range(len(STATE))]
            return [(flat, unit.offsets[name] + first * FP32) for name, flat in zip(STATE, cut, strict=True)]

        def move(transfer: Callable[[Tensor, int], None], number: int, before: Sequence[Future[None]] = ()) -> None:
            for future in before:
                future.result()
            for buffer, offset in parts(number):
                transfer(buffer, offset)

        reads = [self.reader.submit(move, self.file.read, number) for number in range(min(ahead, len(spans)))]
        for number, span in enumerate(spans):
            reads[number].result()
            yield *span, [buffer.view(torch.float32) for buffer, _ in parts(number)]
            if self.uploads:  # masters are copied from the slot, into which a later read goes
                torch.cuda.current_stream().record_event().synchronize()
            written.append(self.writer.submit(move, self.file.write, number))
            if (later := number + ahead) < len(spans):  # into the slot of the bucket before this one
                reads.append(self.reader.submit(move, self.file.read, later, written[number - 1 : number]))
        for future in written:
            future.result()
