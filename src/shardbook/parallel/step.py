"""The micro-batches of a step: where forward and backward of every run are called, with a pipeline or without.

A step runs the table of schedule.py action by action: receive, compute, send; with one pipeline stage the table is the
plain loop of forward and backward. Every ZeRO stage gathers and reduces as without a pipeline. Invariant: each backward
is told whether it is the step's last, so what it gathers, frees and reduces is set before it begins (`micro_batch` of
sharding.py); only the last pipeline stage computes a loss, the others return zero.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.parallel.pipeline import RecvBuffer
from shardbook.parallel.schedule import Action

# (model, micro-batch) -> [1 + metrics]: the loss, which has the gradient, first
LossFunction = Callable[[Any, Any], Tensor]


class MicroBatchRunner:
    """The micro-batches of a step, or of an evaluation, on their way through the layers of one rank."""

    def __init__(self, sharded: Any, loss_function: LossFunction, device: torch.device):
        self.links, self.layout, self.chunks = sharded.links, sharded.layout, sharded.chunks
        self.loss_function, self.device, self.expert_load = loss_function, device, sharded.expert_load
        # (chunk, micro-batch) -> its input from the stage before, and its output
        self.outputs: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def make_recv_buffer(self, action: Action | None, micros: Sequence[Any]) -> RecvBuffer | None:
        """Allocates the receive buffer of the message that `action` needs; None where it needs none."""
        pipeline = self.layout.pipeline
        if action is None or (pipeline.is_first if action.is_forward else pipeline.is_last)(action.chunk):
            return None
        return self.links.make_recv_buffer(micros[action.micro].input_ids.shape, self.device, action.is_forward)

    def post_recv(self, buffer: RecvBuffer | None) -> tuple[dist.Work, Tensor] | None:
        return self.links.post_recv(buffer) if buffer else None

    def forward(self, action: Action, micro: Any, received: tuple[dist.Work, Tensor] | None) -> Tensor:
        """Runs a chunk's forward on `micro`, and on `received` from the stage before. Returns its output, which is sent
        to the next stage; from the last stage the output is the terms of the loss, which are not sent."""
        model, hidden = self.chunks[action.chunk].model, _wait_received(received)
        if hidden is not None:
            hidden.requires_grad_(torch.is_grad_enabled())
        micro = micro.to(self.device)
        if self.expert_load:
            self.expert_load.open(micro)
        if self.layout.pipeline.is_last(action.chunk):
            output = self.loss_function(model if hidden is None else partial(model, hidden=hidden), micro)
        else:
            output = model(micro, hidden=hidden)
            self.links.send(output.detach(), is_forward=True)
        self.outputs[action.chunk, action.micro] = hidden, output
        return output

    def backward(self, action: Action, is_last: bool, received: tuple[dist.Work, Tensor] | None) -> Tensor:
        """Runs a chunk's backward: takes the gradient of its output, `received` from the next stage, and sends that of
        its input to the stage before. Returns the terms of the loss; zero from a chunk that is not the last stage."""
        (hidden, output), grad_output = self.outputs.pop((action.chunk, action.micro)), _wait_received(received)
        with self.chunks[action.chunk].micro_batch(is_last):
            if grad_output is None:
                output[0].backward()
            else:
                output.backward(grad_output)
        if hidden is not None:
            assert hidden.grad is not None
            self.links.send(hidden.grad, is_forward=False)
        return output.detach() if grad_output is None else output.new_zeros((), dtype=torch.float32)


def _wait_received(received: tuple[dist.Work, Tensor] | None) -> Tensor | None:
    if received is None:
        return None
    work, tensor = received
    work.wait()
    return tensor


def run_step(
    sharded: Any,
    micros: Sequence[Any],
    loss_function: LossFunction,
    device: torch.device,
    mark: Callable[[str], None] = lambda doing: None,
) -> list[Tensor]:
    """Runs forward and backward of all `micros` (data/loader.py's) of a step; then gradients are complete. Returns for
    each backward the terms of its micro-batch, [1 + metrics], or a zero where this rank has not the last stage. `mark`
    is told of progress in words: of backwards, where a rank has several chunks of layers. An action's receive is posted
    once the action before it is launched, into a buffer allocated before that."""
    sharded.begin_step()
    passes, table = MicroBatchRunner(sharded, loss_function, device), sharded.layout.pipeline.actions(len(micros))
    received, terms = passes.post_recv(passes.make_recv_buffer(table[0], micros)), list[Tensor]()
    mark("in micro-batch 1")
    for action, following in zip(table, [*table[1:], None], strict=True):
        buffer = passes.make_recv_buffer(following, micros)
        if action.is_forward:
            passes.forward(action, micros[action.micro], received)
        else:
            terms.append(passes.backward(action, action.micro == len(micros) - 1, received))
            mark(f"in micro-batch {len(terms) + 1}")
        received = passes.post_recv(buffer)
    sharded.end_step()
    mark("after its last micro-batch")
    return terms


def run_forward(sharded: Any, micro: Any, loss_function: LossFunction, device: torch.device) -> Tensor:
    """Returns the terms of a micro-batch, without a backward; zero on a rank without the last stage."""
    passes, terms = MicroBatchRunner(sharded, loss_function, device), torch.zeros((), device=device)
    for chunk in range(len(sharded.chunks)):
        action = Action(True, chunk, 0)
        output = passes.forward(action, micro, passes.post_recv(passes.make_recv_buffer(action, [micro])))
        terms = output if sharded.layout.pipeline.is_last(chunk) else terms
    if sharded.links:
        sharded.links.finish()
    return terms
