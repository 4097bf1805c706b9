"""Watches where a backward of a model begins and ends; after an error inside one no later forward begins.

Invariant: every stage is watched in the same way. Summed gradients may hold a part of the broken micro-batch, which
cannot be taken out again, and fully_shard's own state after an error is not to be trusted.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.comm.torch_private import call_after_backward, in_backward


class PassMonitor:
    """A watch on the passes of a model, or of each of its chunks of layers."""

    def __init__(self) -> None:
        self.inside = ""  # the pass that began and has not ended: forward or backward

    def follow(self, model: nn.Module, gathers: bool, end: Callable[[], None] | None = None) -> None:
        """Watches `model`, which has its other hooks already. `gathers`: an error inside a forward breaks it too. `end`
        is called when a backward is over, after every other callback of its end."""
        model.register_forward_pre_hook(partial(self._before_forward, gathers), prepend=True)
        model.register_forward_hook(partial(self._after_forward, end))

    def begin_backward(self, end: Callable[[], None] | None = None, gradient: Tensor | None = None) -> None:
        """Notes that a backward has begun. Further calls in the same backward do nothing."""
        if self.inside != "backward":
            self.inside = "backward"
            # Queued twice: else it would run before callbacks that others queue, as fully_shard its last reductions.
            call_after_backward(lambda: call_after_backward(partial(self._end, end)))

    def _end(self, end: Callable[[], None] | None) -> None:
        if end:
            end()
        self.inside = ""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, gathers: bool, module: nn.Module, inputs: Any) -> None:
        if in_backward():  # activation checkpointing recomputes a forward: it is no new one
            return
        if self.inside:
            raise RuntimeError(
                f"a {self.inside} of this model ended in an error, and its gradients are lost: build it anew"
            )
        self.inside = "forward" if gathers else ""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, end: Callable[[], None] | None, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.inside == "forward":
            self.inside = ""
        call_before_backward(output, partial(self.begin_backward, end))


def call_before_backward(output: Any, function: Callable[[Tensor], None]) -> None:
    """Has autograd call `function` when a backward reaches the tensors that a forward has `output`."""
    if torch.is_grad_enabled():
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(function)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in `value`, also in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name, None))
