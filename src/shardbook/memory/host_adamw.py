"""AdamW on the host (CPU offload, DeepSpeed's CPUAdam): masters, moments and gradient sums lie in host memory or on a
disk; a thread steps them while the device goes on (ZeRO-Offload, arXiv 2101.06840, section 4; ZeRO-Infinity, arXiv
2104.07857, section 5).

Invariant: the bits of torch's fused AdamW over the same shards on a CPU: a tier changes where bytes lie and who waits
for whom, never a number. No unit is stepped before the norm of all gradients is known; an all-gather, prefetched ones
too, waits for its own unit alone. The bytes of gradients under way are bounded, on the device and on the host: backward
waits where the host adds them up too slowly.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardbook.comm.torch_private import (
    gather_through,
    padded_shard,
    sharded_parameters,
    start_fully_shard,
    whole_shape,
)
from shardbook.local_tensors import local_values
from shardbook.memory import host_state
from shardbook.memory.direct_io import DirectFile, page_buffer
from shardbook.memory.host_state import ALIGN, FP32, STAGINGS, STATE, OffloadedUnit, moved_bytes
from shardbook.memory.tiers import DiskState, build_tier, own_stream
from shardbook.model.causal_lm import CausalLM, materialize
from shardbook.optim import parameter_groups
from shardbook.optim.clip import parameters_norm, squares_of
from shardbook.optim.elementwise import step_adamw
from shardbook.optim.table import adamw_settings
from shardbook.parallel.sharding import ShardedModel
from shardbook.ranks.distributed import gather_results, raise_on_all_ranks
from shardbook.ranks.exits import RunFailed
from shardbook.recipe import Optim

BUCKET_BYTES = 48 * 2**20  # of state that AdamW takes at once
Groups = list[tuple[dict[str, Any], list[nn.Parameter]]]  # AdamW's settings, and the masters that have them


@dataclass
class Staging:
    """A host buffer through which gradients leave the device, with the state of the transfer under way in it."""

    buffer: Tensor  # bytes, pinned on a GPU
    source: Tensor | None = None  # on the device: its memory must not be reused before the copy is over
    accumulated: Future[None] | None = None  # done when it is added to the sums


class HostAdamW(torch.optim.Optimizer):
    """AdamW over `units`, whose steps run in a thread. Call `wait` before you read masters or moments."""

    kind = "AdamW"  # of the optimizer state, for checkpoints

    def __init__(
        self,
        tree: nn.Module,
        optim: Optim,
        units: Sequence[OffloadedUnit],
        sharded: ShardedModel,
        file: DirectFile | None,
        device: torch.device,
    ):
        """Takes `tree`: a module of all masters, in the model's order, in which norms are summed. Collective."""
        super().__init__(parameter_groups(tree, optim), adamw_settings(optim))
        self.tree, self.units, self.sharded, self.file, self.device = tree, units, sharded, file, device
        self.layout = layout = sharded.layout
        self.tier = build_tier(layout, units, file, device)
        self.is_last, self.coefficient = True, 1.0
        self.fetched: list[Tensor] = []  # on the device: shards of the unit that is being gathered
        self.gradients: dict[nn.Parameter, Tensor] = {}  # sums over micro-batches, by master
        self.squares: dict[nn.Parameter, Tensor] = {}  # sums of squared gradients, by master
        self.moved = Counter[str]()  # bytes moved in this step
        self.waited = self.seconds = 0.0  # seconds that all-gathers waited for steps; seconds of the host's steps
        self.bucket = max(ALIGN, BUCKET_BYTES // (len(STATE) * FP32) // ALIGN * ALIGN)
        is_cuda, main_threads = device.type == "cuda", torch.get_num_threads()
        self.stagings = [Staging(page_buffer(host_state.staging_bytes(layout), is_cuda)) for _ in range(STAGINGS)]
        self.d2h_stream = torch.cuda.Stream() if is_cuda else None
        threads = host_state.threads_here(layout.ranks_per_node, device.type)
        # Two threads: backward waits for gradients' buffers, so they are added up while another unit's step runs.
        self.accumulator, self.worker = (
            ThreadPoolExecutor(1, name, self._begin_thread, (threads,)) for name in ("gradients", "host-adamw")
        )
        for pool in (self.accumulator, self.worker):
            pool.submit(int).result()
        torch.set_num_threads(main_threads)  # a thread's first setting also sets every thread that has none yet
        uploads = is_cuda and layout.offload.params == "none"
        self.disk = DiskState(file, self.bucket, is_cuda, uploads) if file is not None else None
        for unit in units:
            for number, (master, param) in enumerate(zip(unit.masters, unit.params, strict=True)):
                if master.requires_grad:
                    moments = {name: param.to_sharded_dtensor(unit.view(name, number)) for name in STATE[1:]}
                    self.state[master] = {"step": torch.zeros(()), **moments}
                    self.gradients[master] = param.to_sharded_dtensor(unit.view("gradients", number))

    def _begin_thread(self, threads: int) -> None:
        torch.set_num_threads(threads)
        own_stream(self.device)

    # ---- gradients arrive, shards are gathered

    def begin_step(self) -> None:
        self.moved.clear()

    def begin(self, is_last: bool) -> None:
        """Notes that a micro-batch's backward begins; `is_last`: the last one of its step."""
        self.is_last = is_last

    def gather(self, unit: OffloadedUnit, number: int) -> Tensor:
        """Returns the padded shard of a unit's parameter on the device, as fully_shard gathers it. Number 0 waits for
        the unit's step, and fetches the whole unit."""
        if number == 0:
            if unit.ready is not None:
                began = time.perf_counter()
                unit.ready.result()
                self.waited += time.perf_counter() - began
            self.moved.update(moved_bytes(self.layout, unit.plan, gathers=1))
            self.fetched = self.tier.fetch(unit)
        return self.fetched[number].view(unit.params[number].padded_sharded_param_size)

    def receive(self, unit: OffloadedUnit, flat: Tensor) -> None:
        """Takes a micro-batch's reduced gradients of `unit` from fully_shard: flat, padded, of the trained parameters.
        Raises RunFailed where some are absent."""
        wanted = unit.plan.reduced
        if flat.numel() != wanted:  # torch before 2.13 leaves out parameters that no rank used
            raise RunFailed(
                f"offload.optimizer: {flat.numel():,} of {wanted:,} gradients of a unit came: a trained parameter was "
                "used by no rank; freeze it, or use torch 2.13"
            )
        unit.micros += 1
        self.moved["to_host"] += flat.nbytes
        self.stagings.append(staging := self.stagings.pop(0))  # the oldest
        if staging.accumulated is not None:
            staging.accumulated.result()
        local, d2h_event = staging.buffer[: flat.nbytes].view(flat.dtype), None
        staging.source = flat
        if self.d2h_stream is None:
            local.copy_(flat)
        else:
            # in a stream of its own: torch waits for the current one, that of hooks, at the end of backward
            self.d2h_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.d2h_stream):
                local.copy_(flat, non_blocking=True)
                d2h_event = self.d2h_stream.record_event()
            flat.record_stream(torch.cuda.current_stream())  # torch casts it in that stream, after this hook
        work = self.accumulator.submit(
            self._accumulate, staging, d2h_event, unit, local, unit.micros == 1, self.is_last
        )
        staging.accumulated = unit.accumulated = work

    @torch.no_grad()
    def _accumulate(
        self, staging: Staging, d2h_event: Any, unit: OffloadedUnit, flat: Tensor, is_first: bool, is_last: bool
    ) -> None:
        if d2h_event is not None:
            d2h_event.synchronize()
        staging.source = None
        for number, (slot, master) in enumerate(zip(unit.plan.slots, unit.masters, strict=True)):
            if slot.reduced < 0:
                continue
            total = unit.view("gradients", number)
            arrived = flat[slot.reduced : slot.reduced + slot.numel].view(slot.shape)
            if is_first:
                total.copy_(arrived)
            else:
                total += arrived
            if is_last:
                self.squares[master] = squares_of([total]).sum()

    # ---- the step

    def clip(self, max_norm: float) -> Tensor:
        """Returns the norm of all gradients, an fp32 scalar on the host; the step scales gradients down to `max_norm`
        (0: it does not). It first sums partial gradients over the ranks that have them. Collective."""
        for staging in self.stagings:  # earlier gradients were waited for when these arrived
            if staging.accumulated is not None:
                staging.accumulated.result()
        for master in self.squares:
            master.grad = self.gradients[master]
        summed, sent_bytes = self.sharded.sum_partial_gradients(self.tree)
        self.moved.update(to_device=sent_bytes, to_host=sent_bytes)
        for master in summed:
            self.squares[master] = squares_of([local_values(self.gradients[master])]).sum()
        norm = parameters_norm(self.sharded.parameters_of(self.tree), self.squares)
        self.coefficient = min(1.0, float(max_norm / (norm + 1e-6))) if max_norm else 1.0
        return norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Begins the step of every unit that has gradients, in forward order."""
        for unit in self.units:
            if unit.micros:
                unit.version += 1
                self.moved.update(moved_bytes(self.layout, unit.plan, steps=1))
                work = (unit, self._settings(), self.coefficient, unit.accumulated)
                unit.ready = self.worker.submit(self._step, *work)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Makes the next gradients that arrive the first of a step."""
        super().zero_grad()
        self.squares = {}
        for unit in self.units:
            unit.micros, unit.accumulated = 0, None

    def wait(self) -> None:
        """Waits until every step that began is done, on the device too. Raises the error of a step that failed."""
        for unit in self.units:
            if unit.ready is not None:
                unit.ready.result()
        for unit in self.units:
            if unit.h2d_event is not None:
                unit.h2d_event.synchronize()

    def _settings(self) -> Groups:
        """Returns the groups' settings as they are now, for a step that runs later."""
        keys = ("lr", "betas", "eps", "weight_decay")
        return [({key: group[key] for key in keys}, group["params"]) for group in self.param_groups]

    @torch.no_grad()
    def _step(self, unit: OffloadedUnit, groups: Groups, coefficient: float, accumulated: Future[None] | None) -> None:
        if accumulated is not None:
            accumulated.result()
        began = time.perf_counter()
        self.tier.store(unit, self._updates(unit, groups, coefficient))
        for master in unit.masters:
            if master.requires_grad:
                self.state[master]["step"] += 1
        self.seconds += time.perf_counter() - began

    def _updates(self, unit: OffloadedUnit, groups: Groups, coefficient: float) -> Iterator[tuple[int, int, Tensor]]:
        """Steps `unit` a bucket at a time. Yields the first and last element of each and its new masters."""
        end, slots = unit.plan.trained, dict(zip(unit.masters, unit.plan.slots, strict=True))
        trained = [
            (settings, [(slots[master], self.state[master]["step"]) for master in masters if master in slots])
            for settings, masters in groups
        ]
        spans = [(first, min(first + self.bucket, end)) for first in range(0, end, self.bucket)]
        spans_of_unit = ((first, last, [unit.flats[name][first:last] for name in STATE]) for first, last in spans)
        for first, last, state in self.disk.buckets(unit, spans) if self.disk else spans_of_unit:
            flats = [*state, unit.flats["gradients"][first:last]]
            if coefficient != 1.0:
                flats[3].mul_(coefficient)
            for settings, slots_and_steps in trained:
                cut = [(part, step) for slot, step in slots_and_steps if (part := slot.overlap(first, last))]
                if cut:
                    tensors = [[flat[part.start - first : part.stop - first] for part, _ in cut] for flat in flats]
                    step_adamw(tensors, [step.clone() for _, step in cut], **settings)  # clones: it adds 1 to them
            yield first, last, flats[0]

    # ---- masters are read and loaded, bytes are counted

    def masters(self) -> nn.Module:
        """Returns a module of the parameters at rest, fp32, by the model's names. Waits for every step that began."""
        self.wait()
        return self.tree

    def upload_shards(self) -> None:
        """Casts loaded masters to the shards that are gathered, and flushes masters and moments to the disk."""
        self.wait()
        if self.file is not None:
            self.file.flush()
        for unit in self.units:
            unit.version += 1
            self.tier.store(unit, [(0, unit.flats["masters"].numel(), unit.flats["masters"])])
        if self.file is not None:
            self.file.flush()

    def take_metrics(self) -> dict[str, float]:
        """Returns the bytes that the last step moved, the seconds since the last call that all-gathers waited for the
        host's steps, and the seconds that these steps took. Call it between a step and its zero_grad."""
        seconds = {"wait": self.waited, "step": self.seconds}
        self.waited = self.seconds = 0.0
        metrics = {f"perf/offload_{what}_seconds": value for what, value in seconds.items()}
        return metrics | {f"offload/{what}_bytes": float(count) for what, count in self.moved.items()}

    def bytes(self) -> dict[str, int]:
        """Returns the measured bytes of offloaded state: `host` and, where a file is used, `disk`."""
        flats = [flat for unit in self.units for name, flat in unit.flats.items() if name not in unit.offsets]
        host = sum(flat.nbytes for flat in [*flats, *(staging.buffer for staging in self.stagings)])
        return {"host": host} | ({"disk": self.file.size} if self.file else {})


def offload_state(model: CausalLM, sharded: ShardedModel, optim: Optim, device: torch.device) -> HostAdamW:
    """Gives the model memory on the device, host or disk, as its layout's offload says, and returns its optimizer.
    Raises RecipeError, the same on every rank, where host or disk of a node have too little room. Collective."""
    offload, rank, of_node = sharded.layout.offload, dist.get_rank(), sharded.layout.ranks_per_node
    sizes = gather_results(lambda: host_state.offloaded_bytes(sharded.layout, rank))  # stages of a pipeline differ
    # one rank a node, before any of its ranks reserves: else a late rank counts what others reserved as not free
    of_this_node = sizes[rank : rank + of_node] if rank % of_node == 0 else []
    raise_on_all_ranks(lambda: host_state.check_room(offload, of_this_node) if of_this_node else None)
    disk = sizes[rank].get("disk")
    file = raise_on_all_ranks(lambda: DirectFile(Path(offload.path), disk) if disk is not None else None)
    materialize(model, device)
    optimizer = build_host_adamw(model, sharded, optim, device, file)
    for part in (sharded, *sharded.chunks):
        part.offloaded = optimizer
    return optimizer


def build_host_adamw(
    model: CausalLM, sharded: ShardedModel, optim: Optim, device: torch.device, file: DirectFile | None
) -> HostAdamW:
    """Returns the optimizer of a materialized `model`, with host buffers of every unit. fully_shard then hands it the
    reduced gradients, and gathers shards from its tier. Collective."""
    layout = sharded.layout
    for chunk in layout.chunks:
        start_fully_shard(chunk.units[-1].handle)
    params = [sharded_parameters(unit.handle) if unit.shapes else [] for unit in layout.units]
    # units with their parameters in the order in which fully_shard concatenates them
    ordered = [
        replace(
            unit,
            shapes=tuple(map(whole_shape, members)),
            trained=tuple(p.sharded_param.requires_grad for p in members),
        )
        for unit, members in zip(layout.units, params, strict=True)
    ]
    assert all(sorted(a.shapes) == sorted(b.shapes) for a, b in zip(layout.units, ordered, strict=True))
    masters, units = dict[nn.Parameter, nn.Parameter](), []
    for unit in host_state.allocate_units(layout, ordered, dist.get_rank(), file, pin=device.type == "cuda"):
        unit.params = params[unit.number]
        for number, param in enumerate(unit.params):
            master = param.to_sharded_dtensor(unit.view("masters", number))
            unit.masters.append(nn.Parameter(master, requires_grad=param.sharded_param.requires_grad))
            masters[param.sharded_param] = unit.masters[-1]
            if layout.offload.params != "none":
                padded_shard(param).untyped_storage().resize_(0)
        units += [unit] * bool(unit.params)
    assert masters.keys() == set(model.parameters())
    optimizer = HostAdamW(host_state.masters_tree(model, masters), optim, units, sharded, file, device)
    for unit in units:
        layout.units[unit.number].handle.set_all_reduce_hook(partial(optimizer.receive, unit))
        for number, param in enumerate(unit.params):
            gather_through(param, partial(optimizer.gather, unit, number))
            if param.sharded_param.requires_grad:
                param.sharded_param.register_post_accumulate_grad_hook(_drop)
    return optimizer


def _drop(parameter: torch.Tensor) -> None:
    """Frees the device's copy of a gradient, rounded to the shard's dtype: the host has the unrounded one already."""
    parameter.grad = None
