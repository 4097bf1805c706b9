"""Tensor parallel: matrices, embedding and head split over neighbouring ranks, and around norms the tokens.

Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3) with its sequence parallel always on (Korthikanti et al.,
arXiv 2205.05198, section 4.2.2): around a norm a rank has its share of the flat [B * L] tokens and all features; inside
attention and MLP it has all tokens, and its share of heads and of the MLP's inner features. Invariant: every
tensor-parallel rank has the same rows and the same loss; a parameter that is not sharded along tp has a partial sum of
its gradient on each rank, which `sum_replicated_gradients` adds up. Applied on the meta device, before checkpointing,
compile and stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardbook.arithmetic import ceil_div
from shardbook.axes import TP
from shardbook.comm.collectives import AllGatherTokens, ReduceScatterTokens, all_gather_tokens
from shardbook.local_tensors import local_part
from shardbook.model.blocks import put
from shardbook.model.causal_lm import CausalLM
from shardbook.model.cross_entropy import ChunkLoss, cross_entropy_of_part
from shardbook.model.distillation import TeacherOutput, distillation_of_part
from shardbook.model.loss_head import LossHead
from shardbook.parallel.units import Placement
from shardbook.recipe import RecipeError

ATTENTION, MLP = "layers.*.self_attn.", "layers.*.mlp."
# How each linear of a block must be sharded by transformers' plan: the code below shards so, and refuses other plans.
PLAN = {f"{ATTENTION}{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")}
PLAN |= {f"{MLP}{name}": "colwise" for name in ("gate_proj", "up_proj")}
PLAN |= {f"{ATTENTION}o_proj": "rowwise", f"{MLP}down_proj": "rowwise"}
UNSHARDED = ("replicated_with_grad_allreduce",)  # head norms: not sharded
EMBEDDING = {"embed_tokens": "embedding_rowwise"}  # of a tied one in transformers 5.17: its rows are sharded anyway


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
    has_all_tokens: bool = False  # around norms too: without a gradient alone (`whole_tokens`)

    def share(self, count: int) -> slice:
        """Returns which of `count` rows, or columns, are this rank's: as torch.chunk splits, the last ranks fewer."""
        each = ceil_div(count, self.size)
        return slice(min(self.tp_rank * each, count), min((self.tp_rank + 1) * each, count))

    def balanced(self, count: int) -> range:
        """Returns which of `count` heads (at least one a rank) are this rank's: numbers differ by at most one."""
        return range(self.tp_rank * count // self.size, (self.tp_rank + 1) * count // self.size)

    def all_gather(self, part: Tensor) -> Tensor:
        """All-gathers the tokens [1, n, hidden] of each rank as [1, size * n, hidden]; backward reduce-scatters."""
        if self.has_all_tokens:
            return part
        return AllGatherTokens.apply(part, self)

    def reduce_scatter(self, full: Tensor) -> Tensor:
        """Reduce-scatters size * n tokens [..., hidden], of which each rank has a partial sum, to [1, n, hidden], this
        rank's part of the sum; backward all-gathers."""
        if self.has_all_tokens:
            dist.all_reduce(summed := full.contiguous(), group=self.process_group)
            return summed
        return ReduceScatterTokens.apply(full, self)


class ShardedLinear(nn.Linear):
    """A column- or row-parallel linear. A rank computes with all of the weight [out, in] that it holds or, where that
    is the whole matrix, with its own `rows` (column-parallel) or `columns` (row-parallel).

    The gradient of a sharded weight is complete on its rank: only fully_shard reduces it, over the data axes. That of a
    whole one is a partial sum (`sum_replicated_gradients`). Gradients of inputs are reduce-scattered over tokens
    (`AllGatherTokens.backward`).
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


class VocabParallelHead(LossHead):
    """A vocabulary-parallel loss head: a rank has the logits of its share of the vocabulary, and gathers few numbers a
    row."""

    tp_group: TPGroup
    first: int  # the first token id of its rows

    @property
    def local_weight(self) -> Tensor:
        return local_part(self.weight)

    def logits(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """Returns the logits of all ranks, on every rank. Collective."""
        part = super().logits(hidden)
        share = ceil_div(self.out_features, self.tp_group.size)  # the last rank may have fewer
        rows = F.pad(part, (0, share - part.shape[1])).t()
        return all_gather_tokens(rows[None], self.tp_group)[0, : self.out_features].t()[:, :count]

    def distillation_of(self, teacher: TeacherOutput, targets: Tensor, divergences: Tensor) -> ChunkLoss:
        given = self._gather, self.first, self.out_features, teacher, targets - self.first, divergences
        return partial(distillation_of_part, *given)

    def chunk_loss_of(self, targets: Tensor) -> ChunkLoss:
        return partial(cross_entropy_of_part, self._gather, targets - self.first)

    def _gather(self, row_stats: Tensor) -> Tensor:
        return all_gather_tokens(row_stats[None], self.tp_group).view(self.tp_group.size, *row_stats.shape)


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


def make_vocabulary_parallel(module: Any, kind: type[nn.Module], tp_group: TPGroup, is_tied: bool = False) -> None:
    """Gives a rank the rows of its share of the vocabulary. `is_tied`: the module takes another one's."""
    first = tp_group.share(len(module.weight)).start
    if not is_tied:
        shard_parameter(module, "weight", 0, tp_group)
    _become(module, kind, tp_group=tp_group, first=first)


def _become(module: Any, kind: type[nn.Module], **attributes: Any) -> None:
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)


def shard_parameter(module: nn.Module, name: str, dim: int, tp_group: TPGroup) -> None:
    """Replaces a parameter on the meta device by this rank's share of it along `dim`."""
    full = getattr(module, name)
    share = tp_group.share(full.shape[dim])
    local = nn.Parameter(full.narrow(dim, share.start, share.stop - share.start).contiguous(), full.requires_grad)
    setattr(module, name, local)


def hold_local_weights(block: nn.Module) -> None:
    """Has a block's tensor-parallel linears compute with plain tensors: a compiled block that is recomputed cannot save
    what makes a DTensor (torch 2.13: its mesh is no Tensor). They exist, gathered, when a forward of it begins."""
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


def place_on_mesh(model: nn.Module, placements: Mapping[str, Placement], mesh: DeviceMesh) -> None:
    """Makes DTensors, with their whole shapes, of the parameters of `model` that are sharded along tp, on `mesh`'s axis
    tp. A tied parameter stays one. Sets the process group of every TPGroup."""
    along = mesh[TP]
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        placement = placements.get(name)  # None: another name of a tied one
        if placement and placement.tp_dim is not None:
            local, dims, shape = parameter.detach(), [Shard(placement.tp_dim)], placement.shape
            stride = torch.empty(shape, device="meta").stride()
            placed = DTensor.from_local(local, along, dims, run_check=False, shape=shape, stride=stride)
            replaced[parameter] = nn.Parameter(placed, parameter.requires_grad)
        if parameter in replaced:
            put(model, name, replaced[parameter])
    for tp_group in tp_groups(model):
        tp_group.process_group = along.get_group()


def tp_groups(model: nn.Module) -> dict[TPGroup, None]:
    """Returns the TPGroups that modules of `model` hold."""
    held = (getattr(module, "tp_group", None) for module in model.modules())
    return {group: None for group in held if isinstance(group, TPGroup)}


@contextmanager
def whole_tokens(model: nn.Module) -> Iterator[None]:
    """Has every tensor-parallel rank of `model` have all tokens around norms too, inside, where there is no gradient: a
    step of one token a row has fewer tokens than ranks."""
    for group in tp_groups(model):
        group.has_all_tokens = True
    try:
        yield
    finally:
        for group in tp_groups(model):
            group.has_all_tokens = False


@torch.no_grad()
def sum_replicated_gradients(model: nn.Module, mesh: DeviceMesh, numel: int) -> None:
    """Sums the gradients of parameters that are not sharded along tp over the tensor-parallel ranks, in one all-reduce
    of `numel` elements, padding included. Called once a step, after its last backward. Collective."""
    gradients = [(p.grad, p.grad.device_mesh.mesh_dim_names) for p in model.parameters() if isinstance(p.grad, DTensor)]
    parts = [gradient.to_local() for gradient, axes in gradients if TP not in (axes or ())]
    sizes = [part.numel() for part in parts]
    flat = local_part(next(model.parameters())).new_zeros(numel)
    if parts:  # none where a family's norms have no weights
        torch.cat([part.flatten() for part in parts], out=flat[: sum(sizes)])
    dist.all_reduce(flat, group=mesh.get_group(TP))
    for part, summed in zip(parts, flat[: sum(sizes)].split(sizes), strict=True):
        part.copy_(summed.view_as(part))


def apply_tensor_parallel(model: CausalLM, size: int, rank: int) -> None:
    """Shards `model`, on the meta device, over `size` neighbouring tensor-parallel ranks, and keeps the parts of the
    global `rank`. Raises RecipeError where the model cannot be sharded so."""
    if size == 1:
        return
    config: Any = model.config
    check_tp_size(config, size)
    if type(model.embedding).forward is not nn.Embedding.forward:
        setting = f"parallel.tp_size = {size}: family {config.model_type!r}"
        raise RecipeError(f"{setting}: its embedding does more than look up rows; set parallel.tp_size=1")
    tp_group = TPGroup(size, rank % size)
    make_vocabulary_parallel(model.embedding, ShardedEmbedding, tp_group)
    block: Any
    for block in model.blocks:
        shard_attention(block.self_attn, config, tp_group)
        make_column_parallel(block.mlp.gate_proj, tp_group)
        make_column_parallel(block.mlp.up_proj, tp_group)
        make_row_parallel(block.mlp.down_proj, tp_group)
        hold_local_weights(block)
        gather_inputs(block.self_attn, block.mlp, tp_group)
    model.norm.register_forward_hook(lambda module, inputs, output: tp_group.all_gather(output))
    if model.scores:  # every rank has all scores, and gradients of what is before them are summed along tp
        model.head.share_of = tp_group.share
    else:
        make_vocabulary_parallel(model.head, VocabParallelHead, tp_group, is_tied=model.is_tied)
    model.tie()


def check_tp_size(config: Any, size: int) -> None:
    """Raises RecipeError where a model of `config` cannot be sharded over `size` tensor-parallel ranks."""
    setting = f"parallel.tp_size = {size}"
    stated = (config.base_model_tp_plan or {}).items()
    plan = {name: how for name, how in stated if how not in UNSHARDED and EMBEDDING.get(name) != how}
    if plan != PLAN or not isinstance(config.intermediate_size, int):  # a list: layers of other widths
        other = sorted({how for name, how in plan.items() if PLAN.get(name) != how})
        stated_plan = f"its plan: {', '.join(other) or 'other names'}"
        raise RecipeError(
            f"{setting}: family {config.model_type!r} cannot be sharded ({stated_plan}); set parallel.tp_size=1"
        )
    if size > config.num_attention_heads:
        raise RecipeError(f"{setting}: the model has {config.num_attention_heads} heads; must be at most that")
    if (width := config.intermediate_size) % size:
        fits = ", ".join(str(n) for n in range(1, config.num_attention_heads + 1) if width % n == 0)
        raise RecipeError(f"{setting}: does not divide the model's intermediate_size = {width}; it may be {fits}")
    if ceil_div(config.vocab_size, size) * (size - 1) >= config.vocab_size:
        raise RecipeError(f"{setting}: leaves a rank without any of the {config.vocab_size} tokens; set it lower")


def shard_attention(attention: nn.Module, config: Any, tp_group: TPGroup) -> None:
    """Shards the matrices where heads divide evenly; else each rank computes its own heads of the whole matrices."""
    layer: Any = attention
    heads, key_heads, dim = config.num_attention_heads, config.num_key_value_heads, layer.head_dim
    query_heads, rank_key_heads = heads_of_rank(heads, key_heads, tp_group)
    rows, key_rows = list[slice](), list[slice]()  # none: of a matrix that is cut
    if heads % tp_group.size:
        rows = [slice(query_heads.start * dim, query_heads.stop * dim)]
    if heads % tp_group.size or key_heads % tp_group.size:
        first, count = rank_key_heads[0], len(rank_key_heads)
        together = rank_key_heads == list(range(first, first + count))
        pieces = [(first, first + count)] if together else [(head, head + 1) for head in rank_key_heads]
        key_rows = [slice(start * dim, stop * dim) for start, stop in pieces]
    make_column_parallel(layer.q_proj, tp_group, rows)
    make_row_parallel(layer.o_proj, tp_group, *rows)
    for projection in (layer.k_proj, layer.v_proj):
        make_column_parallel(projection, tp_group, key_rows)
    layer.num_key_value_groups = len(query_heads) // len(rank_key_heads)


def heads_of_rank(heads: int, key_heads: int, tp_group: TPGroup) -> tuple[range, list[int]]:
    """Returns this rank's query heads, and the heads of keys and values that it computes for them: each once, where all
    serve equally many of its query heads; else repeated, one for each query head."""
    query_heads = tp_group.balanced(heads)
    served = [head * key_heads // heads for head in query_heads]
    once = sorted(set(served))
    return query_heads, once if len({served.count(head) for head in once}) == 1 else served
