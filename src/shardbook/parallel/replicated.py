"""Replicated data parallel (DDP): bucketed all-reduces of gradients that overlap with backward. Every stage runs so
where dp_shard is 1: a rank then holds the whole model.

fully_shard would copy each unit into a buffer, out of it and back for a group of one, and wait for each sum across
replicas. Here autograd sees the parameters themselves, and gradients are summed while backward goes on (Li et al.,
PyTorch Distributed, VLDB 2020, section 3.2.3). Invariant: the same sums in the same order as fully_shard's on a mesh
of (replicas, 1), to the bit.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardbook.comm.torch_private import call_after_backward, copy_together, slots_of, version_of
from shardbook.parallel.buckets import bucket_units
from shardbook.parallel.layout import Layout
from shardbook.parallel.pass_monitor import PassMonitor, call_before_backward
from shardbook.parallel.units import parameters_of_units

COPIED: WeakSet[nn.Module] = WeakSet()  # the models that `ReplicatedParameters` holds already


@dataclass(eq=False)
class GradientBucket:
    """A bucket: the masters of units whose gradients one all-reduce sums, and this rank's gradients of them.

    Weights w of two buckets on four ranks. Each rank makes the gradients g of its own rows, the last layers' first:

                  at rest    backward         all-reduce, while backward goes on    optimizer
        rank 0    w0 w1      its g1, its g0   sum of four g1, then of four g0       steps w0 w1
        rank 1    w0 w1      its g1, its g0   the same sums                         steps w0 w1
        rank 2    w0 w1      its g1, its g0   the same sums                         steps w0 w1
        rank 3    w0 w1      its g1, its g0   the same sums                         steps w0 w1
    """

    masters: list[nn.Parameter]
    flat: Tensor | None = None  # this rank's gradients since the last reduction, in the layout's sum_dtype
    views: list[Tensor] = field(default_factory=list)  # into `flat`, one for each of `masters`
    in_flat: set[int] = field(default_factory=set)  # indices of `masters` whose gradient is in `flat`
    ready: set[int] = field(default_factory=set)  # indices of `masters` whose gradient is complete in this backward
    sent: list[tuple[Tensor, dist.Work | None]] = field(default_factory=list)  # sums under way
    stashed: dict[int, Tensor | None] = field(default_factory=dict)  # .grad of `masters` while autograd makes a new one

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Returns the piece of `flat` that belongs to each of `masters`, in its shape."""
        pieces = flat.split([master.numel() for master in self.masters])
        return [piece.view_as(master) for piece, master in zip(pieces, self.masters, strict=True)]

    def make_flat(self, dtype: torch.dtype) -> Tensor:
        flat = self.masters[0].new_empty(sum(master.numel() for master in self.masters), dtype=dtype)
        self.flat, self.views = flat, self.cut(flat)
        return flat

    def add(self, number: int, gradient: Tensor, dtype: torch.dtype) -> None:
        if self.flat is None:
            self.make_flat(dtype)
        if number in self.in_flat:
            self.views[number].add_(gradient)
        else:
            self.views[number].copy_(gradient)
        self.in_flat.add(number)
        self.ready.add(number)

    def send(self, replicas: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        """Begins the all-reduce over `replicas`. Parameters that no backward reached count as zeros: else ranks would
        sum unequal buffers. With one rank, a bucket that no backward reached sends nothing."""
        if self.flat is None and replicas is None:
            return
        flat = self.make_flat(dtype) if self.flat is None else self.flat
        for number, view in enumerate(self.views):
            if number not in self.in_flat:
                view.zero_()
        # Looked up at each call: the ledger replaces it while it is open.
        work = dist.all_reduce(flat, group=replicas, async_op=True) if replicas else None
        self.sent.append((flat, work))
        self.flat, self.views = None, []
        self.in_flat.clear()

    def receive(self) -> None:
        """Waits for the sums and adds them to the gradients of the parameters at rest."""
        for flat, work in self.sent:
            if work is not None:
                work.wait()
            for master, summed in zip(self.masters, self.cut(flat.to(self.masters[0].dtype)), strict=True):
                if master.grad is None:
                    master.grad = summed
                else:
                    master.grad += summed
        self.sent.clear()


class ReplicatedParameters:
    """A `model` on ranks that hold all of it, its gradients summed over `replicas` (None: there is one rank). Its
    forward returns floats in the dtype `output`."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        replicas: dist.ProcessGroup | None,
        output: torch.dtype,
        monitor: PassMonitor,
    ):
        self.model, self.layout, self.replicas, self.monitor = model, layout, replicas, monitor
        self.is_last = True  # as with fully_shard: a loop that never sets it reduces after each backward
        self.parts: list[GradientBucket] = []  # buckets in the order in which they are sent, the same on every rank
        # of each parameter at rest: itself, its copy in the dtype of compute, and the modules and names that have it
        self.copies: list[tuple[nn.Parameter, nn.Parameter, list[tuple[nn.Module, str]]]] = []
        self._versions: list[int] = []  # `steps` and versions of the parameters at rest when they were copied
        self.steps = 0  # optimizer steps over any of them: fused optimizers change no tensor's version
        self.gathered = self._found = self._running = False
        self._unsent: list[GradientBucket] = []  # those of `parts` that are not sent in this backward
        compute = layout.dtype("params")
        COPIED.add(model)
        model.register_forward_hook(lambda module, inputs, result: cast_floats(result, output))
        for module in {module: None for unit in layout.units for module in unit.modules} if layout.casts else ():
            module.register_forward_pre_hook(partial(cast_inputs, compute), with_kwargs=True)
        if layout.casts or replicas is not None:
            model.register_forward_pre_hook(self._before_forward, prepend=True)
        if layout.casts:
            model.register_forward_hook(self._after_forward)

    def begin(self, is_last: bool) -> None:
        """Begins a micro-batch. `is_last`: it is the last one of its optimizer step."""
        self.is_last = is_last

    def free(self) -> None:
        """Puts the parameters at rest back into their modules, and frees their copies in the dtype of compute."""
        if self.gathered:
            for master, copy, places in self.copies:
                _put(master, places)
                copy.untyped_storage().resize_(0)
            self.gathered = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # traced, it would resize storages at another time
    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not self._found:  # not earlier: materializing a model on the meta device replaces its parameters
            self._find()
        if self.layout.casts and not self.gathered:
            self._gather()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        call_before_backward(output, partial(self._before_backward, self._versions))

    def _before_backward(self, versions: list[int], gradient: Tensor) -> None:
        """Makes the copies in the dtype of compute again where they were freed since a forward with these `versions`:
        autograd kept none of its own. Raises RuntimeError where parameters changed since that forward."""
        now = self._versions if self.gathered else self._read_versions()
        if now is not versions and now != versions:
            raise RuntimeError(
                "parameters were changed, by an optimizer's step perhaps, between a forward and its backward, which "
                f"would read copies in {self.layout.dtype('params')} of the new ones: run the forward again, or its "
                "backward before the step"
            )
        if not self.gathered:
            self._gather()

    def _read_versions(self) -> list[int]:
        return [self.steps, *(version_of(master) for master, _, _ in self.copies)]

    def _gather(self) -> None:
        """Copies the parameters at rest into the dtype of compute, and has the modules compute with the copies."""
        for _, copy, places in self.copies:
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
            _put(copy, places)
        with torch.no_grad():
            # .data: else autograd would refuse copies that were made again (after an evaluation) as modified in place.
            # The two dtypes always differ here: with equal ones CUDA would rewrite packed bytes that are NaN as floats.
            copy_together([copy.data for _, copy, _ in self.copies], [master for master, _, _ in self.copies])
        self._versions, self.gathered = self._read_versions(), True

    def _find(self) -> None:
        """Finds the parameters at rest, and registers hooks that take their gradients."""
        leaves: dict[nn.Parameter, nn.Parameter] = {}
        if self.layout.casts:
            places, compute = dict[nn.Parameter, list[tuple[nn.Module, str]]](), self.layout.dtype("params")
            for module in self.model.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    if parameter.dtype != compute:  # else it is frozen, and at rest in it: it needs no copy
                        places.setdefault(parameter, []).append((module, name))
            for parameter, owners in places.items():
                copy = nn.Parameter(torch.empty_like(parameter, dtype=compute), requires_grad=parameter.requires_grad)
                leaves[parameter] = copy
                self.copies.append((parameter, copy, owners))
            stepped = register_optimizer_step_post_hook(partial(_note_step, ref(self), {*places}))
            finalize(self, stepped.remove)
        parameters = parameters_of_units(self.layout.units)
        for bucket in bucket_units(self.layout):
            part = GradientBucket(
                [parameter for unit in bucket for parameter in parameters[unit] if parameter.requires_grad]
            )
            self.parts.append(part)
            for number, parameter in enumerate(part.masters):
                leaf = leaves.get(parameter, parameter)
                leaf.register_post_accumulate_grad_hook(partial(self._take, part, number))
                if leaf is parameter:
                    leaf.register_hook(partial(self._set_aside, part, number))
        self._found = True

    def _set_aside(self, part: GradientBucket, number: int, gradient: Tensor) -> None:
        """Sets aside the .grad that a parameter at rest has: it is summed already, and must not be sent again."""
        master = part.masters[number]
        part.stashed[number], master.grad = master.grad, None

    def _take(self, part: GradientBucket, number: int, leaf: Tensor) -> None:
        """Takes a gradient that is complete in this backward; sends full buckets, in the same order on all ranks."""
        if not self._running:
            self.monitor.begin_backward()  # for a backward that did not begin at the model's output
            call_after_backward(self._finish)
            self._running, self._unsent = True, [*self.parts]
        gradient, leaf.grad = leaf.grad, part.stashed.pop(number, None)
        assert gradient is not None
        part.add(number, gradient, self.layout.sum_dtype)
        if self.is_last:
            while self._unsent and len(self._unsent[0].ready) == len(self._unsent[0].masters):
                self._send_next()

    def _send_next(self) -> None:
        self._unsent.pop(0).send(self.replicas, self.layout.sum_dtype)

    def _finish(self) -> None:
        """Ends a backward: after a step's last one sends the buckets that are left, and receives all sums."""
        self._running = False
        if self.is_last:
            while self._unsent:
                self._send_next()
            self.free()  # before `receive`, which holds a sum and its cast at once: else the peak is higher
            for part in self.parts:
                part.receive()
        for part in self.parts:
            part.ready.clear()


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns `value` with `function` of every tensor, also of those inside tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, function) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        mapped = {name: map_tensors(part, function) for name, part in value.items()}
        if isinstance(value, defaultdict):
            return defaultdict(value.default_factory, mapped)
        return type(value)(mapped)  # type: ignore[call-arg]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: map_tensors(getattr(value, each.name), function) for each in fields(value)})
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def cast_inputs(dtype: torch.dtype, module: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
    """Casts, as a hook before a module's forward, all float tensors among its arguments."""
    return cast_floats(inputs, dtype), cast_floats(named, dtype)


def _note_step(replicated: ref[ReplicatedParameters], masters: set[nn.Parameter], optimizer: Any, *given: Any) -> None:
    if (copies_here := replicated()) and any(
        each in masters for group in optimizer.param_groups for each in group["params"]
    ):
        copies_here.steps += 1


def _put(parameter: nn.Parameter, places: list[tuple[nn.Module, str]]) -> None:
    """Sets `parameter` in modules by these names, past nn.Module's checks: they would run hundreds of times a step."""
    for module, name in places:
        if type(module).__setattr__ is nn.Module.__setattr__:
            slots_of(module)[name] = parameter
        else:  # a __setattr__ of its own must run: nn.LSTM keeps a list of its parameters, which it makes anew
            setattr(module, name, parameter)
