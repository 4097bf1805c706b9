"""Tensor parallel: matrices, embedding and head split over neighbouring ranks, and around norms the tokens.

Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3) with its sequence parallel always on (Korthikanti et al.,
arXiv 2205.05198, section 4.2.2): around a norm a rank has its share of the flat [B * L] tokens and all features; inside
attention and MLP it has all tokens, and its share of heads and of the MLP's inner features. Invariant: every
tensor-parallel rank has the same rows and the same loss; a parameter that is not sharded along tp has a partial sum of
its gradient on each rank, which `sum_replicated_gradients` adds up. Applied on the meta device, before checkpointing,
compile and stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardbook.arithmetic import ceil_div
from shardbook.axes import TP
from shardbook.comm.collectives import all_gather, reduce_scatter
from shardbook.parallel.local_tensors import local_part
from shardbook.parallel.units import FULL_NUMEL, TP_SHARDED


@dataclass(eq=False)
class TPGroup:
    """The tensor-parallel ranks, and which of them this one is. Tensor-parallel modules hold it; `process_group` is
    set once there is a mesh.

    Attention, or an MLP, on four ranks, for the eight tokens t of a micro-batch; each collective is among all four:

                  norm     all_gather    column-parallel            row-parallel           reduce_scatter
        rank 0    t0 t1    t0 to t7      first quarter of heads     partial sums, t0-t7    t0 t1
        rank 1    t2 t3    t0 to t7      second quarter             partial sums, t0-t7    t2 t3
        rank 2    t4 t5    t0 to t7      third quarter              partial sums, t0-t7    t4 t5
        rank 3    t6 t7    t0 to t7      fourth quarter             partial sums, t0-t7    t6 t7

    An MLP's inner features are split as heads are, and the rows of embedding and head into quarters of the vocabulary.
    """

    size: int
    tp_rank: int
    process_group: dist.ProcessGroup | None = None

    def share(self, count: int) -> slice:
        """Returns which of `count` rows, or columns, are this rank's: as torch.chunk splits, the last ranks fewer."""
        each = ceil_div(count, self.size)
        return slice(min(self.tp_rank * each, count), min((self.tp_rank + 1) * each, count))

    def balanced(self, count: int) -> range:
        """Returns which of `count` heads (at least one a rank) are this rank's: numbers differ by at most one."""
        return range(self.tp_rank * count // self.size, (self.tp_rank + 1) * count // self.size)

    def all_gather(self, part: Tensor) -> Tensor:
        """All-gathers the tokens [1, n, hidden] of each rank as [1, size * n, hidden]; backward reduce-scatters."""
        return _AllGather.apply(part, self)

    def reduce_scatter(self, full: Tensor) -> Tensor:
        """Reduce-scatters size * n tokens [..., hidden], of which each rank has a partial sum, to [1, n, hidden], this
        rank's part of the sum; backward all-gathers."""
        return _ReduceScatter.apply(full, self)


def all_gather_plain(part: Tensor, tp_group: TPGroup) -> Tensor:
    """Gathers [1, n, ...] of each rank as [1, size * n, ...], without autograd. Collective."""
    assert tp_group.process_group is not None, "there is no mesh yet"
    full = part.new_empty(1, tp_group.size * part.shape[1], *part.shape[2:])
    all_gather(full[0], part.contiguous()[0], tp_group.process_group)
    return full


def reduce_scatter_plain(full: Tensor, tp_group: TPGroup) -> Tensor:
    assert tp_group.process_group is not None, "there is no mesh yet"
    tokens = full.shape[:-1].numel()
    part = full.new_empty(1, tokens // tp_group.size, full.shape[-1])
    reduce_scatter(part[0], full.contiguous().view(tokens, -1), tp_group.process_group)
    return part


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, tp_group: TPGroup) -> Tensor:
        ctx.tp_group = tp_group
        return all_gather_plain(part, tp_group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return reduce_scatter_plain(grad_output, ctx.tp_group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, tp_group: TPGroup) -> Tensor:
        ctx.tp_group, ctx.shape = tp_group, full.shape
        return reduce_scatter_plain(full, tp_group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return all_gather_plain(grad_output, ctx.tp_group).view(ctx.shape), None


class ShardedLinear(nn.Linear):
    """A column- or row-parallel linear. A rank computes with all of the weight [out, in] that it holds or, where that
    is the whole matrix, with its own `rows` (column-parallel) or `columns` (row-parallel).

    The gradient of a sharded weight is complete on its rank: only fully_shard reduces it, over the data axes. That of a
    whole one is a partial sum (`sum_replicated_gradients`). Gradients of inputs are reduce-scattered over tokens
    (`_AllGather.backward`).
    """

    tp_group: TPGroup
    rows: tuple[slice, ...] = ()
    columns: slice | None = None
    is_row_parallel: bool = False  # the results of ranks are partial sums, which are reduce-scattered over tokens
    local: tuple[Tensor, Tensor | None]  # this rank's weight and bias as plain tensors, set by hold_local_weights

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.local
        if self.columns is not None:
            weight = weight[:, self.columns]
        if self.is_row_parallel:
            output = self.tp_group.reduce_scatter(F.linear(input, weight))
            return output if bias is None else output + bias
        return F.linear(input, pick(weight, self.rows), None if bias is None else pick(bias, self.rows))


def pick(full: Tensor, rows: tuple[slice, ...]) -> Tensor:
    """Returns the `rows` of `full`, one piece after another; without any named, all rows."""
    if len(rows) > 1:
        return torch.cat([full[piece] for piece in rows])
    return full[rows[0]] if rows else full


class ShardedEmbedding(nn.Embedding):
    """A vocabulary-parallel embedding: a rank has the rows of its share of the vocabulary. Its forward takes ids [B, L]
    and returns this rank's share of the flat tokens, [1, B * L / size, hidden]."""

    tp_group: TPGroup
    first: int  # the first token id of its rows

    def forward(self, ids: Tensor) -> Tensor:
        weight = local_part(self.weight)
        local_ids = ids - self.first
        outside = (local_ids < 0) | (local_ids >= len(weight))
        padding = self.padding_idx
        if padding is not None:  # the row of padding_idx gets no gradient, on the rank that has it
            padding = padding - self.first if 0 <= padding - self.first < len(weight) else None
        embedded = F.embedding(local_ids.masked_fill(outside, 0), weight, padding_idx=padding)
        return self.tp_group.reduce_scatter(embedded.masked_fill(outside[..., None], 0.0))


def make_row_parallel(module: nn.Module, tp_group: TPGroup, columns: slice | None = None) -> None:
    """Makes a linear row-parallel: a rank takes its share of the input features, and the results are partial sums. Its
    `columns` where each rank keeps the whole matrix."""
    if columns is None:
        shard_parameter(module, "weight", 1, tp_group)
    _become(module, ShardedLinear, tp_group=tp_group, is_row_parallel=True, columns=columns)


def make_column_parallel(module: nn.Module, tp_group: TPGroup, rows: Sequence[slice] = ()) -> None:
    """Makes a linear column-parallel: a rank computes its share of the output features. Its `rows` where each rank
    keeps the whole matrix."""
    for name in () if rows else ("weight", "bias"):
        if getattr(module, name) is not None:
            shard_parameter(module, name, 0, tp_group)
    _become(module, ShardedLinear, tp_group=tp_group, rows=tuple(rows))


def make_vocabulary_parallel(module: nn.Embedding, tp_group: TPGroup) -> None:
    shard_parameter(module, "weight", 0, tp_group)
    _become(module, ShardedEmbedding, tp_group=tp_group, first=tp_group.share(module.num_embeddings).start)


def _become(module: Any, kind: type[nn.Module], **attributes: Any) -> None:
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)


def shard_parameter(module: nn.Module, name: str, dim: int, tp_group: TPGroup) -> None:
    """Replaces a parameter on the meta device by this rank's share of it along `dim`."""
    full = getattr(module, name)
    share = tp_group.share(full.shape[dim])
    local = nn.Parameter(full.narrow(dim, share.start, share.stop - share.start).contiguous(), full.requires_grad)
    setattr(local, TP_SHARDED, (dim, full.shape))
    setattr(local, FULL_NUMEL, full.numel())
    setattr(module, name, local)


def hold_local_weights(block: nn.Module) -> None:
    """Has a block's tensor-parallel linears compute with plain tensors: a compiled block that is recomputed cannot save
    what makes a DTensor (torch 2.13: its mesh is no Tensor). A hook sets them just before each forward of the block,
    because gathered parameters exist only from then on."""
    parts = [module for module in block.modules() if isinstance(module, ShardedLinear)]

    def before(block: nn.Module, inputs: Any) -> None:
        for module in parts:
            module.local = local_part(module.weight), None if module.bias is None else local_part(module.bias)

    block.register_forward_pre_hook(torch.compiler.disable(before))  # else the hook is compiled as a graph of its own


def gather_inputs(attention: nn.Module, mlp: nn.Module, tp_group: TPGroup) -> None:
    """Registers hooks that all-gather the tokens before a block's attention and before its MLP."""

    def before_attention(module: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        rows, length = named["position_embeddings"][0].shape[:2]
        full = tp_group.all_gather(named["hidden_states"]).view(rows, length, -1)
        return inputs, named | {"hidden_states": full}

    attention.register_forward_pre_hook(before_attention, with_kwargs=True)
    mlp.register_forward_pre_hook(lambda module, inputs: tp_group.all_gather(inputs[0]))


def place_on_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes DTensors, with their whole shapes, of the parameters of `model` that are sharded along tp, on `mesh`'s axis
    tp. A tied parameter stays one. Sets the process group of every TPGroup."""
    along = mesh[TP]
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if (cut := getattr(parameter, TP_SHARDED, None)) is None:
                continue
            if parameter not in replaced:
                dim, shape = cut
                stride = torch.empty(shape, device="meta").stride()
                placed = DTensor.from_local(
                    parameter.detach(), along, [Shard(dim)], run_check=False, shape=shape, stride=stride
                )
                replaced[parameter] = nn.Parameter(placed, parameter.requires_grad)
            setattr(module, name, replaced[parameter])
    for module in model.modules():
        if isinstance(tp_group := getattr(module, "tp_group", None), TPGroup):
            tp_group.process_group = along.get_group()


def is_tp_sharded(parameter: nn.Parameter) -> bool:
    """Returns whether `parameter` is sharded along tp."""
    return isinstance(parameter, DTensor) and TP in (parameter.device_mesh.mesh_dim_names or ())


@torch.no_grad()
def sum_replicated_gradients(model: nn.Module, mesh: DeviceMesh, numel: int) -> None:
    """Sums the gradients of parameters that are not sharded along tp over the tensor-parallel ranks, in one all-reduce
    of `numel` elements, padding included. Called once a step, after its last backward. Collective."""
    parts = [local_part(p.grad) for p in model.parameters() if p.grad is not None and not is_tp_sharded(p)]
    sizes = [part.numel() for part in parts]
    flat = local_part(next(model.parameters())).new_zeros(numel)
    if parts:  # none where a family's norms have no weights
        torch.cat([part.flatten() for part in parts], out=flat[: sum(sizes)])
    dist.all_reduce(flat, group=mesh.get_group(TP))
    for part, summed in zip(parts, flat[: sum(sizes)].split(sizes), strict=True):
        part.copy_(summed.view_as(part))
