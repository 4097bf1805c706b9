"""Tensor parallel: matrices, embedding and head split over neighbouring ranks, and around norms the tokens.

Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3) with its sequence parallel always on (Korthikanti et al.,
arXiv 2205.05198, section 4.2.2): around a norm a rank has its share of the flat [B * L] tokens and all features; inside
attention and MLP it has all tokens, and its share of heads and of the MLP's inner features. Invariant: every
tensor-parallel rank has the same rows and the same loss; a parameter that is not sharded along tp has a partial sum of
its gradient on each rank, which `sum_replicated_gradients` adds up. Applied on the meta device, before checkpointing,
compile and stage.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardbook.arithmetic import ceil_div
from shardbook.axes import TP
from shardbook.comm.collectives import all_gather_tokens, sum_in_place
from shardbook.local_tensors import local_part
from shardbook.model.blocks import put
from shardbook.model.causal_lm import CausalLM
from shardbook.model.loss_head import LossHead
from shardbook.parallel.layout import Layout
from shardbook.parallel.tensor_linears import (
    TPGroup,
    become,
    check_row_parallel,
    gather_features,
    hold_local_weights,
    make_column_parallel,
    make_row_parallel,
    shard_parameter,
)
from shardbook.parallel.units import Placement
from shardbook.recipe import RecipeError

ATTENTION, MLP = "layers.*.self_attn.", "layers.*.mlp."
# How each linear of a block must be sharded by transformers' plan: the code below shards so, and refuses other plans.
PLAN = {f"{ATTENTION}{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")}
PLAN |= {f"{MLP}{name}": "colwise" for name in ("gate_proj", "up_proj")}
PLAN |= {f"{ATTENTION}o_proj": "rowwise", f"{MLP}down_proj": "rowwise"}
UNSHARDED = ("replicated_with_grad_allreduce",)  # head norms: not sharded
EMBEDDING = {"embed_tokens": "embedding_rowwise"}  # of a tied one in transformers 5.17: its rows are sharded anyway


class ShardedEmbedding(nn.Embedding):
    """A vocabulary-parallel embedding: a rank has the rows of its share of the vocabulary. Its forward takes ids [B, L]
    and returns this rank's share of the flat tokens, [1, B * L / size, hidden], or what its TPGroup makes of them."""

    tp_group: TPGroup
    first: int  # the first token id of its rows

    def forward(self, ids: Tensor) -> Tensor:
        weight = local_part(self.weight)
        local_ids = ids - self.first
        # an id that is no token of any rank stays outside, and is an error of F.embedding, as of a whole one
        is_token = (ids >= 0) & (ids < self.num_embeddings)
        outside = is_token & ((local_ids < 0) | (local_ids >= len(weight)))
        padding = self.padding_idx
        if padding is not None:  # the row of padding_idx gets no gradient, on the rank that has it
            padding = padding - self.first if 0 <= padding - self.first < len(weight) else None
        embedded = F.embedding(local_ids.masked_fill(outside, 0), weight, padding_idx=padding)
        return self.tp_group.sum_parts(embedded.masked_fill(outside[..., None], 0.0))


class VocabParallelHead(LossHead):
    """A vocabulary-parallel loss head: a rank has the logits of its share of the vocabulary, and gathers few numbers a
    row."""

    tp_group: TPGroup

    @property
    def local_weight(self) -> Tensor:
        return local_part(self.weight)

    def logits(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """Returns the logits of all ranks, on every rank. Collective."""
        return gather_features(super().logits(hidden), self.tp_group, self.out_features)[:, :count]

    def gather_parts(self, numbers: Tensor) -> Tensor:
        """Returns `numbers` [k, n] of every rank, [ranks, k, n]. Collective."""
        return all_gather_tokens(numbers[None], self.tp_group).view(self.tp_group.size, *numbers.shape)


def make_vocabulary_parallel(module: Any, kind: type[nn.Module], tp_group: TPGroup, is_tied: bool = False) -> None:
    """Gives a rank the rows of its share of the vocabulary. `is_tied`: the module takes another one's."""
    first = tp_group.share(len(module.weight)).start
    if not is_tied:
        shard_parameter(module, "weight", 0, tp_group)
    become(module, kind, tp_group=tp_group, first=first)


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
def sum_replicated_gradients(model: nn.Module, mesh: DeviceMesh, layout: Layout) -> list[nn.Parameter]:
    """Sums the gradients of parameters that are not sharded along tp over the tensor-parallel ranks, in one all-reduce,
    padding included; of those that each rank has whole it takes the mean. Called once a step, after its last backward.
    Returns these parameters. Collective."""
    replicated, parts, divisors = list[nn.Parameter](), list[Tensor](), list[int]()
    if not layout.replicated_numel:  # as where a family's norms have no weights
        return replicated
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and TP not in (gradient.device_mesh.mesh_dim_names or ()):
            replicated.append(parameter)
            parts.append(gradient.to_local())
            divisors.append(layout.tp_size if layout.placements[name].tp_whole_gradient else 1)
    sizes = [part.numel() for part in parts]
    first = next(p for p in model.parameters() if p.requires_grad)  # a frozen one may have another dtype
    flat = local_part(first).new_zeros(layout.replicated_numel)
    if parts:  # none in a step without a backward
        torch.cat([part.flatten() for part in parts], out=flat[: sum(sizes)])
    sum_in_place(flat, mesh.get_group(TP), mesh.device_type)
    for part, divisor, summed in zip(parts, divisors, flat[: sum(sizes)].split(sizes), strict=True):
        part.copy_((summed / divisor if divisor > 1 else summed).view_as(part))
    return replicated


@torch.no_grad()
def divide_summed_gradients(model: nn.Module, layout: Layout) -> None:
    """Makes gradients that are kept, and summed already, each rank's part of their sum: a loop may call every
    micro-batch the last one, and they are summed again with what the next backward adds."""
    for name, parameter in model.named_parameters():
        placement = layout.placements[name]
        if parameter.grad is not None and placement.tp_dim is None and not placement.tp_whole_gradient:
            local_part(parameter.grad).div_(layout.tp_size)


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
    each = config.intermediate_size // size
    block: Any
    for block in model.blocks:
        check_row_parallel(block.mlp.down_proj, "down_proj", [tp_rank * each for tp_rank in range(size)])
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
    firsts = [TPGroup(tp_group.size, tp_rank).balanced(heads).start * dim for tp_rank in range(tp_group.size)]
    check_row_parallel(layer.o_proj, "o_proj", firsts)
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
