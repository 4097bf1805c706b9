"""Experts: parameters that a family stacks, a matrix an expert, become the rows of one matrix.

Invariant: the family's own code sees its shapes [E, out, in]; all else sees [E * out, in]. Shards then are rows, as of
any matrix, and nothing is padded where there are more ranks than experts. A stage shards experts as it shards all else;
parallel/experts.py gives each rank some of them.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardbook.comm.torch_private import slots_of
from shardbook.model.marks import STACKED


def stack_rows(model: nn.Module) -> dict[str, torch.Size]:
    """Makes each stacked parameter of `model` a matrix, in place. Returns by name the shapes that the family has."""
    family_shapes: dict[str, torch.Size] = {}
    for stem, module in model.named_modules():
        stacks = {name: each for name, each in module.named_parameters(recurse=False) if each.ndim == 3}
        if type(module).__module__.startswith("torch."):  # a convolution's weight is no stack
            continue
        if not stacks:
            _name_stacks(module)
            continue
        for name, parameter in stacks.items():
            slots_of(module)[name] = nn.Parameter(parameter.detach().flatten(0, 1), parameter.requires_grad)
        shapes = {name: parameter.shape for name, parameter in stacks.items()}
        view_stacks(module, shapes)
        module.register_load_state_dict_pre_hook(_flatten)
        family_shapes |= {f"{stem}.{name}": shape for name, shape in shapes.items()}
    return family_shapes


def has_interface(module: nn.Module) -> bool:
    """Returns whether a module of experts is behind transformers' interface of them, whose decorator sets
    `is_transposed`: without it the forward takes other arguments."""
    return hasattr(module, "is_transposed")


def expert_width(model: nn.Module) -> int:
    """Returns the width of the rows that the experts of `model` take, which need not be that of its blocks; 0 where
    none is behind transformers' interface. Call it before experts are packed."""
    for module in model.modules():
        shapes = getattr(module, STACKED, {}) if has_interface(module) else {}
        for shape in (shapes[name] for name in ("gate_up_proj", "up_proj") if name in shapes):
            return int(shape[1 if module.is_transposed else 2])
    return 0


def _name_stacks(module: nn.Module) -> None:
    """Says which of a module's own matrices have an expert after another as their rows, as DBRX's have."""
    for experts in [count for name, count in vars(module).items() if name.endswith("num_experts")]:
        matrices = [(n, p) for n, p in module.named_parameters(recurse=False) if p.ndim == 2]
        stacks = {n: (experts, len(p) // experts, p.shape[1]) for n, p in matrices if len(p) % experts == 0}
        setattr(module, STACKED, {n: shape for n, shape in stacks.items() if shape[1] > 1})  # a router has one row each


def view_stacks(
    module: nn.Module, shapes: Mapping[str, torch.Size], forward: Callable[..., Tensor] | None = None
) -> None:
    """Has the code of `module` see its parameters of these names in these `shapes`, and no others so; with `forward`
    it runs that in place of its family's."""
    family: Any = getattr(module, "family", None) or type(module)
    module.__class__ = _viewed(family, tuple(shapes.items()), forward)


@cache
def _viewed(family: Any, shapes: tuple[tuple[str, torch.Size], ...], forward: Callable[..., Tensor] | None) -> Any:
    """Returns the class `family` with the parameters of these names seen in these shapes, and with `forward`. All
    blocks have one class: torch.compile makes a graph for each."""

    def seen(name: str, shape: torch.Size) -> property:
        def get(module: nn.Module) -> Tensor:
            parameter: Any = slots_of(module)[name]
            # fully_shard looks up its own shard by this name; a forward meets gathered parameters
            return parameter if isinstance(parameter, DTensor) else parameter.view(-1, *shape[1:])

        return property(get)

    words: dict[str, Any] = {name: seen(name, shape) for name, shape in shapes}
    words |= {STACKED: dict(shapes), "family": family, "__module__": family.__module__}
    words |= {"forward": forward} if forward else {}
    return type(family.__name__, (family,), words)


def _flatten(module: nn.Module, tensors: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Flattens the family's stacks among `tensors` before they are loaded into `module`."""
    for name in getattr(module, STACKED):
        if (key := prefix + name) in tensors and tensors[key].ndim == 3:
            tensors[key] = tensors[key].flatten(0, 1)


def matrices_of(blocks: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Returns the matrices inside `blocks`; a stack of matrices, which experts are, is none, nor are their biases."""
    modules = [module for block in blocks for module in block.modules() if getattr(module, STACKED, None)]
    stacked = {p for module in modules for p in module.parameters(recurse=False)}
    return {p for block in blocks for p in block.parameters() if p.ndim == 2} - stacked


def stacked_parameters(block: nn.Module) -> dict[nn.Parameter, int]:
    """Returns the parameters of `block` that are stacks of matrices, with the number of matrices in each."""
    shapes = ((module, getattr(module, STACKED, {})) for module in block.modules())
    return {p: of[name][0] for module, of in shapes for name, p in module.named_parameters(recurse=False) if name in of}
