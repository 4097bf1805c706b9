"""Pipeline parallel: a model's layers on ranks one after another, micro-batches between them.

A step is what schedule.py's table says, action by action: receive, compute, send. Every schedule of a ZeRO stage holds
inside, since each backward is told what it reduces and frees as without: with one stage the table is that loop.
Invariant: ranks along pp see the same rows; only the last stage makes a loss, the others' share of it is zero. What
passes a link of one kind, activations or gradients, has a group of its own: two kinds in one wait for each other for
ever where messages of a group pass in order (tests/unit/test_schedule.py). A rank asks for a message only when all work
before it is launched: over NCCL a receive holds the device until its message comes, and what is launched then may wait
for the device (a kernel that is loaded, memory that is given back), so the message may be waiting for that very work.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardbook.axes import PP, PP_BACKWARD, PP_ENDS, PP_FORWARD
from shardbook.parallel.layout import Layout
from shardbook.parallel.mesh import ranks_along
from shardbook.parallel.schedule import Action, Pipeline
from shardbook.parallel.tensor import local_part

Shares = Callable[[Any, Any], Tensor]  # of a model and a micro-batch, [1 + metrics]: of the first is the gradient


class Room(NamedTuple):
    """A buffer for what another rank will send."""

    tensor: Tensor
    is_forward: bool
    free: Any  # the event on the compute stream after which it may be written; None on a CPU


@dataclass(eq=False)
class Links:
    """What a rank sends to its neighbours along pp, and gets from them."""

    pipeline: Pipeline
    everyone: dist.ProcessGroup  # along pp
    ends: dist.ProcessGroup | None  # the first and the last of them, where both have a tied weight
    to: dict[
        bool, tuple[int, dist.ProcessGroup]
    ]  # forward or not: who is sent activations, gradients, and through which
    by: dict[bool, tuple[int, dist.ProcessGroup]]  # who sends them
    stream: Any = None  # on a GPU: receives are asked for in it, so that they wait for their buffers alone
    sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)  # on their way

    def send(self, tensor: Tensor, is_forward: bool) -> None:
        """To the next stage, or back to the one before; nothing is waited for."""
        other, group = self.to[is_forward]
        tensor = tensor.contiguous()
        # looked up at each call: the ledger stands in for it while it is open
        work = dist.isend(tensor, other, group)
        assert work is not None, "this rank is none of the two"
        self.sent = [*(each for each in self.sent if not each[0].is_completed()), (work, tensor)]

    def make_room(self, tensor: Tensor, is_forward: bool) -> Room:
        """`tensor` was just allocated on the compute stream, which may still be reading what lay there before: from
        here on it may be written."""
        return Room(tensor, is_forward, torch.cuda.current_stream().record_event() if self.stream else None)

    def ask(self, room: Room) -> tuple[dist.Work, Tensor]:
        """Ask for what comes from the stage before, or back from the next one, in the order in which it was sent.

        Over NCCL a receive begins when all is done that the current stream has been given by now: the action that has
        just been launched, if that were the compute stream. `stream` waits for the buffer and for nothing else, so the
        message comes in while the action computes. No other record_stream is needed: the receive's own stream is
        recorded by torch, and whoever gets the tensor waits for it on the compute stream, where it is freed too.
        """
        other, group = self.by[room.is_forward]
        with torch.cuda.stream(self.stream):  # None on a CPU, which is no stream
            if self.stream:
                self.stream.wait_event(room.free)
            work = dist.irecv(room.tensor, other, group)
        assert work is not None, "this rank is none of the two"
        return work, room.tensor

    def finish(self) -> None:
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    @torch.no_grad()
    def sum_tied(self, model: nn.Module) -> None:
        """Of a tied weight, half of whose gradient is at either end. Once a step, after its last backward."""
        if self.ends:
            gradient: Any = tied_weight(model).grad
            if (part := local_part(gradient)).numel():
                dist.all_reduce(part, group=self.ends)

    def parameters(self, model: nn.Module) -> "StageParameters":
        tied = [tied_weight(model)] if self.ends and self.pipeline.rank else []
        return StageParameters(list(model.parameters()), tied, self.everyone)


@dataclass(frozen=True)
class StageParameters:
    """What a rank has where others have the other layers, `group` all of them; of `copies` another one has the same."""

    own: list[nn.Parameter]
    copies: list[nn.Parameter]
    group: dist.ProcessGroup

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self.own)


def tied_weight(model: Any) -> nn.Parameter:
    """What is the embedding of the first stage and the head of the last."""
    weight: nn.Parameter = model.model.embed_tokens.weight
    return weight


def build_links(layout: Layout, mesh: DeviceMesh) -> Links | None:
    """None where no layers are elsewhere. Collective.

    A message passes each link at once, for NCCL connects two ranks at their first one, and each waits on the host until
    the other has come to it: inside a step one may be waiting for what the other would send next. Here nobody waits in
    a ring, however many ranks it has: of all links that are not done the first in this order is the next one of both
    its ranks.
    """
    pipeline, rank = layout.pipeline, dist.get_rank()
    if pipeline.ranks == 1:
        return None
    columns = dict.fromkeys(tuple(ranks_along(layout.sizes, PP, each)) for each in range(layout.world_size))
    to: dict[bool, tuple[int, dist.ProcessGroup]] = {}
    by: dict[bool, tuple[int, dist.ProcessGroup]] = {}
    ends, first_message = None, torch.zeros(1, device=mesh.device_type)
    for column in columns:  # every rank makes every group, in one order
        wraps = pipeline.chunks > 1
        for place in range(pipeline.ranks - (not wraps)):
            first, second = column[place], column[(place + 1) % len(column)]
            for is_forward, name in ((True, PP_FORWARD), (False, PP_BACKWARD)):
                # not use_local_synchronization: its names count the groups that a rank is in, and neighbours are in
                # unlike numbers of them; the world's barrier that it would spare is off in torch unless asked for
                group = dist.new_group([first, second], group_desc=name)
                source, target = (first, second) if is_forward else (second, first)
                if rank == source:
                    to[is_forward] = target, group
                    dist.send(first_message, target, group)
                if rank == target:
                    by[is_forward] = source, group
                    dist.recv(first_message, source, group)
        if pipeline.is_tied:
            group = dist.new_group([column[0], column[-1]], group_desc=PP_ENDS)
            ends = group if rank in (column[0], column[-1]) else ends
    stream = torch.cuda.Stream() if mesh.device_type == "cuda" else None
    return Links(pipeline, mesh.get_group(PP), ends, to, by, stream)


class Passes:
    """The micro-batches of a step, or of an evaluation, on their way through the layers of one rank."""

    def __init__(self, sharded: Any, shares_of: Shares, device: torch.device):
        self.links, self.layout, self.chunks = sharded.links, sharded.layout, sharded.chunks
        self.shares_of, self.device = shares_of, device
        # of a chunk and a micro-batch: what came in, and what was made of it
        self.made: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def make_room(self, action: Action | None, micros: Sequence[Any]) -> Room | None:
        """For what comes from another rank before `action`."""
        pipeline = self.layout.pipeline
        if action is None or (pipeline.is_first if action.is_forward else pipeline.is_last)(action.chunk):
            return None
        shape, alike = micros[action.micro].input_ids.shape, self.layout.alike
        around = shape if alike == 1 else (1, shape.numel() // alike)
        width = self.chunks[action.chunk].model.config.hidden_size
        tensor = torch.empty(*around, width, dtype=self.layout.dtype("params"), device=self.device)
        return self.links.make_room(tensor, action.is_forward)

    def ask(self, room: Room | None) -> tuple[dist.Work, Tensor] | None:
        return self.links.ask(room) if room else None

    def forward(self, action: Action, micro: Any, came: tuple[dist.Work, Tensor] | None) -> Tensor:
        """Through the chunk; what it made, which goes on, or is the shares where it ends the model."""
        model, hidden = self.chunks[action.chunk].model, _received(came)
        if hidden is not None:
            hidden.requires_grad_(torch.is_grad_enabled())
        micro = micro.to(self.device)
        if self.layout.pipeline.is_last(action.chunk):
            made = self.shares_of(model if hidden is None else partial(model, hidden=hidden), micro)
        else:
            made = model(*micro.inputs, hidden=hidden)
            self.links.send(made.detach(), is_forward=True)
        self.made[action.chunk, action.micro] = hidden, made
        return made

    def backward(self, action: Action, is_last: bool, came: tuple[dist.Work, Tensor] | None) -> Tensor:
        """Slopes of what was made come from the next stage, those of what came in go to the one before. Returns the
        shares, zero where the chunk does not end the model."""
        (hidden, made), slope = self.made.pop((action.chunk, action.micro)), _received(came)
        with self.chunks[action.chunk].micro_batch(is_last):
            if slope is None:
                made[0].backward()
            else:
                made.backward(slope)
        if hidden is not None:
            assert hidden.grad is not None
            self.links.send(hidden.grad, is_forward=False)
        return made.detach() if slope is None else made.new_zeros((), dtype=torch.float32)


def _received(came: tuple[dist.Work, Tensor] | None) -> Tensor | None:
    if came is None:
        return None
    work, tensor = came
    work.wait()
    return tensor


def run_step(sharded: Any, micros: Sequence[Any], shares_of: Shares, device: torch.device) -> Iterator[Tensor]:
    """Forward and backward of all `micros` (data/loader.py's) of a step: `shares_of` a model and one of them, [1 +
    metrics], come as each is done, or a zero from what does not end the model. Then gradients are there. What an action
    gets from another rank is asked for when the one before it is launched, into memory that was taken before that."""
    sharded.begin_step()
    passes, table = Passes(sharded, shares_of, device), sharded.layout.pipeline.actions(len(micros))
    came = passes.ask(passes.make_room(table[0], micros))
    for action, following in zip(table, [*table[1:], None], strict=True):
        room, shares = passes.make_room(following, micros), None
        if action.is_forward:
            passes.forward(action, micros[action.micro], came)
        else:
            shares = passes.backward(action, action.micro == len(micros) - 1, came)
        came = passes.ask(room)
        if shares is not None:
            yield shares
    if sharded.links:
        sharded.links.finish()
        sharded.links.sum_tied(sharded.model)


def run_forward(sharded: Any, micro: Any, shares_of: Shares, device: torch.device) -> Tensor:
    """The shares of a micro-batch without a backward, zero where the model ends elsewhere."""
    passes, shares = Passes(sharded, shares_of, device), torch.zeros((), device=device)
    for chunk in range(len(sharded.chunks)):
        action = Action(True, chunk, 0)
        made = passes.forward(action, micro, passes.ask(passes.make_room(action, [micro])))
        shares = made if sharded.layout.pipeline.is_last(chunk) else shares
    if sharded.links:
        sharded.links.finish()
    return shares
