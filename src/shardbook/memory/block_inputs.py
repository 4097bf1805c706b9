"""Activation offload: inputs of recomputed blocks wait in host memory; backward prefetches each one block ahead.

Only block inputs leave the device: they are what full checkpointing keeps, layers times tokens times hidden size
(the idea of ZeRO-Infinity, arXiv 2104.07857, section 5.1.2). Invariant: the same bits come back; one buffer a block, as
large as its largest input so far.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardbook.memory.direct_io import page_buffer
from shardbook.model.causal_lm import CausalLM
from shardbook.recipe import Offload


def offload_block_inputs(model: CausalLM, recomputed: Sequence[int], offload: Offload) -> None:
    """Offloads inputs of the blocks whose numbers are in `recomputed`, where offload.activations = cpu."""
    if offload.activations == "cpu":
        host_inputs = HostInputs(recomputed)
        for number, block in enumerate(model.all_blocks):
            if block is not None:
                call_inside(block, partial(host_inputs, number))


def call_inside(block: Any, context: Callable[[Tensor], contextlib.AbstractContextManager[Any]]) -> None:
    """Has each call of `block`, its hooks and what is compiled of it included, run inside the `context` that is given
    for its input."""
    kind: Any = type(block)
    block.__class__ = _called_inside(kind)
    block.context_of_call = context


@cache
def _called_inside(kind: Any) -> Any:
    """Returns the class of blocks of a `kind` with a context. They have one class: torch.compile makes a graph for
    each."""

    def call(block: Any, hidden: Tensor, *given: Any, **named: Any) -> Any:
        with block.context_of_call(hidden):
            return kind.__call__(block, hidden, *given, **named)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


class HostInputs:
    """Gives the context around each block's forward that offloads its input. `recomputed`: numbers of the blocks that
    run again in backward; the last one's input stays on the device, since backward begins with it."""

    def __init__(self, recomputed: Sequence[int]):
        self.leaving = list(recomputed[:-1])
        self.buffers: dict[int, Tensor] = {}  # bytes, pinned on a GPU
        self.kept: dict[int, Tensor] = {}  # views of the buffers: the inputs
        self.copied: dict[int, Any] = {}  # events behind the copy to the host
        self.fetched: dict[int, tuple[Tensor, Any]] = {}
        self.streams: list[Any] = []

    def __call__(self, number: int, hidden: Tensor) -> contextlib.AbstractContextManager[Any]:
        """Returns the context for the forward of block `number`, whose input is `hidden`."""
        if number not in self.leaving or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        begin, shape, device = hidden.data_ptr(), hidden.shape, hidden.device

        def pack(tensor: Tensor) -> Tensor | None:
            if tensor.data_ptr() != begin or tensor.shape != shape:
                return tensor
            self._send(number, tensor)
            return None

        def unpack(kept: Tensor | None) -> Tensor:
            return self._fetch(number, device) if kept is None else kept

        return saved_tensors_hooks(pack, unpack)

    def _send(self, number: int, tensor: Tensor) -> None:
        kept = self._room(number, tensor)
        if not tensor.is_cuda:
            kept.copy_(tensor.detach())
            return
        out, _ = self._streams()
        out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(out):
            kept.copy_(tensor.detach(), non_blocking=True)
            self.copied[number] = out.record_event()
        tensor.record_stream(out)

    def _room(self, number: int, tensor: Tensor) -> Tensor:
        """Returns the host buffer for `tensor`, in its shape and dtype."""
        if number not in self.buffers or self.buffers[number].nbytes < tensor.nbytes:
            for stream in self.streams:
                stream.synchronize()  # a copy may still use the buffer that is freed here
            self.kept.pop(number, None)
            self.buffers.pop(number, None)
            self.buffers[number] = page_buffer(tensor.nbytes, pin=tensor.is_cuda)  # torch's would be a power of two
        self.kept[number] = self.buffers[number][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return self.kept[number]

    def _fetch(self, number: int, device: torch.device) -> Tensor:
        tensor, event = self.fetched.pop(number) if number in self.fetched else self._load(number, device)
        before = self.leaving.index(number) - 1
        if before >= 0:
            self.fetched[self.leaving[before]] = self._load(self.leaving[before], device)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            tensor.record_stream(torch.cuda.current_stream())
        return tensor

    def _load(self, number: int, device: torch.device) -> tuple[Tensor, Any]:
        if device.type != "cuda":
            return self.kept[number], None
        _, back = self._streams()
        with torch.cuda.stream(back):
            back.wait_event(self.copied[number])
            return self.kept[number].to(device, non_blocking=True), back.record_event()

    def _streams(self) -> list[Any]:
        """Returns the stream to the host and the stream back, made once: the allocator keeps memory for each stream."""
        if not self.streams:
            self.streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        return self.streams
