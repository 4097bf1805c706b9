"""Tensor parallel: matrices, embedding and head split over neighbouring ranks, and between them the tokens.

Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3) with its sequence parallel always on (Korthikanti et al.,
arXiv 2205.05198, section 4.2.2): around a norm a rank has its share of the flat [B * L] tokens and all their numbers;
inside attention and MLP all tokens, and its share of heads and of inner numbers. Invariant: every rank of the axis
has the same rows and the same loss, and a parameter that is not cut has a part of its gradient on each: `sum_uncut`.
Applied on the meta device, before checkpointing, compile and stage.
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
from shardbook.parallel.units import CUT, STANDS_FOR


@dataclass(eq=False)
class TensorAxis:
    """The ranks that share a model's matrices, and the place of this one among them. Its modules hold it; the group is
    there when the mesh is."""

    size: int
    place: int
    group: dist.ProcessGroup | None = None

    def share(self, count: int) -> slice:
        """Which of `count` rows, or columns, are this rank's: as torch.chunk cuts, the last ranks fewer."""
        each = ceil_div(count, self.size)
        return slice(min(self.place * each, count), min((self.place + 1) * each, count))

    def balanced(self, count: int) -> range:
        """Which of `count` things are this rank's, where no rank may be without: as many as another's, or one less."""
        return range(self.place * count // self.size, (self.place + 1) * count // self.size)

    def gather(self, part: Tensor) -> Tensor:
        """Tokens [1, n, hidden] of each rank -> [1, size * n, hidden]; backward sums and scatters."""
        return _Gather.apply(part, self)

    def scatter(self, whole: Tensor) -> Tensor:
        """Tokens [..., hidden], size * n of them, of which each rank has a summand -> [1, n, hidden], its part of the
        sum; backward gathers."""
        part: Tensor = _Scatter.apply(whole, self)
        return part


def gather_plain(part: Tensor, axis: TensorAxis) -> Tensor:
    """[1, n, ...] of each rank -> [1, size * n, ...]."""
    assert axis.group is not None, "the axis has no mesh yet"
    whole = part.new_empty(1, axis.size * part.shape[1], *part.shape[2:])
    all_gather(whole[0], part.contiguous()[0], axis.group)
    return whole


def scatter_plain(whole: Tensor, axis: TensorAxis) -> Tensor:
    assert axis.group is not None, "the axis has no mesh yet"
    tokens = whole.shape[:-1].numel()
    part = whole.new_empty(1, tokens // axis.size, whole.shape[-1])
    reduce_scatter(part[0], whole.contiguous().view(tokens, -1), axis.group)
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return gather_plain(part, axis)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        return scatter_plain(slope, ctx.axis), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis, ctx.shape = axis, whole.shape
        return scatter_plain(whole, axis)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        return gather_plain(slope, ctx.axis).view(ctx.shape), None


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part, as a plain tensor whose gradient goes to the whole: all of what is on no mesh."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class PartLinear(nn.Linear):
    """A linear map of which a rank computes a part: all of what it holds, or, where that is the whole matrix, the
    `rows` or the `columns` that are its own."""

    axis: TensorAxis
    rows: tuple[slice, ...] = ()
    columns: slice | None = None
    sums: bool = False  # whether ranks' results are summands: then they are summed, and tokens split
    held: tuple[Tensor, Tensor | None]  # weight and bias, of this rank: hold_parts

    def forward(self, given: Tensor) -> Tensor:
        weight, bias = self.held
        if self.columns is not None:
            weight = weight[:, self.columns]
        if self.sums:
            made = self.axis.scatter(F.linear(given, weight))
            return made if bias is None else made + bias
        return F.linear(given, pick(weight, self.rows), None if bias is None else pick(bias, self.rows))


def pick(whole: Tensor, rows: tuple[slice, ...]) -> Tensor:
    """Those `rows`, one piece after another; none named: all."""
    if len(rows) > 1:
        return torch.cat([whole[piece] for piece in rows])
    return whole[rows[0]] if rows else whole


class PartEmbedding(nn.Embedding):
    """The embedding of which a rank has the rows of its share of the vocabulary: ids [B, L] -> its tokens of the flat
    [1, B * L / size, hidden]."""

    axis: TensorAxis
    first: int  # of its rows

    def forward(self, ids: Tensor) -> Tensor:
        weight = local_part(self.weight)
        here = ids - self.first
        outside = (here < 0) | (here >= len(weight))
        padding = self.padding_idx
        if padding is not None:  # whose row gets no gradient
            padding = padding - self.first if 0 <= padding - self.first < len(weight) else None
        found = F.embedding(here.masked_fill(outside, 0), weight, padding_idx=padding)
        return self.axis.scatter(found.masked_fill(outside[..., None], 0.0))


def cut_columns(module: nn.Module, axis: TensorAxis) -> None:
    """Have a linear map take its share of the numbers that come in: ranks' results are summands."""
    cut_parameter(module, "weight", 1, axis)
    _become_part(module, axis, sums=True)


def cut_rows(module: nn.Module, axis: TensorAxis) -> None:
    """Have a linear map make its share of the numbers."""
    for name in ("weight", "bias"):
        if getattr(module, name) is not None:
            cut_parameter(module, name, 0, axis)
    _become_part(module, axis)


def compute_columns(module: nn.Module, columns: slice, axis: TensorAxis) -> None:
    """As cut_columns, with the whole matrix kept on each rank."""
    _become_part(module, axis, sums=True, columns=columns)


def compute_rows(module: nn.Module, rows: Sequence[slice], axis: TensorAxis) -> None:
    """As cut_rows, with the whole matrix kept on each rank."""
    _become_part(module, axis, rows=tuple(rows))


def cut_embedding(module: nn.Module, axis: TensorAxis) -> None:
    cut_parameter(module, "weight", 0, axis)
    made: Any = module
    made.__class__ = PartEmbedding
    made.axis, made.first = axis, axis.share(module.num_embeddings).start  # type: ignore[arg-type]


def _become_part(module: Any, axis: TensorAxis, **how: Any) -> None:
    module.__class__ = PartLinear
    module.axis = axis
    for name, value in how.items():
        setattr(module, name, value)


def cut_parameter(module: nn.Module, name: str, dim: int, axis: TensorAxis) -> None:
    """Leave of a parameter on the meta device what is this rank's along `dim`."""
    whole = getattr(module, name)
    share = axis.share(whole.shape[dim])
    local = nn.Parameter(whole.narrow(dim, share.start, share.stop - share.start).contiguous(), whole.requires_grad)
    setattr(local, CUT, (dim, whole.shape))
    setattr(local, STANDS_FOR, whole.numel())
    setattr(module, name, local)


def hold_parts(block: nn.Module) -> None:
    """Have a block's linear maps compute with plain tensors: a compiled block that is recomputed cannot save what makes
    a DTensor (torch 2.13: the mesh is no Tensor). A hook, as what is gathered is there only just before."""
    parts = [module for module in block.modules() if isinstance(module, PartLinear)]

    def before(block: nn.Module, inputs: Any) -> None:
        for module in parts:
            module.held = local_part(module.weight), None if module.bias is None else local_part(module.bias)

    block.register_forward_pre_hook(torch.compiler.disable(before))  # no graph of its own


def gather_inputs(attention: nn.Module, mlp: nn.Module, axis: TensorAxis) -> None:
    """Have a block's two halves see all tokens."""

    def before_attention(module: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        rows, length = named["position_embeddings"][0].shape[:2]
        whole = axis.gather(named["hidden_states"]).view(rows, length, -1)
        return inputs, named | {"hidden_states": whole}

    attention.register_forward_pre_hook(before_attention, with_kwargs=True)
    mlp.register_forward_pre_hook(lambda module, inputs: axis.gather(inputs[0]))


def gather_outputs(norm: nn.Module, axis: TensorAxis) -> None:
    """Have what follows `norm` see all tokens."""
    norm.register_forward_hook(lambda module, inputs, output: axis.gather(output))


def place_cuts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make what is cut of `model` DTensors on `mesh`'s axis, by their whole shapes; a tied one stays one."""
    along = mesh[TP]
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if (cut := getattr(parameter, CUT, None)) is None:
                continue
            if parameter not in made:
                dim, shape = cut
                stride = torch.empty(shape, device="meta").stride()
                placed = DTensor.from_local(
                    parameter.detach(), along, [Shard(dim)], run_check=False, shape=shape, stride=stride
                )
                made[parameter] = nn.Parameter(placed, parameter.requires_grad)
            setattr(module, name, made[parameter])
    for module in model.modules():
        if isinstance(axis := getattr(module, "axis", None), TensorAxis):
            axis.group = along.get_group()


def is_cut(parameter: nn.Parameter) -> bool:
    """Whether ranks of the axis have each their own part of it."""
    return isinstance(parameter, DTensor) and TP in (parameter.device_mesh.mesh_dim_names or ())


@torch.no_grad()
def sum_uncut(model: nn.Module, mesh: DeviceMesh, numel: int) -> None:
    """Sum the gradients of what is not cut over the ranks of the axis, in one all-reduce of `numel` elements, padding
    included. Once a step, after its last backward. Collective."""
    parts = [local_part(p.grad) for p in model.parameters() if p.grad is not None and not is_cut(p)]
    sizes = [part.numel() for part in parts]
    flat = parts[0].new_zeros(numel)
    torch.cat([part.flatten() for part in parts], out=flat[: sum(sizes)])
    dist.all_reduce(flat, group=mesh.get_group(TP))
    for part, summed in zip(parts, flat[: sum(sizes)].split(sizes), strict=True):
        part.copy_(summed.view_as(part))
