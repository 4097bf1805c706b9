"""A part of a model's blocks: what stands in the list of blocks for those that lie elsewhere.

Invariant: the base model's own forward runs its list as it is, and ends as it ends; nothing here knows which arguments
it passes to a block. Parameter names stay transformers'.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from shardbook.model.hf_model import at, copy_module, put


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
    """Keeps of a CausalLM the blocks of these `numbers`, which follow each other, and where it has them its embedding,
    its last norm and its head. No name changes. A tied head without the embedding has the embedding's name."""
    names, base = model.names, model.base
    blocks = enumerate(at(base, names.blocks))
    kept = [block if number in numbers or isinstance(block, Absent) else Absent(block) for number, block in blocks]
    put(base, names.blocks, nn.ModuleList(kept))
    if not has_embedding:
        put(base, names.embedding, model.head if has_head and model.is_tied else None)
    if not has_head:
        put(base, names.norm, nn.Identity())
        setattr(model, names.head, None)


def copy_view(model: Any) -> Any:
    """Returns another CausalLM of the same modules, with hooks and a list of blocks of its own."""
    view = copy_module(model)
    setattr(view, model.names.base, copy_module(model.base))
    return view
