"""The plan of any module under a stage, for a loop of one's own: `plan_module`, beside `shard_model`.

Invariant: layout, events and their sums are those of a recipe's plan, and nothing here knows a module's insides: it
runs once, forward and backward, on fake tensors in the dtype of compute, and each block is measured where it runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from shardbook.comm.ledger import Traffic
from shardbook.comm.torch_private import fake_tensors, in_backward, probe
from shardbook.model.comparisons import raise_if_ours
from shardbook.optim.table import OPTIMIZERS
from shardbook.parallel.layout import Layout, build_layout
from shardbook.parallel.library import read_arguments
from shardbook.parallel.mesh import describe_sizes
from shardbook.parallel.pass_monitor import tensors_in
from shardbook.parallel.replicated import cast_floats, cast_inputs, map_tensors
from shardbook.parallel.units import Unit
from shardbook.plan.blocks import Unmeasured
from shardbook.plan.events import step_passes
from shardbook.plan.formulas import Resident, predict_resident, predict_traffic
from shardbook.plan.peak import GB, Peak, Visits, fold_moments
from shardbook.plan.timeline import Moment, Timeline, size_of
from shardbook.recipe import Parallel, Precision, RecipeError, first_line

Place = tuple[str, Unit | None]
Loss = Callable[[nn.Module, Any], Tensor]
WITHOUT = "so the plan has no peak"
NODE = 8  # ranks that share a node, where nobody says


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
) -> ModulePlan:
    """Plan a step of `model` under a named stage on `gpus` GPUs, `node` of them in a node. Nothing is allocated, and no
    process group is needed; the model, which may lie on the meta device, is left as it is.

    `model`, `blocks`, `stage` and `precision` are those of `shard_model`. `batch`: a micro-batch of one rank, of which
    only shapes and dtypes count; `micros` of them make a step. `loss(model, batch)`: what backward begins at; None: the
    model is called with the batch (a tuple: its arguments, a mapping: its named ones), and its `loss`, or else the sum
    of what it returns, is taken. `optimizer`: as optim.name; `adamw` is torch's.

    A module that cannot run on fake tensors has a plan without a peak, whose `unmeasured` names the block and the
    reason. Raises RecipeError (a ValueError) where something does not fit.
    """
    probe("stages", "simulate")
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
    parts = [[block] for block in blocks]
    layout = build_layout(parallel, settled.on("cuda"), model, parts, blocks, gpus, min(node, gpus))
    names = {module: name for name, module in model.named_modules()}
    units = {names[unit.modules[0]]: unit for unit in layout.units if unit.numel}
    resident = predict_resident(layout, 0, optimizer)
    moments, unmeasured = dict[str, Peak](), ""
    try:
        visits, around = measure_module(model, blocks, batch, loss or call_model, layout)
        moments = fold_moments(layout, micros, [visits], resident, lambda chunk, flying: around)
    except Unmeasured as error:
        unmeasured = str(error)
    return ModulePlan(layout, units, resident, predict_traffic(layout, micros, optimizer), moments, unmeasured)


def _is_count(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given > 0


def call_model(model: nn.Module, batch: Any) -> Tensor:
    """Returns the `loss` of what `model` returns for `batch`, or the sum of all float tensors in it."""
    given = batch if isinstance(batch, tuple) else () if isinstance(batch, Mapping) else (batch,)
    made = model(*given, **(batch if isinstance(batch, Mapping) else {}))
    if isinstance(found := getattr(made, "loss", None), Tensor):
        return found
    return torch.stack([each.sum() for each in tensors_in(made) if each.is_floating_point()]).sum()


class Walk(Timeline):
    """Records the bytes after every operation of any module's forward and backward, and in which block it is."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], outside: Iterable[Tensor]):
        super().__init__(model, blocks, outside, model)
        self.order: list[int] = []  # blocks as they ran
        self.entered: dict[int, int] = {}  # the bytes before a block's forward
        self.turn = 0  # the first of `moments` that is backward's
        self.left: dict[int, Moment] = {}  # at the end of a block's backward; -1: of all

    def take_gradient(self, owner: int, parameter: Tensor) -> None:
        self.grads.setdefault(owner, {})
        self.note()  # while it is beside its sum
        super().take_gradient(owner, parameter)

    def reach(self, head: nn.Module, args: Any) -> None:
        """Does nothing: no part of any module is its head."""

    def enter(self, number: int, block: nn.Module, args: Any, named: Any) -> None:
        if in_backward():  # a checkpoint runs it again
            return
        self.order.append(number)
        self.entered[number] = self.count()
        self.place = ("forward", number)
        if given := [each for each in tensors_in((args, named)) if each.requires_grad]:
            register_multi_grad_hook(given, lambda _: self.end(number))

    def leave(self, number: int, block: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        self.place = ("outside", number + 1)
        if made := [each for each in tensors_in(output) if each.requires_grad]:
            register_multi_grad_hook(made, lambda _: self.begin(number), mode="any")

    def end(self, number: int) -> None:
        super().end(number)
        self.note()
        self.left[number] = self.moments[-1]


@contextmanager
def replaced_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Has `model`, while open, fake parameters in the dtype of compute, and fake buffers, instead of its own."""
    made: dict[Tensor, Tensor] = {}
    own = [
        (module, name, tensor)
        for module in model.modules()
        for named in (module.named_parameters, module.named_buffers)
        for name, tensor in named(recurse=False, remove_duplicate=False)
    ]
    for module, name, tensor in own:
        if tensor not in made:
            fake = torch.empty_like(tensor, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(cast_floats(fake, dtype), tensor.requires_grad)
            made[tensor] = fake
        setattr(module, name, made[tensor])  # by its __setattr__: nn.LSTM has a list of its parameters
    try:
        yield
    finally:
        for module, name, tensor in own:
            setattr(module, name, tensor)


def measure_module(
    model: nn.Module, blocks: Sequence[nn.Module], batch: Any, loss: Loss, layout: Layout
) -> tuple[Visits, int]:
    """Returns what a micro-batch takes at the moments of a pass, and the bytes of its tensors and of the model's
    buffers, which are there all the time. Raises Unmeasured where it does not run on fake tensors."""
    compute, names = layout.dtype("params"), {module: name for name, module in model.named_modules()}
    with fake_tensors(), replaced_tensors(model, compute):
        given = map_tensors(batch, lambda tensor: torch.empty_like(tensor, device="cpu"))
        beside = [*model.buffers(), *tensors_in(given)]
        walk = Walk(model, blocks, beside)
        if layout.casts or not layout.is_replicated:  # what a unit is given, as fully_shard and replicated.py do
            for module in dict.fromkeys(module for unit in layout.units for module in unit.modules):
                walk.hooks.append(module.register_forward_pre_hook(partial(cast_inputs, compute), with_kwargs=True))
        walk.hooks.append(model.register_forward_hook(lambda module, args, made: cast_floats(made, torch.float32)))
        try:
            with walk:
                found = loss(model, given)
                walk.turn = len(walk.moments)
                found.backward()
                del found
                walk.end(-1)
        except Exception as error:
            raise_if_ours(error)
            place, number = walk.place
            block = f"block {names[blocks[number]]}, a {type(blocks[number]).__name__}," if place != "outside" else ""
            why = f"cannot run without memory ({first_line(error)}), {WITHOUT}"
            raise Unmeasured(f"{block or 'what is in no block'} {why}") from error
        finally:
            for hook in walk.hooks:
                hook.remove()
    said = [names[block] for block in blocks]
    for number, name in enumerate(said):
        if (times := walk.order.count(number)) != 1:
            raise RecipeError(f"plan_module: block {name} runs {times} times in a micro-batch; it must run once")
    for late, early in pairwise(walk.order):
        if late > early:
            raise RecipeError(
                f"plan_module: block {said[late]} runs before block {said[early]}; name them in the order in which "
                "they run"
            )
    return visits_of(walk, blocks, [f"block {name}" for name in said], layout), sum(map(size_of, beside))


def visits_of(walk: Walk, blocks: Sequence[nn.Module], names: Sequence[str], layout: Layout) -> Visits:
    """Returns, of the moments at which live.py has sums, their names, the bytes that are there when they begin, and
    those that come on top. What runs between two blocks counts with the later one."""
    root, unit_of = layout.units[-1], {unit.modules[0]: unit for unit in layout.units}
    own = [*(unit_of.get(block, root) for block in blocks), root]  # of blocks, and at -1 of what is in none
    *_, (_, backward) = step_passes(layout, 1)
    place = {unit: number for number, (what, unit, _) in enumerate(backward) if what == "compute"}
    # whose gradients wait for the end of backward: fully_shard reduces there what has no input with a gradient
    late = {unit for number, unit in enumerate(own) if number not in walk.left} | {root}

    def place_of(moment: Moment, is_forward: bool) -> tuple[Place, str]:
        where, number = moment.place
        if number == len(blocks):  # replicated.py begins a sum with its first gradient
            is_before = is_forward or (layout.is_replicated and -1 not in moment.grads)
            return (("end of forward", None), "loss") if is_before else (("start of backward", None), "loss, backward")
        if is_forward:
            return ("forward", own[number]), f"{names[number]}, forward"
        number -= where == "outside"
        if number < 0 and root not in place:
            return ("end of backward", None), "end"
        unit = min((own[number], root), key=lambda each: place.get(each, len(backward)))
        return ("backward", unit), "end" if number < 0 else f"{names[number]}, backward"

    def size_at(moment: Moment, unit: Unit | None, is_over: bool = False) -> int:
        """Adds gradients that wait for a reduction; of the unit itself (`is_over`) live.py does."""
        if layout.is_replicated:
            return moment.bytes
        wait = {each for each in late if place.get(each, 0) > place.get(unit, 0)} if is_over else {unit, *late}
        return moment.bytes + sum(size for owner, size in moment.grads.items() if own[owner] in wait)

    sizes, labels = dict[Place, list[int]](), dict[Place, str]()
    for at, moment in enumerate(walk.moments):
        key, label = place_of(moment, at < walk.turn)
        sizes.setdefault(key, []).append(size_at(moment, key[1]))
        labels.setdefault(key, label)
    visits: Visits = {key: (labels[key], own[0], max(own) - own[0]) for key, own in sizes.items()}
    for number, size in walk.entered.items():
        visits["gather", own[number]] = f"{names[number]}, gathered", size, 0
    for number, name in enumerate([*names, "end"]):
        moment = walk.left.get(number, walk.left[-1])
        visits["reduction", own[number]] = f"{name}, reduced", size_at(moment, own[number], is_over=True), 0
    if layout.is_replicated:
        visits["end of backward", None] = "end, sums", walk.left[-1].bytes, 0
    return visits
