"""Pipeline parallel: a model's layers on ranks one after another, with micro-batches passed from one to the next.

The links of a rank to its neighbours; step.py runs forward and backward between them, in the order of schedule.py's
table. Invariant: ranks along pp see the same rows. Activations and gradients pass each link in groups of their own: in
one group, whose messages pass in order, they can wait for each other for ever (test_schedule.py). A rank posts a
receive only when all work before it is launched: over NCCL a receive holds the device until its message comes, and work
that is launched later may wait for the device (a kernel that is loaded, memory that is given back), so the message may
be waiting for that very work.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardbook.axes import PP, PP_BACKWARD, PP_ENDS, PP_FORWARD, ranks_along
from shardbook.comm.collectives import sum_in_place
from shardbook.local_tensors import local_part
from shardbook.model.blocks import copy_view, keep_blocks
from shardbook.model.causal_lm import CausalLM
from shardbook.parallel.layout import Layout
from shardbook.parallel.schedule import Pipeline, layers_per_pp_stage
from shardbook.parallel.units import PartParameters
from shardbook.recipe import Parallel, RecipeError


class RecvBuffer(NamedTuple):
    """A receive buffer for a message of another rank."""

    tensor: Tensor
    is_forward: bool  # for activations; False: for gradients
    free: Any  # the event on the compute stream after which it may be written; None on a CPU


@dataclass(eq=False)
class PipelineLinks:
    """The sends and receives of a rank to and from its neighbours along pp.

    Eight layers on four ranks along pp, in one chunk a rank, and in two chunks (interleaved):

                   rank 0       rank 1       rank 2       rank 3
        1 chunk    layers 0 1   2 3          4 5          6 7         activations go from each rank to the next
        2 chunks   0 and 4      1 and 5      2 and 6      3 and 7     and from rank 3, after layer 3, to rank 0

    Gradients go the other way.
    """

    pipeline: Pipeline
    token_parts: int  # ranks that share the tokens of a message
    width: int  # of a token's hidden state
    dtype: torch.dtype
    everyone: dist.ProcessGroup  # all ranks along pp
    ends: dist.ProcessGroup | None  # the first and the last of them, where both have a tied weight
    # rank and group that activations (True) and gradients (False) are sent to, and received from
    to: dict[bool, tuple[int, dist.ProcessGroup]]
    by: dict[bool, tuple[int, dist.ProcessGroup]]
    stream: Any = None  # on a GPU: receives are posted in it, so that they wait for their buffers only
    tied_name: str = ""  # of the weight that is the first stage's embedding and the last stage's head
    device_type: str = "cpu"
    sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)  # messages under way

    def send(self, tensor: Tensor, is_forward: bool) -> None:
        """Sends `tensor` to the next stage, or, not `is_forward`, back to the one before, without waiting."""
        other, group = self.to[is_forward]
        tensor = tensor.contiguous()
        # Looked up at each call: the ledger replaces it while it is open.
        work = dist.isend(tensor, other, group)
        assert work is not None, "this rank is none of the two"
        self.sent = [*(each for each in self.sent if not each[0].is_completed()), (work, tensor)]

    def make_recv_buffer(self, shape: torch.Size, device: torch.device, is_forward: bool) -> RecvBuffer:
        """Allocates, on the compute stream, a receive buffer for hidden states of tokens [B, L] of this `shape`. That
        stream may still be reading what lay in this memory before, so the buffer may be written only after the work
        launched so far."""
        tokens = shape if self.token_parts == 1 else (1, shape.numel() // self.token_parts)
        tensor = torch.empty(*tokens, self.width, dtype=self.dtype, device=device)
        return RecvBuffer(tensor, is_forward, torch.cuda.current_stream().record_event() if self.stream else None)

    def post_recv(self, buffer: RecvBuffer) -> tuple[dist.Work, Tensor]:
        """Posts a receive from the stage before, or of gradients from the next one; messages come in the order of
        sends.

        Over NCCL a receive begins when all work is done that the current stream has by now: on the compute stream that
        would be the action that was just launched. `stream` waits for the buffer and for nothing else, so the message
        comes in while the action computes. No record_stream is needed here: torch records the receive's own stream, and
        the reader waits for the tensor on the compute stream, where it is freed too.
        """
        other, group = self.by[buffer.is_forward]
        with torch.cuda.stream(self.stream):  # None on a CPU: then it does nothing
            if self.stream:
                self.stream.wait_event(buffer.free)
            work = dist.irecv(buffer.tensor, other, group)
        assert work is not None, "this rank is none of the two"
        return work, buffer.tensor

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        """Returns the `tensor` of the last stage, on every rank along pp; others give one of its shape. Collective."""
        dist.broadcast(tensor, dist.get_process_group_ranks(self.everyone)[-1], self.everyone)
        return tensor

    def finish(self) -> None:
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    @torch.no_grad()
    def sum_tied(self, model: nn.Module) -> list[nn.Parameter]:
        """Sums over both ends the gradient of a tied weight. Once a step, after its last backward. Returns that weight
        on these two. Collective."""
        for weight in self.tied_weights(model):
            gradient: Any = weight.grad
            if self.ends and (part := local_part(gradient)).numel():
                sum_in_place(part, self.ends, self.device_type)
        return self.tied_weights(model)

    def tied_weights(self, model: nn.Module) -> list[nn.Parameter]:
        """Returns the weight of `model`, a module with this rank's parameters by their names, that both ends have; none
        elsewhere."""
        return [model.get_parameter(self.tied_name)] if self.ends else []

    def parameters(self, model: nn.Module) -> PartParameters:
        tied = self.tied_weights(model) if self.pipeline.rank else []
        return PartParameters(list(model.parameters()), tied, self.everyone)


def check_stages(parallel: Parallel, blocks: int) -> None:
    """Raises RecipeError for a model of fewer `blocks` than pipeline stages."""
    ranks, chunks = parallel.pp_size, parallel.pipeline_chunks
    if ranks > 1 and ranks * chunks > blocks:
        setting = f"parallel.pp_size = {ranks}" + f", parallel.pipeline_chunks = {chunks}" * (chunks > 1)
        way_out = f"there may be {blocks} at most; set {'one of them' if chunks > 1 else 'it'} lower"
        raise RecipeError(f"{setting}: {ranks * chunks} stages of a model that has {blocks} blocks; {way_out}")


def apply_pipeline_parallel(
    model: CausalLM, parallel: Parallel, rank: int, world_size: int
) -> tuple[Pipeline, list[CausalLM]]:
    """Keeps of `model`, on the meta device, the layers of the global `rank`, after tensor and context parallel. Returns
    its place in the pipeline, and its chunks of layers, each a model that runs by itself. Raises RecipeError."""
    ranks, chunks, blocks = parallel.pp_size, parallel.pipeline_chunks, len(model.all_blocks)
    if ranks == 1:
        return Pipeline(), [model]
    check_stages(parallel, blocks)
    layers = layers_per_pp_stage(blocks, ranks * chunks)
    is_tied = model.is_tied and model.embedding.weight.requires_grad
    pipeline = Pipeline(parallel.pipeline_schedule, rank * ranks // world_size, ranks, layers, is_tied)
    chunk_layers = [pipeline.own_layers(chunk, blocks) for chunk in range(chunks)]
    keep_blocks(model, [*chain(*chunk_layers)], pipeline.is_first(0), pipeline.is_last(chunks - 1))
    if chunks == 1:
        return pipeline, [model]
    views = [copy_view(model) for _ in chunk_layers]
    for chunk, view in enumerate(views):
        keep_blocks(view, chunk_layers[chunk], pipeline.is_first(chunk), pipeline.is_last(chunk))
    return pipeline, views


def build_pipeline_links(model: Any, layout: Layout, mesh: DeviceMesh) -> PipelineLinks | None:
    """Builds the links of this rank's part of a `model` to its neighbours along pp; None where there is one pipeline
    stage. Collective.

    Each link passes a first message here: NCCL connects two ranks at their first message, and each waits on the host
    until the other one takes part, so inside a step a rank could wait for a peer that waits for its next message. Here
    no ring of waiting ranks can form, however many ranks there are: of all links that are not connected yet, the first
    one in this order is the next one of both its ranks.
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
        for pp_rank in range(pipeline.ranks - (not wraps)):
            first, second = column[pp_rank], column[(pp_rank + 1) % len(column)]
            for is_forward, name in ((True, PP_FORWARD), (False, PP_BACKWARD)):
                # Not use_local_synchronization: it names a group by how many groups a rank is in, and neighbours are in
                # different numbers of groups. The world's barrier that it would save is off in torch by default.
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
    facts = layout.token_parts, model.config.hidden_size, layout.dtype("params")
    named = model.named_parameters() if ends else ()
    tied_name = "".join(name for name, parameter in named if parameter is model.embedding.weight)
    return PipelineLinks(pipeline, *facts, mesh.get_group(PP), ends, to, by, stream, tied_name, mesh.device_type)
