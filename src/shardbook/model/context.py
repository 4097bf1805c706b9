"""Context parallel of a model: which heads a rank computes, and the wrapped kernel (parallel/context.py exchanges)."""

from typing import Any

from shardbook.model.attention import heads_of
from shardbook.model.causal_lm import CausalLM
from shardbook.model.tensor import heads_of_rank
from shardbook.parallel.context import CPGroup
from shardbook.parallel.tensor import TPGroup
from shardbook.recipe import Parallel, RecipeError


def split_rows(model: CausalLM, parallel: Parallel, rank: int) -> None:
    """Has `model` take slices of rows, as the global `rank` does with context parallel. Raises RecipeError where there
    are fewer heads than ranks."""
    size, tp_size = parallel.cp_size, parallel.tp_size
    if size == 1:
        return
    config: Any = model.config
    check_heads(config, parallel)
    shares = partition_heads(*own_heads(config, tp_size, rank % tp_size), size)
    cp_group = CPGroup(rank // tp_size % size, [count for count, _ in shares], [keys for _, keys in shares])
    if not all(hasattr(block, "self_attn") for block in model.blocks):
        setting = f"parallel.cp_size = {size}: family {config.model_type!r}"
        raise RecipeError(f"{setting}: the attention of its blocks is not found; set parallel.cp_size=1")
    model.cp_group = cp_group
    block: Any
    for block in model.blocks:
        block.self_attn.cp_group = cp_group
        block.self_attn.num_key_value_groups = cp_group.heads[cp_group.cp_rank] // len(
            cp_group.key_heads[cp_group.cp_rank]
        )


def check_heads(config: Any, parallel: Parallel) -> None:
    """Raises RecipeError where a rank would have no head."""
    size, tp_size, (heads, _) = parallel.cp_size, parallel.tp_size, heads_of(config)
    if (most := heads // tp_size) < size:
        share_text = f"each of {tp_size} ranks along tp has {most} of" if tp_size > 1 else "it has"
        why = f"ranks share a model's heads inside attention, and {share_text} {heads}"
        raise RecipeError(f"parallel.cp_size = {size}: {why}; must be at most {most}")


def own_heads(config: Any, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Returns the numbers of query heads and of key heads of tensor-parallel rank `tp_rank` of `tp_size`."""
    query_heads, key_heads = heads_of_rank(*heads_of(config), TPGroup(tp_size, tp_rank))
    return len(query_heads), len(key_heads)


def partition_heads(heads: int, key_heads: int, size: int) -> list[tuple[int, list[int]]]:
    """Returns, for each of `size` ranks, how many query heads it computes and with which key heads."""
    shares = [heads_of_rank(heads, key_heads, TPGroup(size, cp_rank)) for cp_rank in range(size)]
    return [(len(query_heads), keys) for query_heads, keys in shares]
