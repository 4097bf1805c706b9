"""Checks of what must be alike in a loop of one's own: each compares ranks, or the time before and after sharding.

All ranks begin with the same weights; a model computes of an example what it computed before it was sharded; ranks
along tp have the same inputs and gradients. Invariant: what is wrong is an error on every rank, before an optimizer's
step. Of gradients small differences are rounding, where a device's kernels add in no fixed order.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardbook.comm.collectives import all_reduced
from shardbook.local_tensors import local_values
from shardbook.parallel.pass_monitor import tensors_in
from shardbook.parallel.replicated import map_tensors
from shardbook.parallel.tensor_plan import PARTIAL
from shardbook.recipe import RecipeError

PIECE = 2**22  # numbers that are widened at once
EXAMPLE_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # of an output's norm, what may be rounding
UNLIKE = 0.02  # the share of a parameter's gradient that differs between ranks from which on it is no rounding
ALIKE = 1e-5  # below which share they are the same
UNLIKE_OUTPUT = 1e-4  # the same of what a model returns, where only a loss has rounded: another label of 8,192 is 1e-2
FLOOR = 1e-5  # of the norm of all gradients: what is below may be rounding
STEPS = 100  # in which a parameter without a gradient is waited for
GOLDEN = 1.6180339887
ONE_BATCH = "they share one batch: deal out data by sharded.layout.data_rank(rank).dp_rank, of .dp_size"


def check_same_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise RecipeError, on every rank of `mesh`, where ranks hold different models or weights: each keeps only its own
    part, so a model of parts of unlike models would train without a word. What lies on the meta device has none yet."""
    named = dict(model.named_parameters())
    shape = repr([(name, tuple(p.shape), p.dtype, p.is_meta) for name, p in named.items()])
    if differing(torch.tensor([zlib.crc32(shape.encode())]), mesh):
        raise RecipeError(
            "shard_model: the model is not the same on every rank (names, shapes, dtypes, or which parameters lie on "
            "the meta device); make it alike everywhere"
        )
    real = [name for name, parameter in named.items() if not parameter.is_meta]
    sums = torch.tensor([int(sum_bits(named[name])) for name in real], dtype=torch.int64)
    if differ := [real[number] for number in differing(sums, mesh)]:
        raise RecipeError(
            f"shard_model: {len(differ)} of {len(real)} parameters are not the same on every rank, {differ[0]} first; "
            "load the same weights, or call torch.manual_seed with the same seed before the model is made"
        )


def run_example(model: nn.Module, example: Any) -> list[Tensor]:
    """Returns the floats of what `model` computes of a batch in eval mode, on the host in fp32."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise RecipeError("shard_model: example: the model lies on the meta device, and has no weights to compute with")
    device = next(model.parameters()).device
    batch = map_tensors(example, lambda tensor: tensor.to(device))
    training = [module for module in model.modules() if module.training]
    with torch.no_grad():
        output = call_with(model.eval(), batch)
    for module in training:
        module.training = True
    return [each.detach().float().cpu() for each in tensors_in(output) if each.is_floating_point()]


def call_with(model: nn.Module, batch: Any) -> Any:
    """Returns what `model` makes of a batch: a tuple holds its arguments, a mapping its named ones."""
    given = batch if isinstance(batch, tuple) else () if isinstance(batch, Mapping) else (batch,)
    return model(*given, **(batch if isinstance(batch, Mapping) else {}))


def check_outputs(expected: list[Tensor], computed: list[Tensor], mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Raises RecipeError, on every rank of `mesh`, where what a model computes in `dtype` is not what it computed."""
    if (shapes := [[tuple(each.shape) for each in outputs] for outputs in (expected, computed)])[0] != shapes[1]:
        raise RecipeError(
            f"shard_model: example: the model returns tensors of {shapes[1]}, before of {shapes[0]}: parts of features "
            "that ranks share, as attention weights are; have it return what all ranks have"
        )
    errors = [0.0]
    for before, after in zip(expected, computed, strict=True):
        difference = torch.where(before == after, 0.0, after - before).nan_to_num(nan=1e30)  # infinities are equal
        errors.append(float(difference.norm() / before[before.isfinite()].norm().clamp(min=1e-30)))
    worst = torch.tensor([min(max(errors), 1e30)], device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if not worst.item() <= EXAMPLE_ERROR[dtype]:
        raise RecipeError(
            f"shard_model: example: the model computes something else than before, off by {worst.item():.2%}, more "
            "than rounding is: between layers that ranks share its code does something to all features at once, as "
            "chunk, softmax and norms do; say colwise_gather_output and rowwise_split_input of the layers around it"
        )


class FirstSteps:
    """Checks that the ranks along tp have one batch and a right plan: the inputs of the first forward that has a
    gradient, the gradient of what it returns, and the first gradients of parameters that ranks do not share, which are
    the same along tp or, where the plan says PARTIAL, are not."""

    def __init__(self, model: nn.Module, is_whole: dict[str, bool], mesh: DeviceMesh, along: DeviceMesh):
        """Takes `is_whole`: by name whether a trained parameter that ranks do not share has its whole gradient on each;
        `along`: the ranks of `mesh` along tp."""
        self.model, self.is_whole, self.mesh, self.along = model, is_whole, mesh, along
        self.steps, self.least = 0, 0.0  # norms below which a gradient may be rounding
        self.has_run, self.of_outputs = False, list[Tensor]()  # projections of gradients
        self.handles = [
            model.register_forward_pre_hook(torch.compiler.disable(self._before), with_kwargs=True),
            model.register_forward_hook(torch.compiler.disable(self._after)),
        ]

    def _before(self, model: nn.Module, args: Any, named: Any) -> None:
        if not torch.is_grad_enabled():
            return
        digest = torch.zeros((), dtype=torch.int64)
        for number, tensor in enumerate(tensors_in((args, named)), 1):
            digest += number * (sum_bits(tensor).cpu() + zlib.crc32(repr((tensor.shape, tensor.dtype)).encode()))
        if differing(digest[None], self.along):
            raise RecipeError(f"shard_model: ranks along tp were given other inputs; {ONE_BATCH}")

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self.has_run = True
        for handle in self.handles:
            handle.remove()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.of_outputs.append(project(gradient)))

    @torch.no_grad()
    def check(self) -> bool:
        """Raises RecipeError, on every rank, where something is wrong. Call it when a step's gradients are there,
        before they are summed along tp. Returns whether it is to be called again: until each parameter has had a
        gradient, in STEPS at most. Collective."""
        self.steps += 1
        if self.of_outputs:
            self._check_outputs(torch.stack(self.of_outputs))
            self.of_outputs.clear()
        if self.is_whole:
            self._check_gradients()
        return (bool(self.is_whole) or not self.has_run) and self.steps < STEPS

    def _check_gradients(self) -> None:
        gradients = {name: self.model.get_parameter(name).grad for name in self.is_whole}
        norms, differences = [torch.zeros((), device=self.mesh.device_type)], []
        for gradient in gradients.values():
            part = norms[0] if gradient is None else local_values(gradient).float()
            mean = all_reduced(part, self.along.get_group()) / self.along.size()
            norms.append(mean.norm())
            differences.append((part - mean).norm())
        worst = self._max_of_all(torch.stack(norms[1:] + differences)).view(2, -1)
        self.least = max(self.least, FLOOR * float(worst[0].norm()))
        for name, norm, difference in zip(gradients, *worst.tolist(), strict=True):
            if max(norm, difference) > self.least:
                self._check_gradient(name, difference / (difference + norm))

    def _check_gradient(self, name: str, share: float) -> None:
        is_whole, text = self.is_whole.pop(name), f"shard_model: the gradient of {name}"
        if is_whole and share > UNLIKE:
            raise RecipeError(
                f"{text} differs between ranks along tp: where each rank has its own features there, tp_plan must say "
                f"{PARTIAL!r} of it; else they had other random numbers"
            )
        if not is_whole and share < ALIKE:
            raise RecipeError(
                f"{text} is the same on all ranks along tp, and tp_plan says {PARTIAL!r} of it: it would count "
                f"{self.along.size()} times; leave that out"
            )

    def _check_outputs(self, projections: Tensor) -> None:
        mean = all_reduced(projections, self.along.get_group()) / self.along.size()
        unlike = (projections - mean).norm(dim=1) > UNLIKE_OUTPUT * mean.norm(dim=1)
        if self._max_of_all(unlike.float()).any():
            raise RecipeError(
                "shard_model: the gradient of what the model returns differs between ranks along tp: labels, masks or "
                f"scales of the loss were others; {ONE_BATCH}; or dropout drew other random numbers: seed them alike"
            )

    def _max_of_all(self, values: Tensor) -> Tensor:
        for axis in range(self.mesh.ndim):
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.mesh.get_group(axis))
        return values


def project(gradient: Tensor) -> Tensor:
    """Returns a few sums, fp64 [3], over a gradient's numbers, weighted by their places."""
    sums, first = torch.zeros(3, dtype=torch.float64, device=gradient.device), 0
    for piece in gradient.detach().flatten().split(PIECE):
        numbers = piece.double()
        place = torch.arange(first, first + len(piece), device=piece.device, dtype=torch.float64)
        sums += torch.stack([numbers @ place.cos(), numbers @ (GOLDEN * place).sin(), numbers.square().sum()])
        first += len(piece)
    return torch.stack([sums[0], sums[1], sums[2].sqrt()])


def differing(values: Tensor, mesh: DeviceMesh) -> list[int]:
    """Returns the indices at which `values`, int64, differ between ranks of `mesh`. Collective."""
    least, most = values.to(mesh.device_type), values.to(mesh.device_type, copy=True)
    for axis in range(mesh.ndim):
        dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group(axis))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return (least != most).nonzero().flatten().tolist()


def sum_bits(tensor: Tensor) -> Tensor:
    """Returns a sum, int64, over a tensor's numbers taken as integers of its itemsize. With their squares: alone, one
    that is rounded up and one that is rounded down would cancel."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    pieces = (piece.long() for piece in tensor.detach().contiguous().view(-1).view(integer).split(PIECE))
    return torch.stack([(words * words + words).sum() for words in pieces]).sum()
