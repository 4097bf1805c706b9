"""Context parallel: the tokens of each row split over neighbouring ranks, and inside attention the heads.

DeepSpeed Ulysses (Jacobs et al., arXiv 2309.14509, section 3.1): around attention a rank has its slice of each row and
all heads; inside it the whole row and its share of heads, so the kernel and its document boundaries stay as they are.
Two all-to-alls forward, two backward. Invariant: ranks of a group see slices of the same rows, hold shards of one copy
of the model as data-parallel ranks do, and each computes the loss of its own tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardbook.axes import CP, ranks_along
from shardbook.comm.collectives import AllToAll
from shardbook.model.attention import KERNELS, Attend, heads_of, kernel_of, use_attention
from shardbook.model.causal_lm import CausalLM
from shardbook.parallel.layout import Layout
from shardbook.parallel.tensor import heads_of_rank
from shardbook.parallel.tensor_linears import TPGroup
from shardbook.recipe import Parallel, RecipeError


@dataclass(eq=False)
class CPGroup:
    """The context-parallel ranks, and which heads each of them computes. Attention modules hold it; `process_group` is
    set once there is a mesh. Query heads are split in order; one head of keys and values may serve several ranks.

    A row of eight tokens t, and four heads a to d, on four ranks; each exchange is one all-to-all:

                  around attention    inside it           around attention
        rank 0    t0 t1, heads a-d    t0 to t7, head a    t0 t1, heads a-d
        rank 1    t2 t3, heads a-d    t0 to t7, head b    t2 t3, heads a-d
        rank 2    t4 t5, heads a-d    t0 to t7, head c    t4 t5, heads a-d
        rank 3    t6 t7, heads a-d    t0 to t7, head d    t6 t7, heads a-d
                           seq_to_heads         heads_to_seq

    In seq_to_heads rank 0 sends head b of t0 t1 to rank 1, head c to rank 2, head d to rank 3; heads_to_seq sends back.
    """

    cp_rank: int  # of this rank along cp
    heads: list[int]  # of each rank: how many query heads it computes
    key_heads: list[list[int]]  # of each rank: the heads of keys and values that it computes them with
    process_group: dist.ProcessGroup | None = None
    full_groups: int = 1  # how many query heads a head of keys serves, without the exchange

    @property
    def size(self) -> int:
        return len(self.heads)

    @property
    def groups(self) -> int:
        """Returns how many query heads of this rank share one key-value head (num_key_value_groups)."""
        return self.heads[self.cp_rank] // len(self.key_heads[self.cp_rank])

    def seq_to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Exchanges queries, keys, values [B, heads, L / size, D] of all heads for [B, heads, L, D] of this rank's."""
        shape = query.shape
        counts = [len(heads) for heads in self.key_heads]
        parts = [query.transpose(1, 2).split(self.heads, 2)]
        sent_heads = [head for heads in self.key_heads for head in heads]  # in the order of the ranks that receive them
        parts += [pick_heads(full, sent_heads).transpose(1, 2).split(counts, 2) for full in (key, value)]
        local_counts = [self.heads[self.cp_rank], counts[self.cp_rank], counts[self.cp_rank]]
        input_splits = [sum(part.numel() for part in each) for each in zip(*parts, strict=True)]
        sent = torch.cat([torch.cat(each, 2).flatten() for each in zip(*parts, strict=True)])
        got = AllToAll.apply(sent, input_splits, [input_splits[self.cp_rank]] * self.size, self)
        got = got.view(self.size, shape[0], shape[2], sum(local_counts), shape[3]).transpose(0, 1).flatten(1, 2)
        return [part.transpose(1, 2) for part in got.split(local_counts, 2)]

    def heads_to_seq(self, output: Tensor) -> Tensor:
        """Exchanges attention's output [B, L, heads, D] of this rank's heads for [B, L / size, heads, D] of all."""
        rows, length, local_heads, dim = output.shape
        each = rows * length // self.size * dim
        sent = output.view(rows, self.size, -1, local_heads, dim).transpose(0, 1).flatten()
        output_splits = [each * heads for heads in self.heads]
        got = AllToAll.apply(sent, [each * local_heads] * self.size, output_splits, self)
        return torch.cat([part.view(rows, length // self.size, -1, dim) for part in got.split(output_splits)], 2)


def pick_heads(full: Tensor, heads: list[int]) -> Tensor:
    """Returns `heads` of `full` [B, heads, ...], by slices: an index would be copied to the device."""
    if heads == list(range(full.shape[1])):
        return full
    return torch.cat([full[:, head : head + 1] for head in heads], 1)


class AttendBySlices(Attend):
    """An Attend between two all-to-alls: a rank has its slice of each row around it, and its share of heads inside."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **named: Any
    ) -> tuple[Tensor, None]:
        cp_group: Any = module.cp_group
        query, key, value = cp_group.seq_to_heads(query, key, value)
        output, _ = super().__call__(module, query, key, value, attention_mask, **named)
        return cp_group.heads_to_seq(output), None


def apply_context_parallel(model: CausalLM, parallel: Parallel, rank: int) -> None:
    """Has `model` take slices of rows, as the global `rank` does. Raises RecipeError where there are fewer heads than
    ranks."""
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
    use_attention(config, KERNELS[kernel_of(config)], AttendBySlices)
    block: Any
    for block in model.blocks:
        block.self_attn.cp_group = cp_group
        cp_group.full_groups = getattr(block.self_attn, "num_key_value_groups", 1)  # absent: a key head a query head
        block.self_attn.num_key_value_groups = cp_group.groups


@contextmanager
def whole_rows(model: nn.Module) -> Iterator[None]:
    """Has attention of `model` compute all heads of whole rows, inside, with a kernel that exchanges nothing."""
    attention: list[Any] = [each for each in model.modules() if isinstance(getattr(each, "cp_group", None), CPGroup)]
    for module in attention:
        module.num_key_value_groups = module.cp_group.full_groups
    try:
        yield
    finally:
        for module in attention:
            module.num_key_value_groups = module.cp_group.groups


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


def set_cp_group(model: nn.Module, layout: Layout) -> dist.ProcessGroup | None:
    """Makes the process groups along cp and sets this rank's in the attention modules of `model`. Returns it; None
    where rows are not split. Collective."""
    if layout.cp_size == 1:
        return None
    every = dict.fromkeys(tuple(ranks_along(layout.mesh, CP, rank)) for rank in range(layout.world_size))
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in every])
    for module in model.modules():
        if isinstance(cp_group := getattr(module, "cp_group", None), CPGroup):
            cp_group.process_group = group
    return group
