"""Applies tensor parallel to a model: which parameters are sharded, by columns or by rows (transformers' own plan of a
family, as data, and embedding and head), and the limits that heads and widths set.

A matrix whose heads cannot be split evenly stays whole on every rank, and each rank computes its own heads of it.
"""

from typing import Any

from torch import nn

from shardbook.arithmetic import ceil_div
from shardbook.model.causal_lm import CausalLM
from shardbook.model.loss_head import LossHead
from shardbook.parallel.tensor import (
    TPGroup,
    gather_inputs,
    hold_local_weights,
    make_column_parallel,
    make_row_parallel,
    make_vocabulary_parallel,
    shard_parameter,
)
from shardbook.recipe import RecipeError

ATTENTION, MLP = "layers.*.self_attn.", "layers.*.mlp."
# How each linear of a block must be sharded by transformers' plan: the code below shards so, and refuses other plans.
PLAN = {f"{ATTENTION}{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")}
PLAN |= {f"{MLP}{name}": "colwise" for name in ("gate_proj", "up_proj")}
PLAN |= {f"{ATTENTION}o_proj": "rowwise", f"{MLP}down_proj": "rowwise"}
UNSHARDED = ("replicated_with_grad_allreduce",)  # head norms: not sharded
EMBEDDING = {
    "embed_tokens": "embedding_rowwise"
}  # said of a tied one by transformers 5.17; its rows are sharded here anyway


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
    make_vocabulary_parallel(model.embedding, tp_group)
    block: Any
    for block in model.blocks:
        shard_attention(block.self_attn, config, tp_group)
        make_column_parallel(block.mlp.gate_proj, tp_group)
        make_column_parallel(block.mlp.up_proj, tp_group)
        make_row_parallel(block.mlp.down_proj, tp_group)
        hold_local_weights(block)
        gather_inputs(block.self_attn, block.mlp, tp_group)
    model.norm.register_forward_hook(lambda module, inputs, output: tp_group.all_gather(output))
    head = model.head
    assert isinstance(head, LossHead)
    head.tp_group, head.first = tp_group, tp_group.share(head.out_features).start
    if model.is_tied:
        model.tie()
    else:
        shard_parameter(head, "weight", 0, tp_group)


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
