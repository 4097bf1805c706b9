"""What lies in memory: the CPU allocator's own count, and the parameters that are gathered at each moment."""

import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardbook.plan.simulate import PeakTracker


def allocated(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that torch's CPU allocator holds more than before: at most during `work`, and when it has returned.

    For work in one thread: what another thread frees (gloo's do) is not seen.
    """
    gc.collect()  # garbage of an earlier trace, freed during this one, would count as less than nothing
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        kept = work()
    del kept
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    most = held = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most, held


class SettledBytes(PeakTracker):
    """What lives, of ranks on gloo: its thread lets go of what it sent only when it has its next slice of the scheduler
    after its work was waited for (up to 15 ms, once in seven exchanges, on a machine with little else to do).

    What would be the most, and more than `enough` bytes, is counted again until it no longer is, for two seconds.
    """

    def __init__(self, enough: float):
        super().__init__()
        self.enough = enough

    def count(self) -> int:
        until = time.monotonic() + 2
        while (total := super().count()) > max([self.enough, *self.most.values()]) and time.monotonic() < until:
            time.sleep(0.005)
        return total


class Gathered(TorchDispatchMode):
    """Watches, at every operation, which units' parameters are whole, or on their way in an all-gather.

    After use: `most_units` and `most_bytes` of them at once (a unit of `other_bytes` is counted in bytes only), and
    `most_total` bytes of them and of everything else that was made under watch and is still referred to.
    """

    def __init__(self, units, other_bytes=0):
        super().__init__()
        self.units = [unit for unit in units if unit.shapes]
        self.places = [own_places(unit, self.units) for unit in self.units]
        # what lies there before the step is at rest, also where it is no DTensor
        self.at_rest = {p for places in self.places for p in parameters_at(places)}
        self.other_bytes = other_bytes
        self.most_units = self.most_bytes = self.most_total = 0
        self.flying: list[torch.Tensor] = []
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function)
        if "allgather" in name:
            self.flying.append(args[0])
        if "split_with_sizes_copy" in name and self.flying:
            whole = args[0].untyped_storage().data_ptr()
            self.flying = [t for t in self.flying if t.untyped_storage().data_ptr() != whole]
        self.look(result)
        return result

    def look(self, result) -> None:
        found = [parameters_at(places) for places in self.places]
        own = [[p for p in parameters if p not in self.at_rest] for parameters in found]
        sizes = [sum(map(bytes_of, parameters)) for parameters in own]
        waiting = [tensor.untyped_storage().nbytes() for tensor in self.flying]
        present = [size for size in sizes + waiting if size not in (0, self.other_bytes)]
        self.most_units = max(self.most_units, len(present))
        self.most_bytes = max(self.most_bytes, sum(sizes) + sum(waiting))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        gathered = {p.untyped_storage()._cdata for parameters in found for p in parameters}
        self.made = {key: kept for key, kept in self.made.items() if not kept[0].expired() and key not in gathered}
        self.most_total = max(self.most_total, sum(sizes) + sum(size for _, size in self.made.values()))


def own_places(unit, units) -> list[tuple[nn.Module, str]]:
    """Where the parameters of a unit are that belong to no unit inside it: which they are changes in every pass."""
    modules = {m for module in unit.modules for m in module.modules()}
    inner = {m for other in units if other is not unit for m in other.modules if m in modules and m not in unit.modules}
    apart = {m for module in inner for m in module.modules()}
    return [(m, name) for m in modules - apart for name in m._parameters]


def parameters_at(places: list[tuple[nn.Module, str]]) -> list[nn.Parameter]:
    """A tied one once."""
    return list(dict.fromkeys(p for module, name in places if (p := module._parameters[name]) is not None))


def bytes_of(parameter: nn.Parameter) -> int:
    return 0 if isinstance(parameter, DTensor) else parameter.untyped_storage().nbytes()
