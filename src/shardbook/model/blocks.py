"""Parts of a model by their names, and a model that has a part of its blocks: what stands in their list for the others.

Invariant: the base model's own forward runs its list as it is, and ends as it ends; nothing here knows which arguments
it passes to a block. Parameter names stay transformers'.
"""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def at(module: nn.Module, name: str) -> Any:
    """Returns the module inside `module` of a dotted `name`; None where it was taken away."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def put(module: nn.Module, name: str, child: nn.Module | nn.Parameter | None) -> None:
    """Sets the module, or parameter, inside `module` of a dotted `name`."""
    owner, _, last = name.rpartition(".")
    setattr(at(module, owner) if owner else module, last, child)


def copy_module(module: Module) -> Module:
    """Returns another module of the same parts, with attributes, parts and hooks of its own."""
    copied = copy.copy(module)
    vars(copied).update({name: value.copy() for name, value in vars(copied).items() if isinstance(value, dict)})
    return copied


class Absent(nn.Module):
    """A block that lies elsewhere: it returns its input. The last one before a block that is here returns what was
    `received` for that block."""

    received: Tensor | None = None

    def __init__(self, block: nn.Module):
        super().__init__()
        # a forward may read attributes of a block that it runs: its layer's kind
        vars(self).update({name: value for name, value in vars(block).items() if isinstance(value, (str, int, float))})

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden if self.received is None else self.received


def keep_blocks(model: Any, numbers: Sequence[int], has_embedding: bool, has_head: bool) -> None:
    """Keeps of a CausalLM the blocks of these `numbers`, its embedding if it `has_embedding`, its last norm and its
    head if it `has_head`. It can run where the numbers follow each other. No name changes; a tied head without the
    embedding has the embedding's name."""
    names, base = model.names, model.base
    blocks = enumerate(at(base, names.blocks))
    kept = [block if number in numbers or isinstance(block, Absent) else Absent(block) for number, block in blocks]
    put(base, names.blocks, nn.ModuleList(kept))
    if not has_embedding:
        put(base, names.embedding, model.head if has_head and model.is_tied else None)
    if not has_head:
        model.drop_head()


def copy_view(model: Any) -> Any:
    """Returns another CausalLM of the same modules, with hooks and a list of blocks of its own."""
    view = copy_module(model)
    setattr(view, model.names.base, copy_module(model.base))
    for name in (view.names.embedding, view.names.blocks, view.names.norm):
        owner = name.rpartition(".")[0]
        if owner and at(view.base, owner) is at(model.base, owner):  # else both would have one list of blocks
            put(view.base, owner, copy_module(at(model.base, owner)))
    return view
