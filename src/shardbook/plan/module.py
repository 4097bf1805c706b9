"""The plan of any module under a stage, for a loop of one's own: `plan_module`, beside `shard_model`.

Invariant: the module's own code and stage run on fake tensors in a fake process group, and every storage is counted
from its allocation to its release; layout and traffic are those of a recipe's plan. The module is left as it was.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardbook.axes import TP
from shardbook.comm.ledger import Ledger, Traffic, Volume
from shardbook.comm.torch_private import fake_store, fake_tensors, forget_sharding, storages_in
from shardbook.model.comparisons import raise_if_ours
from shardbook.optim.table import OPTIMIZERS
from shardbook.parallel.layout import Layout
from shardbook.parallel.library import place_module, read_arguments
from shardbook.parallel.mesh import build_mesh, describe_sizes
from shardbook.parallel.pass_monitor import tensors_in
from shardbook.parallel.replicated import COPIED, map_tensors
from shardbook.parallel.same_on_ranks import call_with
from shardbook.parallel.sharding import ShardedModel, apply_stage
from shardbook.parallel.tensor_plan import WrongWidth, read_tp_plan
from shardbook.parallel.units import Unit
from shardbook.plan.formulas import Resident, predict_resident, predict_traffic
from shardbook.plan.measure_blocks import Unmeasured
from shardbook.plan.peak import GB, Peak
from shardbook.plan.simulate import Moment, PeakTracker, run_steps
from shardbook.recipe import Parallel, Precision, RecipeError, first_line

Loss = Callable[[nn.Module, Any], Tensor]
WITHOUT = "so the plan has no peak"
NODE = 8  # ranks that share a node, where nobody says
ENDS = {
    ("forward", "before"): "start",
    ("forward", "after"): "loss",
    ("backward", "before"): "loss, backward",
    ("backward", "after"): "end",
}
MICROS = 3  # of a step that run: more micro-batches bring no moment that these do not


@dataclass(frozen=True)
class ModulePlan:
    """Holds the planned memory and traffic of a module's step, on the first of `layout.world_size` ranks."""

    layout: Layout
    units: dict[str, Unit]  # by the name of the block, what is in no block under ""
    resident: Resident
    traffic: Traffic  # of a step: calls and payload bytes by operation and mesh axis
    moments: dict[str, Peak]  # where a step may be fullest, in order; empty where the module could not be measured
    unmeasured: str = ""  # why not

    @property
    def fullest(self) -> str:
        """The name of the fullest of `moments`. Raises RecipeError where there are none."""
        if not self.moments:
            raise Unmeasured(self.unmeasured)
        return max(self.moments, key=lambda name: self.moments[name].total)

    @property
    def peak(self) -> Peak:
        """The bytes of the fullest moment. Raises RecipeError where the module could not be measured."""
        return self.moments[self.fullest]

    def __str__(self) -> str:
        layout, resident = self.layout, asdict(self.resident).items()
        mesh, kept = describe_sizes(layout.mesh), (f"{what[:-6]} {size / GB:.1f}" for what, size in resident)
        lines = [
            f"{layout.stage.name} on {layout.world_size} ranks ({mesh}), {len(self.units)} units",
            f"kept, in GB: {', '.join(kept)}",
            f"peak in {self.fullest}: {self.peak}" if self.moments else self.unmeasured,
        ]
        for (op, axis), volume in self.traffic.items():
            lines.append(f"{op} along {axis}: {volume.payload_bytes / GB:.1f} GB in {volume.calls} calls")
        if self.unmeasured and layout.tp_size > 1:
            lines.append("what layers send along tp is not known")
        return "\n".join(lines)


def plan_module(
    model: nn.Module,
    *,
    blocks: Iterable[nn.Module],
    batch: Any,
    gpus: int,
    loss: Loss | None = None,
    stage: str | Parallel = "zero3",
    precision: Precision | None = None,
    micros: int = 1,
    optimizer: str = "adamw",
    node: int = NODE,
    tp_plan: Mapping[str, str] | None = None,
) -> ModulePlan:
    """Plan a step of `model` under a named stage on `gpus` GPUs, `node` of them in a node. Nothing is allocated, and no
    process group is needed; the model, which may lie on the meta device, is left as it is.

    `model`, `blocks`, `stage`, `precision` and `tp_plan` are those of `shard_model`. `batch`: a micro-batch of one
    rank, of which only shapes and dtypes count; `micros` of them make a step. `loss(model, batch)`: what backward
    begins at; None: the model is called with the batch (a tuple: its arguments, a mapping: its named ones), and its
    `loss`, or else the sum of what it returns, is taken. `optimizer`: as optim.name; `adamw` is torch's.

    A module that cannot run on fake tensors has a plan without a peak, whose `unmeasured` names the block and the
    reason. Raises RecipeError (a ValueError) where something does not fit.
    """
    for what, given, fits, words in (
        ("gpus", gpus, _is_count(gpus), "a whole number of at least 1"),
        ("micros", micros, _is_count(micros), "a whole number of at least 1"),
        ("node", node, _is_count(node), "a whole number of at least 1"),
        ("optimizer", optimizer, optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}"),
        ("loss", loss, loss is None or callable(loss), "a function of the model and a batch"),
    ):
        if not fits:
            raise RecipeError(f"plan_module: {what} = {given!r}: must be {words}")
    if gpus > node and gpus % node:
        raise RecipeError(f"plan_module: gpus = {gpus}: must be whole nodes of {node}; a multiple of it, or set node")
    blocks, parallel, settled = read_arguments(model, blocks, stage, None, precision)
    tp_words = read_tp_plan(model, tp_plan, parallel.tp_size)
    names = {module: name for name, module in model.named_modules()}
    moments, in_layers, unmeasured = dict[str, Peak](), Traffic(), ""
    with as_before(model):
        if tp_words:
            replace_tensors(model, torch.device("meta"))
        layout = place_module(model, blocks, tp_words, parallel, settled.on("cuda"), gpus, min(node, gpus))
        resident = predict_resident(layout, 0, optimizer)
        traffic = predict_traffic(layout, micros, optimizer)
        try:
            run = model, blocks, batch, loss or call_model, layout, micros
            moments, in_layers = simulate(*run, int(resident.optimizer_bytes))
        except Unmeasured as error:
            unmeasured = str(error)
    for key, each in in_layers.items():
        calls, size = each.calls * micros, each.payload_bytes * micros
        traffic[key] = traffic.get(key, Volume()) + Volume(calls, size)
    units = {names[unit.modules[0]]: unit for unit in layout.units if unit.numel}
    return ModulePlan(layout, units, resident, traffic, moments, unmeasured)


def _is_count(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given > 0


def call_model(model: nn.Module, batch: Any) -> Tensor:
    """Returns the `loss` of what `model` returns for `batch`, or the sum of all float tensors in it."""
    output = call_with(model, batch)
    if isinstance(loss := getattr(output, "loss", None), Tensor):
        return loss
    return torch.stack([each.sum() for each in tensors_in(output) if each.is_floating_point()]).sum()


class Categories(PeakTracker):
    """Notes what the bytes of the fullest operation of each moment are, by the categories of Peak."""

    def __init__(self, sharded: ShardedModel) -> None:
        self.sharded = sharded
        self.before: dict[Moment, dict[int, Any]] = {}  # the storages when a moment begins
        # the bytes of each storage at the fullest operation, and references to them
        self.fullest: dict[Moment, tuple[dict[int, int], list[Any]]] = {}
        self.peaks: dict[Moment, Peak] = {}
        self.category: dict[int, str] = {}  # of storages
        self.references: list[Any] = []  # to these: a number is no other storage's while one is held
        super().__init__()

    def begin_step(self) -> None:
        """Puts what is there between steps and was not there before, as a cache of the module, to the activations."""
        super().begin_step()
        self.peaks = {}
        self.category = {key: category for key, category in self.category.items() if category != "grads"}
        self.put_left("activations")

    def begin(self, micro: int, phase: str, place: int | str = "before") -> None:
        super().begin(micro, phase, place)
        self.before.setdefault(self.moment, {**self.storages})

    def put(self, category: str, *values: Any) -> None:
        """Puts the storages of tensors in `values` into a category, but for those that are in one."""
        for key, reference in storages_in(values):
            self.storages.setdefault(key, reference)
            if key not in self.category:
                self.category[key] = category
                self.references.append(reference)

    def put_left(self, category: str) -> None:
        """Puts all storages of now that are in no category into one."""
        for key in self.sizes().keys() - self.category.keys():
            self.category[key] = category
            self.references.append(self.storages[key])

    def ran(self, function: Any, args: Any, kwargs: Any, result: Any, is_larger: bool) -> None:
        name = function.overloadpacket.__name__
        if name == "all_gather_copy_in":  # fully_shard's: shards, which it cast or hpZ kept, into a buffer
            self.put("gathered", args[0])
            self.put("buffers", args[1:], result)
        elif name == "split_with_sizes_copy" and "out" in kwargs:
            self.put("gathered", kwargs["out"])
        elif name == "_reduce_scatter_base_":
            self.put("grads", args[0])
            self.put("buffers", args[1])
        elif function.namespace == "c10d" and "allreduce" not in name:  # which sums gradients in place
            self.put("buffers", args)
        super().ran(function, args, kwargs, result, is_larger)

    def note(self) -> None:
        sizes = self.sizes()
        if self.bound > self.most.get(self.moment, -1):
            self.most[self.moment], self.fullest[self.moment] = self.bound, (sizes, [*self.storages.values()])

    def end_backward(self) -> None:
        """Sorts the bytes of a micro-batch's moments. What it leaves is gradients."""
        if self.sharded.replicated:
            self.put("gathered", [copy for _, copy, _ in self.sharded.replicated.copies])
        self.put_left("grads")
        for moment, (sizes, _) in self.fullest.items():
            parts = dict.fromkeys(Peak.__annotations__, 0)
            for key, size in sizes.items():
                held = "activations" if key in self.before[moment] else "working"
                parts[self.category.get(key, held)] += size
            self.peaks[moment] = Peak(**parts)
        self.before, self.fullest = {}, {}


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Has `model`, when closed, the classes, attributes and hooks that its modules have now: a stage and a forward
    change them. Handles of hooks know the dictionaries, so these are refilled and not replaced."""
    containers = dict, OrderedDict, list, set
    before = [(module, type(module), {**vars(module)}) for module in model.modules()]
    contents = [
        (value, value.copy()) for *_, attributes in before for value in attributes.values() if type(value) in containers
    ]
    try:
        yield
    finally:
        for value, content in contents:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
        for module, kind, attributes in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            forget_sharding(module)
        COPIED.discard(model)


def replace_tensors(model: nn.Module, device: torch.device) -> None:
    """Gives `model` parameters and buffers on `device` in place of its tensors, a tied one once."""
    fakes: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in [*named(recurse=False, remove_duplicate=False)]:
                if tensor not in fakes:
                    fake = torch.empty_like(tensor, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    fakes[tensor] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                setattr(module, name, fakes[tensor])  # by its __setattr__: nn.LSTM has a list of its parameters


def simulate(
    model: nn.Module, blocks: Sequence[nn.Module], batch: Any, loss: Loss, layout: Layout, micros: int, state_bytes: int
) -> tuple[dict[str, Peak], Traffic]:
    """Returns the bytes at the moments of a step, in order, by name; and what the layers of a micro-batch send along
    tp. Uses `model` up. Raises Unmeasured where it does not run on fake tensors, RecipeError where blocks do not run
    once each, in their order."""
    if dist.is_initialized():
        raise Unmeasured(f"there is a process group already, {WITHOUT}: plan before init_process_group")
    names, few = {module: name for name, module in model.named_modules()}, min(micros, MICROS)
    named, kinds = [f"block {names[block]}" for block in blocks], [type(block).__name__ for block in blocks]
    live, fakes = None, fake_tensors()
    dist.init_process_group("fake", rank=0, world_size=layout.world_size, store=fake_store())
    try:
        with fakes:
            replace_tensors(model, torch.device("cpu"))
        # outside: a mesh asks for the values of its ranks
        sharded = apply_stage(model, layout, build_mesh(layout.sizes, "cpu"), ours=False)
        live = Categories(sharded)
        live.follow(blocks)
        with fakes, live:
            live.put("params", [*model.parameters()])
            live.put("activations", [*model.buffers()])
            state = torch.empty(state_bytes, dtype=torch.uint8)
            live.put("optimizer", state)
            given = map_tensors(batch, lambda tensor: torch.empty_like(tensor, device="cpu"))
            with Ledger(layout.groups(0)) as ledger:
                if layout.tp_size > 1:
                    ledger.open()
                run_steps(live, sharded, few, lambda: given, lambda batch: loss(model, batch))
            del state
    except WrongWidth:
        raise
    except Exception as error:
        raise_if_ours(error)
        place = live.moment[2] if live else ""
        block = f"{named[place]}, a {kinds[place]}," if isinstance(place, int) else "what is in no block"
        why = f"cannot run without memory ({first_line(error)}), {WITHOUT}"
        raise Unmeasured(f"{block} {why}") from error
    finally:
        dist.destroy_process_group()
    check_order(named, live.order, few)
    moments = {}
    for (micro, phase, place), peak in live.peaks.items():
        number = micros if micro == few - 1 else micro + 1
        where = f"{named[place]}, {phase}" if isinstance(place, int) else ENDS[phase, place]
        moments[f"micro-batch {number}, {where}"] = peak
    return moments, per_micro_batch(ledger.traffic, layout, 1 + few)


def per_micro_batch(traffic: Traffic, layout: Layout, micros: int) -> Traffic:
    """Returns what a micro-batch sends along tp, of what two steps of `micros` in all sent: but for a step's sum of
    gradients."""
    sent = {key: volume for key, volume in traffic.items() if key[1] == TP}
    if summed := layout.replicated_numel * layout.dtype("master").itemsize:
        sent["all_reduce", TP] += Volume(-2, -2 * summed)
    return {key: Volume(each.calls // micros, each.payload_bytes // micros) for key, each in sent.items()}


def check_order(names: Sequence[str], order: Sequence[int], micros: int) -> None:
    """Raises RecipeError where blocks do not run once in a micro-batch, in their order."""
    for number, name in enumerate(names):
        if (times := order.count(number) // micros) != 1:
            raise RecipeError(f"plan_module: {name} runs {times} times in a micro-batch; it must run once")
    for late, early in pairwise(order[: len(names)]):
        if late > early:
            asked = "name them in the order in which they run"
            raise RecipeError(f"plan_module: {names[late]} runs before {names[early]}; {asked}")
