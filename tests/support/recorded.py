"""The events of a rank's first step as they happen: collectives by the ledger, frees, and what offload moves; and as
the plan lists them."""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

from planted import replace
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

Happened = tuple[
    Any, ...
]  # (operation, mesh axis, payload bytes), or (free, fetch, arrive or update, number of the unit)


@dataclass
class Record:
    """What happens while the ledger is open."""

    events: list[Happened] = field(default_factory=list)
    plan: Callable[[list[Any]], dict[str, list[Happened]]] | None = None  # what it lists, given the rows of experts
    routing: list[Any] = field(default_factory=list)
    layout: Any = None
    is_open: bool = False

    def note(self, *event: Any) -> None:
        if self.is_open:
            self.events.append(event)

    def number_of(self, group: FSDPParamGroup) -> int:
        from shardbook.comm.torch_private import sharded_parameters

        own = {id(param) for param in group.fsdp_params}
        sharded = not self.layout.is_replicated
        units = [unit.shapes and sharded and sharded_parameters(unit.handle) for unit in self.layout.units]
        return next((n for n, params in enumerate(units) if params and id(params[0]) in own), -1)

    def ledger(self, real: type) -> type:
        """A ledger that notes each collective in its order."""
        record = self

        class Noted(real):
            def open(self) -> None:
                super().open()
                record.is_open = True

            def close(self) -> bool:
                record.is_open = False
                return super().close()

            def _count(self, op: str, tensor: Any, group: Any) -> None:
                before = dict(self.traffic)
                super()._count(op, tensor, group)
                (key,) = [key for key, volume in self.traffic.items() if volume != before.get(key)]
                record.note(*key, tensor.numel() * tensor.element_size())

        return Noted

    @contextlib.contextmanager
    def follow(self, rank: int):
        """Notes the first step of a run, and what its plan lists of the global `rank`."""
        from shardbook.comm.ledger import Ledger
        from shardbook.parallel.sharding import ShardedModel
        from shardbook.run.job_summary import describe_job

        def describe(job: Any) -> list[Any]:
            self.layout = job.layout
            self.plan = partial(planned, job, rank, job.loader.step_at(job.loader.consumed_rows))
            return []

        def take_routing(sharded: Any) -> list[Any]:
            self.routing = real_routing(sharded)
            return self.routing

        real_routing = ShardedModel.take_routing
        spies = {describe_job: describe, Ledger: self.ledger(Ledger)}
        for real, spy in spies.items():
            replace(real, spy)
        ShardedModel.take_routing = take_routing
        try:
            with self.watch():
                yield self
        finally:
            ShardedModel.take_routing = real_routing
            for real, spy in spies.items():
                replace(spy, real)

    def differences(self) -> dict[str, str]:
        """Where what happened parts from the plan's list, and from one with a mistake, by its name."""
        assert self.plan, "no run was described"
        return {name: first_difference(self.events, listed) for name, listed in self.plan(self.routing).items()}

    @contextlib.contextmanager
    def watch(self):
        """Notes frees of fully_shard's units, and what moves between tiers."""
        from shardbook.memory.host_adamw import HostAdamW

        real = FSDPParamGroup.reshard, HostAdamW.gather, HostAdamW.receive, HostAdamW.step

        def reshard(group: Any) -> None:
            was_whole = group.is_unsharded
            real[0](group)
            if was_whole and not group.is_unsharded:
                self.note("free", self.number_of(group))

        def gather(optimizer: Any, unit: Any, number: int) -> Any:
            if number == 0 and optimizer.layout.offload.params != "none":
                self.note("fetch", unit.number)
            return real[1](optimizer, unit, number)

        def receive(optimizer: Any, unit: Any, flat: Any) -> None:
            self.note("arrive", unit.number)
            real[2](optimizer, unit, flat)

        def step(optimizer: Any) -> None:
            for unit in optimizer.units:
                if unit.micros:
                    self.note("update", unit.number)
            real[3](optimizer)

        FSDPParamGroup.reshard, HostAdamW.gather, HostAdamW.receive, HostAdamW.step = reshard, gather, receive, step
        try:
            yield self
        finally:
            FSDPParamGroup.reshard, HostAdamW.gather, HostAdamW.receive, HostAdamW.step = real


def planned(job: Any, rank: int, micros: list[Any], routing: list[Any]) -> dict[str, list[Happened]]:
    """The same by the plan, under no name; and as it would be with a mistake, by name."""
    from shardbook.plan.block_traffic import read_inside
    from shardbook.plan.events import step_events

    layout, recipe = job.layout, job.recipe
    inside = read_inside(layout, job.config, recipe, rank, lambda: micros, routing)
    words = recipe.train.gradient_accumulation_steps, recipe.optim.name, recipe.forwards_per_micro, rank, inside
    deeper = layout.parallel.model_copy(update={"backward_prefetch": layout.backward_prefetch + 1})
    layouts = {
        "": layout,
        "a prefetch one unit too early": dataclasses.replace(layout, parallel=deeper),
        "a reduction in every micro-batch": dataclasses.replace(
            layout, stage=dataclasses.replace(layout.stage, reduce_every_micro=True)
        ),
    }
    found = {name: _as_it_happens(each, step_events(each, *words)) for name, each in layouts.items()}
    return found | {"an event forgotten": found[""][: len(found[""]) // 2] + found[""][len(found[""]) // 2 + 1 :]}


def _as_it_happens(layout: Any, events: Any) -> list[Happened]:
    """A model that each rank holds whole frees no units."""
    numbers, found = {unit: number for number, unit in enumerate(layout.units)}, []
    for what, unit, sends in events:
        if what in ("fetch", "arrive", "update") or (what == "free" and not layout.is_replicated):
            found.append((what, numbers[unit]))
        found += [send for send in sends if send[2] or send[0] == "all_to_all"]
    return found


def first_difference(happened: list[Happened], listed: list[Happened]) -> str:
    """Where two lists part, with the events before it; empty where they are the same."""
    for number, (one, other) in enumerate(zip_longest(happened, listed)):
        if one != other:
            before = ", ".join(map(str, happened[max(0, number - 4) : number]))
            return f"event {number} of {len(happened)}: {one} happened, {other} is listed; before: {before}"
    return ""
