"""AdamW on the host: master weights, moments and gradient sums lie in host memory or on a disk, and a thread steps them
while the device goes on (ZeRO-Offload, arXiv 2101.06840, section 4; ZeRO-Infinity, arXiv 2104.07857, section 5).

Invariant: the bits of torch's fused AdamW over the same shards on a CPU. No unit is stepped before the norm of all
gradients is known to be finite; an all-gather waits for its own unit alone. The bytes of gradients under way are
bounded, on the device and on the host: backward waits where the host adds them up too slowly.
"""

import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.memory.direct_io import page_buffer
from shardbook.memory.homes import Homes
from shardbook.memory.shelf import ALIGN, FP32, STAGINGS, BufferSlot, Held, staging_bytes, stepped_bytes
from shardbook.optim import gradient_norm, squares_of
from shardbook.optim.elementwise import step_adamw
from shardbook.parallel.layout import Layout
from shardbook.ranks.exits import RunFailed


@dataclass
class Staging:
    """A host buffer through which gradients leave the device, with the state of the transfer under way in it."""

    buffer: Tensor  # bytes, pinned on a GPU
    source: Tensor | None = None  # on the device: its memory must not be reused before the copy is over
    taken: Future[None] | None = None  # added to the sums


class HostAdamW(torch.optim.Optimizer):
    """AdamW over `units`, whose steps run in a thread. Call `wait` before you read masters or moments."""

    kind = "AdamW"  # of the optimizer state, for checkpoints

    def __init__(
        self,
        groups: list[dict[str, Any]],
        settings: dict[str, Any],
        units: list[Held],
        homes: Homes,
        order: list[nn.Parameter],
        layout: Layout,
        threads: int,
    ):
        """Takes `order`: all masters in the model's order, in which norms are summed."""
        super().__init__(groups, settings)
        self.layout, offload = layout, layout.offload
        self.moved, self.seconds = Counter[str](), 0.0  # bytes moved in this step; seconds of the host's steps
        self.units, self.homes, self.is_last, self.coefficient = units, homes, True, 1.0
        self.order = order
        self.file = homes.file if offload.optimizer == "nvme" else None
        self.bucket = max(ALIGN, offload.bucket_mb * 2**20 // (3 * FP32) // ALIGN * ALIGN)
        is_cuda, own = homes.device.type == "cuda", torch.get_num_threads()
        self.stagings = [Staging(page_buffer(staging_bytes(layout), is_cuda)) for _ in range(STAGINGS)]
        self.leaving = torch.cuda.Stream() if is_cuda else None
        # two threads: gradients are added up beside the steps, since backward waits for the buffers that they leave
        self.taker, self.worker = (
            ThreadPoolExecutor(1, name, lambda: self._begin(threads)) for name in ("gradients", "host-adamw")
        )
        for pool in (self.taker, self.worker):
            pool.submit(int).result()
        torch.set_num_threads(own)  # a thread's first setting also sets every thread that has none yet
        if self.file is not None:
            self.slots = [page_buffer(3 * self.bucket * FP32, is_cuda) for _ in range(offload.ring)]
            self.reader, self.writer = ThreadPoolExecutor(1, "reads"), ThreadPoolExecutor(1, "writes")
        for unit in units:
            for number, (master, param) in enumerate(zip(unit.masters, homes.params[unit.number], strict=True)):
                if master.requires_grad:
                    moments = (unit.shelf.view(flat, number) for flat in (unit.shelf.first, unit.shelf.second))
                    first, second = map(param.to_sharded_dtensor, moments)
                    self.state[master] = {"step": torch.zeros(()), "exp_avg": first, "exp_avg_sq": second}

    def _begin(self, threads: int) -> None:
        torch.set_num_threads(threads)
        if self.homes.device.type == "cuda":
            torch.cuda.set_device(self.homes.device)
            torch.cuda.set_stream(torch.cuda.Stream())

    # ---- gradients arrive

    def arrive(self, unit: Held, flat: Tensor) -> None:
        """Takes a micro-batch's reduced gradients of `unit` from fully_shard: flat, padded, of the trained parameters.
        Raises RunFailed where some are absent."""
        wanted = unit.shelf.plan.reduced
        if flat.numel() != wanted:  # torch before 2.13 leaves out parameters that no rank used
            raise RunFailed(
                f"offload.optimizer: {flat.numel():,} of {wanted:,} gradients of a unit came: a trained parameter was "
                "used by no rank; freeze it, or use torch 2.13"
            )
        unit.arrivals += 1
        self.moved["to_host"] += flat.nbytes
        staging = self.stagings.pop(0)  # the oldest
        self.stagings.append(staging)
        if staging.taken is not None:
            staging.taken.result()
        local, landed = staging.buffer[: flat.nbytes].view(flat.dtype), None
        staging.source = flat
        if self.leaving is None:
            local.copy_(flat)
        else:
            # in a stream of its own: torch waits for the current one, that of hooks, at the end of backward
            self.leaving.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.leaving):
                local.copy_(flat, non_blocking=True)
                landed = self.leaving.record_event()
            flat.record_stream(torch.cuda.current_stream())  # torch casts it in that stream, after this hook
        work = (unit, local, unit.arrivals == 1, self.is_last)
        staging.taken = unit.arrived = self.taker.submit(self._land, staging, landed, *work)

    def _land(self, staging: Staging, landed: Any, *work: Any) -> None:
        if landed is not None:
            landed.synchronize()
        staging.source = None
        self._take_in(*work)

    @torch.no_grad()
    def _take_in(self, unit: Held, flat: Tensor, is_first: bool, is_last: bool) -> None:
        for number, place in enumerate(unit.shelf.plan.places):
            if place.reduced < 0:
                continue
            total = unit.shelf.gradients[place.start : place.start + place.numel]
            came = flat[place.reduced : place.reduced + place.numel]
            if is_first:
                total.copy_(came)
            else:
                total += came
            if is_last:
                unit.squares[unit.masters[number]] = squares_of([total.view(place.shape)])[0]

    # ---- the step

    def clip(self, max_norm: float) -> Tensor:
        """Returns the norm of all gradients, an fp32 scalar on the host; the step scales gradients down to `max_norm`
        (0: it does not). Collective."""
        for staging in self.stagings:  # earlier gradients were waited for when these arrived
            if staging.taken is not None:
                staging.taken.result()
        found = {master: squares for unit in self.units for master, squares in unit.squares.items()}
        own = [master for master in self.order if master in found]
        norm = gradient_norm([*own], [found[master] for master in own])
        self.coefficient = min(1.0, float(max_norm / (norm + 1e-6))) if max_norm else 1.0
        return norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Begins the step of every unit that has gradients, in forward order."""
        for unit in self.units:
            if unit.arrivals:
                self._submit(unit)

    def _submit(self, unit: Held) -> None:
        unit.version += 1
        self.moved.update(stepped_bytes(self.layout, unit.shelf.plan))
        unit.ready = self.worker.submit(self._step, unit, self._rates(), self.coefficient, unit.arrived)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Makes the next gradients that arrive the first of a step."""
        for unit in self.units:
            unit.arrivals, unit.arrived, unit.squares = 0, None, {}

    def wait(self) -> None:
        """Waits until every step that began is done, on the device too. Raises the error of a step that failed."""
        for unit in self.units:
            if unit.ready is not None:
                unit.ready.result()
        for event in self.homes.shipped.values():
            event.synchronize()

    def _rates(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Returns each master's settings as they are now, for a step that runs later."""
        keys = ("lr", "betas", "eps", "weight_decay")
        groups = [({key: group[key] for key in keys}, group["params"]) for group in self.param_groups]
        return {master: settings for settings, masters in groups for master in masters}

    @torch.no_grad()
    def _step(
        self, unit: Held, rates: dict[nn.Parameter, dict[str, Any]], coefficient: float, arrived: Future[None] | None
    ) -> None:
        if arrived is not None:
            arrived.result()
        shelf, end = unit.shelf, unit.shelf.plan.trained
        trained = [
            (place, rates[master], self.state[master]["step"])
            for place, master in zip(shelf.plan.places, unit.masters, strict=True)
            if master.requires_grad
        ]

        def update(first: int, last: int, flats: list[Tensor]) -> None:
            """Steps elements `first` to `last` of the unit. `flats`: masters, first and second moments of these."""
            flats = [*flats, shelf.gradients[first:last]]
            if coefficient != 1.0:
                flats[3].mul_(coefficient)
            for decay in {settings["weight_decay"] for _, settings, _ in trained}:
                cut = [
                    (*span, step)
                    for place, settings, step in trained
                    if settings["weight_decay"] == decay and (span := _overlap(place, first, last))
                ]
                if cut:
                    settings = next(other for _, other, _ in trained if other["weight_decay"] == decay)
                    tensors = [[flat[a:b] for a, b, _ in cut] for flat in flats]
                    step_adamw(tensors, [step.clone() for *_, step in cut], **settings)  # clones: it adds 1 to them
            self.homes.put(unit, first, last, flats[0])

        began = time.perf_counter()
        self.homes.begin(unit)
        spans = [(first, min(first + self.bucket, end)) for first in range(0, end, self.bucket)]
        if self.file is None:
            for first, last in spans:
                update(first, last, [flat[first:last] for flat in (shelf.masters, shelf.first, shelf.second)])
        else:
            self._through_disk(unit, spans, update)
        self.homes.seal(unit)
        for *_, step in trained:
            step += 1
        self.seconds += time.perf_counter() - began

    def _through_disk(self, unit: Held, spans: list[tuple[int, int]], update: Any) -> None:
        """Steps buckets while later ones are read and earlier ones written. A slot holds three parts of a bucket."""
        file, names, size = self.file, ("masters", "first", "second"), self.bucket * FP32
        assert file is not None

        def parts(slot: Tensor, first: int, last: int) -> list[tuple[Tensor, int]]:
            count = (last - first) * FP32
            return [
                (slot[n * size : n * size + count], unit.shelf.offsets[name] + first * FP32)
                for n, name in enumerate(names)
            ]

        def read(number: int) -> None:
            if (before := number - len(self.slots)) >= 0:
                written[before].result()
            for buffer, offset in parts(self.slots[number % len(self.slots)], *spans[number]):
                file.read(buffer, offset)

        def write(number: int) -> None:
            for buffer, offset in parts(self.slots[number % len(self.slots)], *spans[number]):
                file.write(buffer, offset)

        written: list[Future[None]] = []
        ahead = len(self.slots) - 1
        reads = {number: self.reader.submit(read, number) for number in range(min(ahead, len(spans)))}
        for number, (first, last) in enumerate(spans):
            reads.pop(number).result()
            slot = self.slots[number % len(self.slots)]
            update(first, last, [buffer.view(torch.float32) for buffer, _ in parts(slot, first, last)])
            if (sent := self.homes.sent()) is not None:
                sent.synchronize()  # masters are copied from the slot, into which a later read goes
            written.append(self.writer.submit(write, number))
            if number + ahead < len(spans):
                reads[number + ahead] = self.reader.submit(read, number + ahead)
        for future in written:
            future.result()


def _overlap(place: BufferSlot, first: int, last: int) -> tuple[int, int] | tuple[()]:
    """Returns the range of `place` between `first` and `last`, counted from `first`; an empty tuple where none is."""
    begin, end = max(place.start, first), min(place.start + place.numel, last)
    return (begin - first, end - first) if begin < end else ()
