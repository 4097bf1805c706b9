"""The events of one rank in one optimizer step, in the order in which the rank issues them.

Invariant: order and bytes follow the layout's own rules, which sharding.py and pipeline.py apply: its schedule, the
order in which units run (`run_order`), what a pass frees and reduces. Traffic, memory, seconds and offloaded bytes are
folds over this list. It is made without a process group; the units may lie on the meta device.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import nn

from shardbook.arithmetic import ceil_div, round_up
from shardbook.axes import DP_REPLICATE, DP_SHARD, EP, INSIDE, PP, PP_BACKWARD, PP_ENDS, PP_FORWARD, TP, rank_along
from shardbook.comm.quantize import buffer_bytes
from shardbook.optim.muon import WIRE_BYTES
from shardbook.optim.table import OPTIMIZERS
from shardbook.parallel.buckets import bucket_units
from shardbook.parallel.dispatch import COUNT_BYTES
from shardbook.parallel.layout import Layout
from shardbook.parallel.per_layout import cached_per_layout
from shardbook.parallel.schedule import Action
from shardbook.parallel.units import Unit, shard_rows

COUNTS_BYTES = 5 * 8  # the step's counts: five fp64 numbers summed over all ranks
FLAGS_BYTES = 4 * 8  # its flags, a sum of their own
NORM_BYTES = 8  # the squared gradient norm, one fp64 number

Collectives = tuple[tuple[str, str, int], ...]  # operation, mesh axis, payload bytes


class Event(NamedTuple):
    """One action of a rank: `compute` of a unit, its `gather`, `free`, `reduce` (its gradients are summed over ranks)
    or `accumulate` (they are kept as they are), an `exchange` between units, `receive` and `send` along pp; `fetch`,
    `arrive` and `update` of an offloaded unit (shards to the device, gradients to the host, its step there); the `sum`
    of replicated gradients, the `norm`, the `step`, and the next step's `counts`, with those of experts."""

    what: str
    unit: Unit | None = None
    sends: Collectives = ()


class Pass(NamedTuple):
    """The events of one micro-batch's forward, or backward, through one chunk of layers."""

    action: Action
    events: Sequence[Event]  # the same object for passes that are alike


@dataclass(frozen=True)
class BlockTraffic:
    """The messages of a micro-batch along tp and cp inside a pass, and along pp after it. By default none."""

    layers: int = 0  # of the whole model
    recomputed: frozenset[int] = frozenset()  # numbers of blocks that run again in backward
    forward: Collectives = ()  # of a block
    backward: Collectives = ()
    recompute: Collectives = ()  # of the backward of a block that is recomputed
    first: tuple[Collectives, Collectives] = ((), ())  # backward and recompute of the model's first block
    embedding: tuple[Collectives, Collectives] = ((), ())  # of its forward, and backward
    loss: tuple[Collectives, Collectives] = ((), ())  # with the last norm before it
    # of the experts of each block that has some, in order, or of one where all are alike: forward, backward, recompute
    experts: tuple[tuple[Collectives, Collectives, Collectives], ...] = ()
    beside: "BlockTraffic | None" = None  # of a frozen model that runs forward beside this one, where the loss is
    stream_bytes: int = 0  # of the activations that go to the next pipeline stage, and of their gradient


# ---- the volume of one collective


def gathering(layout: Layout, unit: Unit, is_forward: bool) -> Collectives:
    """Returns the all-gather of `unit`: in the compute dtype, or quantized. In backward secondary shards are gathered
    inside their group, unquantized."""
    shards, switches = layout.shards_of(unit), layout.switches
    if shards == 1:
        return ()
    full, is_secondary = unit.padded_numel(shards), switches.secondary and not is_forward
    payload = full * layout.dtype("params").itemsize
    if switches.weights_bits and not is_secondary:
        payload = shards * buffer_bytes(full // shards, switches.weights_bits)
    return (("all_gather", INSIDE if is_secondary else layout.counted_axis(unit, DP_SHARD), payload),)


def reduction(layout: Layout, unit: Unit) -> Collectives:
    """Returns the collectives that reduce gradients of `unit` over its shards: a reduce-scatter, or qgZ's hops."""
    shards = layout.shards_of(unit)
    trained = unit.padded_numel(shards, trained_only=True)
    if shards == 1 or not trained:
        return ()
    if not layout.hops:
        return (("reduce_scatter", layout.counted_axis(unit, DP_SHARD), trained * layout.dtype("reduce").itemsize),)
    hops, slices = list[tuple[str, str, int]](), shards
    for axis, ranks, bits in layout.hops:  # each leaves a rank with one slice of every `ranks`
        hops.append(("all_to_all", axis, slices * buffer_bytes(trained // shards, bits)))
        slices //= ranks
    return tuple(hops)


def replica_sum(layout: Layout, units: Sequence[Unit]) -> Collectives:
    """Returns the all-reduce across replicas of a rank's shards of the gradients of `units` together."""
    shards = layout.shards_of(units[0])
    numel = sum(unit.padded_numel(shards, trained_only=True) for unit in units) // shards
    if layout.replicas_of(units[0]) == 1 or not numel:
        return ()
    return (("all_reduce", layout.counted_axis(units[0], DP_REPLICATE), numel * layout.dtype("reduce").itemsize),)


def replicated_sum(layout: Layout) -> Collectives:
    """Returns the all-reduce along tp of the gradients of what is the same there."""
    return (("all_reduce", TP, layout.replicated_numel * layout.dtype("master").itemsize),)


def muon_exchanges(layout: Layout) -> Collectives:
    """Returns Muon's all-to-alls: of each shape as many matrices at a time as there are shards, there and back."""
    exchanges: Collectives = ()
    shapes = Counter(shape for unit in layout.units for shape in unit.trained_matrices)
    for shape, count in shapes.items() if layout.shards > 1 else ():
        padded = round_up(shape[0], layout.shards) * prod(shape[1:]) * WIRE_BYTES
        exchanges += (("all_to_all", DP_SHARD, padded),) * (2 * ceil_div(count, layout.shards))
    return exchanges


def tied_numel(layout: Layout, rank: int) -> int:
    """Returns the elements on the global `rank` of a weight tied over both ends of a pipeline: the matrix of the first
    stage's embedding, of the last stage's head."""
    end = layout.chunks[0 if layout.pipeline.has_first_pp_stage else -1]
    units = (unit for unit in end.units if not unit.forward_only and not unit.in_block)
    shape = max((shape for unit in units for shape in unit.shapes), key=len)
    return shard_rows(shape[0], layout.shards, rank_along(layout.sizes, DP_SHARD, rank)) * prod(shape[1:])


# ---- the list


class _Chunk:
    """The passes through one chunk of layers."""

    def __init__(self, layout: Layout, number: int, chunk_layout: Layout, layers: int):
        pipeline, self.layout = layout.pipeline, chunk_layout
        self.is_first, self.is_last = pipeline.is_first(number), pipeline.is_last(number)
        self.passes: dict[tuple[object, ...], tuple[list[Event], frozenset[Unit]]] = {}
        numbers = list(pipeline.own_layers(number, layers))
        blocks = (unit for unit in chunk_layout.units if any(unit.is_block_matrix) and not unit.is_experts)
        units = [unit for unit in blocks if not unit.forward_only]
        self.first_block = units[0] if units else None
        self.of_blocks = {*units, *(unit for unit in chunk_layout.units if unit.in_block and not unit.forward_only)}
        self.number_of = dict(zip(units, numbers, strict=False))  # of a unit that is a block, in the whole model
        # of each unit of experts: its place among all of this rank, and the number of its block
        self.experts = {
            unit: (place, next(self.number_of.get(block, 0) for block in units if unit.modules[0] in block.inside))
            for place, unit in enumerate(layout.expert_units)
            if unit in chunk_layout.units
        }
        frozen = [unit for unit in chunk_layout.units if unit.forward_only and not unit.is_root_like]
        self.blocks_beside = [unit for unit in frozen if not isinstance(unit.modules[0], nn.Embedding)]

    def run(
        self, is_forward: bool, is_last: bool, gathered: frozenset[Unit], inside: BlockTraffic
    ) -> tuple[list[Event], frozenset[Unit]]:
        """Returns the events of a pass that begins with the units `gathered`, and those with which it ends; `is_last`:
        the backward is its step's last."""
        key = is_forward, is_last, gathered, inside
        if key not in self.passes:
            now = set(gathered)
            events = list(self._forward(now, inside) if is_forward else self._backward(now, is_last, inside))
            begins, ends = (self.is_first, self.is_last) if is_forward else (self.is_last, self.is_first)
            passed = (("p2p", PP_FORWARD if is_forward else PP_BACKWARD, inside.stream_bytes),)
            events[:0] = [] if begins else [Event("receive")]
            events += [] if ends else [Event("send", None, passed)]
            self.passes[key] = events, frozenset(now)
        return self.passes[key]

    def _gather(self, units: Iterable[Unit], now: set[Unit], is_forward: bool) -> Iterator[Event]:
        for unit in units:
            if unit.numel and unit not in now and (is_forward or unit.read_in_backward):
                now.add(unit)
                if self.layout.offload.params != "none":
                    yield Event("fetch", unit)
                yield Event("gather", unit, gathering(self.layout, unit, is_forward))

    def _free(self, unit: Unit, now: set[Unit]) -> Iterator[Event]:
        if unit in now:
            now.remove(unit)
            yield Event("free", unit)

    def _exchanges(self, unit: Unit, inside: BlockTraffic, is_forward: bool) -> Collectives:
        """Returns what `unit` sends inside a pass, where it is a block."""
        if inside.beside and unit in self.blocks_beside:
            return inside.beside.forward
        if unit in self.experts and inside.experts:
            place, number = self.experts[unit]
            forward, backward, recompute = inside.experts[place % len(inside.experts)]
            return forward if is_forward else recompute if number in inside.recomputed else backward
        if unit not in self.number_of:
            return ()
        if is_forward:
            return inside.forward
        number = self.number_of[unit]
        backward, recompute = inside.first if number == 0 else (inside.backward, inside.recompute)
        return recompute if number in inside.recomputed else backward

    def _forward(self, now: set[Unit], inside: BlockTraffic) -> Iterator[Event]:
        order, replicated, running = self.layout.run_order(is_forward=True), self.layout.is_replicated, list[Unit]()

        def leave(unit: Unit) -> Iterator[Event]:
            if unit.numel:
                yield Event("compute", unit, () if unit.is_root_like else self._exchanges(unit, inside, True))
            if unit.reshard_after_forward and not replicated:
                yield from self._free(unit, now)

        beside = inside.beside if self.blocks_beside else None
        for unit, ahead in order:
            if beside and unit is self.blocks_beside[0]:
                yield Event("exchange", None, beside.embedding[0])
            if unit is self.first_block and self.is_first:
                yield Event("exchange", None, inside.embedding[0])
            while running and unit.modules[0] not in running[-1].inside and not running[-1].is_root_like:
                yield from leave(running.pop())
            if beside and not unit.forward_only and any(each.forward_only for each in running):
                yield Event("exchange", None, beside.loss[0])
                beside = None
            # where each rank has all parameters they are cast at once
            yield from self._gather((each for each, _ in order) if replicated else (unit, *ahead), now, True)
            running.append(unit)
        while running and not running[-1].is_root_like:
            yield from leave(running.pop())
        if self.is_last:
            yield Event("exchange", None, inside.loss[0])
        while running:
            yield from leave(running.pop())

    def _backward(self, now: set[Unit], is_last: bool, inside: BlockTraffic) -> Iterator[Event]:
        layout, running, late, computed = self.layout, list[Unit](), list[Unit](), list[Unit]()
        buckets = bucket_units(layout) if layout.is_replicated else []
        unsent = [(set(bucket), replica_sum(layout, bucket)) for bucket in buckets]

        def compute(unit: Unit) -> Event:
            return Event("compute", unit, () if unit.is_root_like else self._exchanges(unit, inside, False))

        def leave(unit: Unit) -> Iterator[Event]:
            if not unit.numel:
                return
            if unit not in computed:
                yield compute(unit)
            if not layout.is_replicated and unit.reshards_after_backward(is_last):
                yield from self._free(unit, now)
            if layout.is_replicated or not layout.stage.syncs(is_last):
                yield Event("accumulate", unit)
            else:
                summed = replica_sum(layout, [unit]) if is_last else ()
                yield Event("reduce", unit, reduction(layout, unit) + summed)
                if layout.steps_on_host and any(unit.trained) and (is_last or layout.replicas_of(unit) == 1):
                    yield Event("arrive", unit)
            for missing, _ in unsent:
                missing.discard(unit)
            while is_last and unsent and not unsent[0][0]:  # buckets are sent in their order
                yield Event("reduce", None, unsent.pop(0)[1])

        # no gradient goes through these: nothing before them is trained
        order = [unit for unit, _ in layout.run_order(is_forward=True)]
        trains = [any(unit.trained) for unit in order]
        unreached = [
            unit for n, unit in enumerate(order) if self.is_first and not any(trains[:n]) and not layout.is_replicated
        ]
        has_loss = self.is_last  # the loss, whose backward is before that of all blocks
        for unit, ahead in layout.run_order(is_forward=False):
            if has_loss and unit in self.of_blocks:
                has_loss = False
                yield Event("exchange", None, inside.loss[1])
            while running and unit.modules[0] not in running[-1].inside:
                yield from leave(running.pop())
            yield from self._gather((unit, *ahead), now, False)
            (late if unit.is_root_like or unit in unreached else running).append(unit)
        if has_loss:
            yield Event("exchange", None, inside.loss[1])
        while running:
            yield from leave(running.pop())
        computed = [unit for unit in late if unit in self.number_of]  # fully_shard is not told when, its work is done
        yield from map(compute, computed)
        if self.is_first:
            yield Event("exchange", None, inside.embedding[1])
        for unit in sorted(late, key=order.index):  # at the end of backward, as fully_shard does
            yield from leave(unit)
        for unit in layout.units if layout.is_replicated else [unit for unit in layout.units if unit.forward_only]:
            if unit.reshards_after_backward(is_last) and (is_last or not layout.is_replicated):
                yield from self._free(unit, now)
        if is_last and layout.replicated_numel and not layout.steps_on_host:
            yield Event("sum", None, replicated_sum(layout))


def step_passes(layout: Layout, micros: int, forwards: int = 1, inside: Sequence[BlockTraffic] = ()) -> list[Pass]:
    """Returns the passes of a step of `micros` micro-batches, in order. Before each backward there are `forwards`
    forwards; it belongs to the last one. `inside`: the messages of each micro-batch inside its passes; empty: none."""
    chunks = _chunks(layout) if not inside else _make_chunks(layout, inside[0].layers)
    inside = inside or [BlockTraffic()] * micros
    gathered, passes = [frozenset[Unit]()] * len(chunks), list[Pass]()
    for action in layout.pipeline.actions(micros):
        number, is_last = action.chunk, not action.is_forward and action.micro == micros - 1
        for _ in range(forwards if action.is_forward else 1):
            given = action.is_forward, is_last, gathered[number], inside[action.micro]
            events, gathered[number] = chunks[number].run(*given)
            passes.append(Pass(action, events))
    return passes


@cached_per_layout
def _chunks(layout: Layout) -> list[_Chunk]:
    return _make_chunks(layout, 0)


def _make_chunks(layout: Layout, layers: int) -> list[_Chunk]:
    return [_Chunk(layout, number, chunk_layout, layers) for number, chunk_layout in enumerate(layout.chunks)]


def step_events(
    layout: Layout,
    micros: int,
    optimizer_name: str = "adamw",
    forwards: int = 1,
    rank: int = 0,
    inside: Sequence[BlockTraffic] = (),
) -> Iterator[Event]:
    """Yields the events of a step of the global `rank`: its passes', and then those of the norm and the step."""
    for each in step_passes(layout, micros, forwards, inside):
        yield from each.events
    pipeline, is_away = layout.pipeline, layout.steps_on_host
    if is_away and layout.replicated_numel:  # on the host, of all chunks of layers together
        yield Event("sum", None, replicated_sum(layout))
    if pipeline.ranks > 1 and pipeline.is_tied and (pipeline.has_first_pp_stage or pipeline.has_last_pp_stage):
        tied = tied_numel(layout, rank) * layout.dtype("master").itemsize
        yield Event("sum", None, (("all_reduce", PP if pipeline.ranks == 2 else PP_ENDS, tied),))
    # ranks along dp_replicate have copies, and so have those along tp of what is not split along it
    copies = {DP_REPLICATE, *[TP] * (not layout.trains_tp_sharded)}
    spread = [axis for axis, size in reversed(layout.sizes.items()) if size > 1 and axis not in copies]
    for unit in [unit for unit in layout.units if unit.is_experts and any(unit.trained)][:1]:
        # the innermost axis first: what then is left of theirs is summed like all else; and last the layers of others
        inner = [layout.counted_axis(unit, axis) for axis in (EP, DP_SHARD) if layout.sizes_of(unit)[axis] > 1]
        last = [axis for axis in spread if axis == PP]
        spread = list(dict.fromkeys([*inner[:-1], *spread[: len(spread) - len(last)], inner[-1], *last]))
    yield Event("norm", None, tuple(("all_reduce", axis, NORM_BYTES) for axis in spread))
    exchanges = muon_exchanges(layout) if OPTIMIZERS[optimizer_name].whole_matrices else ()
    yield from (Event("update", unit) for unit in layout.units if is_away and any(unit.trained))
    yield Event("step", None, exchanges)
    sizes = [COUNTS_BYTES, FLAGS_BYTES] + [sum(layout.counted) * COUNT_BYTES] * any(layout.counted)
    sums = tuple(("all_reduce", layout.axis_of_all, size) for size in sizes)
    yield Event("counts", None, sums)
