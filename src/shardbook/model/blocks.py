"""Blocks: our list in the place of the list of blocks in transformers' base model, and the hooks around each block.

Invariant: the base model's own forward runs them; nothing here knows which arguments it passes to a block. Parameter
names stay transformers'. A pipeline stage's missing blocks hand on their input, so the forward runs from any block to
any other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

AroundBlock = Callable[[int, Tensor], AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward of a base model: the facts that its masks and blocks need, and that its forward does not pass on."""

    cu_seqlens: Tensor  # of documents: int32 offsets into the flat [B * L]
    shape: torch.Size  # of the rows, whole, also where this rank has a slice of them
    packed: bool
    max_seqlen: int  # tokens of the longest document
    around: AroundBlock
    received: Tensor | None  # the input of this pipeline stage's first block; None: what the forward has
    last: int  # the block after which the forward ends; -1: it goes on to its own end


_PASS: ContextVar[ForwardPass | None] = ContextVar("pass", default=None)


def current_pass() -> ForwardPass | None:
    """Returns the forward that runs now; None while text is generated."""
    return _PASS.get()


@contextmanager
def passing(now: ForwardPass) -> Iterator[None]:
    """Makes `now` the current pass of the forward that runs inside."""
    token = _PASS.set(now)
    try:
        yield
    finally:
        _PASS.reset(token)


class LastBlockDone(Exception):
    """The end of a pipeline stage's forward: the rest of the base model is another rank's."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden


class Blocks(nn.ModuleList):
    """A base model's blocks by their numbers, None for those of other ranks. Iteration and slices, by which a base
    model's forward runs them, give a BlockCall for each; a number gives the block itself."""

    def __init__(self, blocks: Sequence[nn.Module | None], facts: Sequence[dict[str, Any]] = ()):
        super().__init__(blocks)  # type: ignore[arg-type]
        # A forward may read attributes of a block that lies on another rank: its layer's kind.
        self.facts = list(facts) or [_plain_attributes(block) for block in blocks]

    def only(self, numbers: Sequence[int]) -> "Blocks":
        """Returns the same list with None for every block not among `numbers`."""
        return Blocks([block if number in numbers else None for number, block in enumerate(self.all)], self.facts)

    @property
    def all(self) -> list[nn.Module | None]:
        return [super(Blocks, self).__getitem__(number) for number in range(len(self))]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        local_numbers = [number for number, block in enumerate(self.all) if block is not None]
        first = local_numbers[0] if local_numbers else -1
        return [BlockCall(n, block, self.facts[n], n == first) for n, block in enumerate(self.all)][index]


def _plain_attributes(block: nn.Module | None) -> dict[str, Any]:
    return {name: value for name, value in vars(block or object).items() if isinstance(value, (str, int, float))}


class BlockCall:
    """One block as a base model's forward calls it. Its attributes are the block's, to be read only."""

    __slots__ = ("_block", "_facts", "_is_first", "_number")

    def __init__(self, number: int, block: nn.Module | None, facts: dict[str, Any], is_first: bool):
        self._number, self._block, self._facts, self._is_first = number, block, facts, is_first

    def __call__(self, hidden: Tensor, *given: Any, **named: Any) -> Any:
        if self._block is None:
            return hidden
        now = current_pass()
        if now is None:
            return self._block(hidden, *given, **named)
        if self._is_first and now.received is not None:
            hidden = now.received
        with now.around(self._number, hidden):
            output = self._block(hidden, *given, **named)
        if self._number == now.last:
            raise LastBlockDone(output)
        return output

    def __getattr__(self, name: str) -> Any:
        if self._block is not None:
            return getattr(self._block, name)
        if name in self._facts:
            return self._facts[name]
        raise AttributeError(f"a block of another rank has no {name!r}")
