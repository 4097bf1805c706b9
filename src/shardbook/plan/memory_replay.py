"""Running sums of a rank's bytes of parameters and gradients, over the events of a step.

Invariant: as fully_shard (torch 2.11 to 2.15) and parallel/replicated.py hold them; plan/simulate.py counts the same.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import compress
from math import prod

from shardbook.comm.torch_private import frees_early
from shardbook.memory.host_state import STAGINGS, fetched_bytes
from shardbook.parallel.buckets import bucket_units
from shardbook.parallel.layout import Layout
from shardbook.parallel.schedule import Action
from shardbook.parallel.units import Unit
from shardbook.plan.events import Event

MemoryState = tuple[int, int, int, int]  # sums, gathered, buffers, and gradients of a unit that are not summed yet


class ShardedBytes:
    """A running sum of a rank's bytes of parameters and gradients where fully_shard gathers and reduces units."""

    def __init__(self, layout: Layout, micros: int):
        self.layout, self.micros, self.sums, self.gathered = layout, micros, 0, 0
        self.compute, self.reduce = layout.dtype("params").itemsize, layout.dtype("reduce").itemsize
        self.master, self.fetched = layout.dtype("master").itemsize, fetched_bytes(layout)
        self.frees_early = frees_early()
        self.is_away = layout.steps_on_host
        self.every = layout.stage.reduce_every_micro or micros == 1

    def follow(
        self, action: Action, events: Sequence[Event], named: Container[Unit | None]
    ) -> Iterator[tuple[str, Unit | None, MemoryState]]:
        """Adds up a pass. Yields the bytes of the units in `named` at their moments: gather, forward, backward,
        backward done (all its gradients are computed) and reduction; and at its end."""
        is_forward, micro = action.is_forward, action.micro
        is_last = micro == self.micros - 1
        gathers_in_flight, last_gather, reduce_input = dict[Unit, int](), 0, 0
        begins = not is_forward  # the loss's backward, which is its chunk's first exchange, is still to come
        grads_to_host = [0] * STAGINGS

        def now(grads: int = 0, more: int = 0) -> MemoryState:
            in_flight = sum(size for unit, size in gathers_in_flight.items() if self.layout.shards_of(unit) > 1)
            buffers = in_flight + last_gather + reduce_input + self.fetched
            return self.sums + sum(grads_to_host[-STAGINGS:]) + more, self.gathered, buffers, grads

        for what, unit, _ in events:
            if begins and what == "exchange":
                begins = False
                yield "backward of the loss", None, now()
                yield "start of backward", None, now()
            if unit is None:
                continue
            shards = self.layout.shards_of(unit)
            trained, grads = (unit.padded_numel(ranks, trained_only=True) for ranks in (shards, 1))
            if what == "gather" and unit.is_root_like and is_forward:  # added_up for at once
                size = unit.padded_numel(shards) * self.compute
                last_gather = size * (shards > 1)
                self.gathered += size
            elif what == "gather":
                gathers_in_flight[unit] = unit.padded_numel(shards) * self.compute
            elif what == "free":
                self.gathered -= unit.padded_numel(shards) * self.compute
            elif what == "compute":
                # a block begins before its experts, and ends after them
                begun = [each for each in gathers_in_flight if each is unit or (unit.is_experts and each.in_block)]
                for each in (each for each in begun if unit.modules[0] in each.inside):
                    size = gathers_in_flight[each]
                    self.gathered += size
                    if each in named and is_forward:  # its buffer is copied
                        last_gather *= not self.frees_early
                        yield "gather", each, now()
                    del gathers_in_flight[each]
                    # held until the next gather
                    last_gather = size * (self.layout.shards_of(each) > 1) if is_forward else 0
                if unit in named and is_forward:
                    yield "forward", unit, now()
                elif unit in named:
                    yield "backward", unit, now()
                    yield "backward done", unit, now(grads * self.compute)
            elif what == "accumulate":
                # first gradients become sums, one unit after the other; later ones are added and gone
                self.sums += grads * self.reduce * (micro == 0)
                if unit in named:
                    yield "reduction", unit, now(grads * self.compute * (micro == 0 and self.reduce != self.compute))
            elif what == "reduce":
                reduce_input, computed, shard = (
                    trained * self.reduce,
                    grads * self.compute * self.every,
                    trained // shards,
                )
                added_up = grads * self.reduce * (not self.every)
                is_alone = shards == 1 < max(self.layout.tp_size, self.layout.ep_size) and not self.frees_early
                if is_alone:  # copied once more, when its gradients in the dtype of compute are freed
                    reduce_input, computed, self.sums, added_up = 2 * reduce_input, 0, self.sums - added_up, 0
                if unit in named:
                    # The output is allocated after the unit's gradients are freed. Before torch 2.15 the last one is
                    # not freed by then (a variable of torch's loop holds it), and along tp none is.
                    last_shape: Sequence[int] = [(0,), *compress(unit.shapes, unit.trained)][-1]
                    last = prod(last_shape) * self.compute * self.every
                    kept = min(computed, last) if self.layout.tp_size == 1 else computed
                    freed = computed - kept * (not self.frees_early)
                    yield "reduction", unit, now(computed, max(0, shard * self.reduce - freed))
                reduce_input = trained * self.reduce
                replicas = self.layout.replicas_of(unit)
                self.sums += self._kept(shard, replicas, micro, is_last) - added_up
                grads_to_host.append(shard * self.reduce * (self.is_away and replicas == 1))
        yield "end of forward" if is_forward else "end of backward", None, now()

    def _kept(self, shard: int, replicas: int, micro: int, is_last: bool) -> int:
        """Returns the bytes that stay of a unit's reduced gradients, beside those of earlier micro-batches. Across
        replicas they wait in fully_shard's own buffers, in the dtype of reduction, until the last micro-batch."""
        is_first = micro == 0 or not self.every
        if replicas == 1:
            return shard * self.master * (is_first and not self.is_away)
        is_cast = is_last and not self.is_away
        another = not is_cast or self.reduce != self.master
        return shard * (self.reduce * (is_first and another) + self.master * (is_cast and (is_first or another)))


class CopiedBytes(ShardedBytes):
    """Counts the bytes of ranks that each hold the whole model (parallel/replicated.py)."""

    def __init__(self, layout: Layout, micros: int):
        super().__init__(layout, micros)
        self.dtype, self.begun = layout.sum_dtype.itemsize, set[int]()  # buckets that have sums
        self.sizes, self.bucket_of = list[int](), dict[Unit, int]()
        for bucket in (bucket for chunk in layout.chunks for bucket in bucket_units(chunk)):
            self.bucket_of |= dict.fromkeys(bucket, len(self.sizes))
            self.sizes.append(sum(unit.padded_numel(1, trained_only=True) for unit in bucket))

    def _begin(self, units: Iterable[Unit]) -> None:
        for bucket in {self.bucket_of[unit] for unit in units if unit in self.bucket_of} - self.begun:
            self.begun.add(bucket)
            self.sums += self.sizes[bucket] * self.dtype

    def follow(
        self, action: Action, events: Sequence[Event], named: Container[Unit | None]
    ) -> Iterator[tuple[str, Unit | None, MemoryState]]:
        units = dict.fromkeys(unit for _, unit, _ in events if unit)
        if not action.is_forward:  # a root-like unit begins with the last norm, before all others
            yield "backward of the loss", None, (self.sums, self.gathered, 0, 0)
            self._begin(unit for unit in units if unit.is_root_like)
            yield "start of backward", None, (self.sums, self.gathered, 0, 0)
        for what, unit, _ in events:
            if unit is None:
                continue
            if what in ("gather", "free"):
                self.gathered += unit.cast_numel(self.compute) * self.compute * (1 if what == "gather" else -1)
            elif what == "compute" and not action.is_forward:
                self._begin([unit])
            if unit in named and what == "compute":
                for moment in ("forward",) if action.is_forward else ("backward", "backward done"):
                    yield moment, unit, (self.sums, self.gathered, 0, 0)
            elif unit in named and what == "accumulate":
                largest = max((prod(shape) for shape in compress(unit.shapes, unit.trained)), default=0)
                yield "reduction", unit, (self.sums, self.gathered, 0, largest * self.compute)
        most = self.sums
        if not action.is_forward and action.micro == self.micros - 1 and self.dtype != self.master:
            # sums are cast one after the other: of the first ones there are gradients already, of the others still sums
            for bucket in sorted({self.bucket_of[unit] for unit in units if unit in self.bucket_of}):
                most = max(most, self.sums + self.sizes[bucket] * self.master)
                self.sums += self.sizes[bucket] * (self.master - self.dtype)
        yield "end of forward" if action.is_forward else "end of backward", None, (most, self.gathered, 0, 0)
