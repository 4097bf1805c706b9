"""Tensor-parallel linears: a plain one, one in four bits, and either with an adapter.

Invariant: the sum over ranks of what they compute, or their results one after another, is what the whole linear
computes. An adapter is split as its base is, so that its update takes no collective of its own:

                       A [r, in]                               B [out, r]
    column-parallel    the same on each rank                   the rows that the base has
    row-parallel       the columns that the base has           the same on each rank

The rank r of an adapter is never split. A row-parallel update B (A x) is a partial sum like the base's result, and is
summed with it. The gradient of what is the same on each rank is a partial sum (`sum_replicated_gradients` of
tensor.py): of A, since each rank has other rows of B; of B, since each rank has another part of A x.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardbook.arithmetic import ceil_div
from shardbook.comm.collectives import AllGatherTokens, ReduceScatterTokens, all_gather_tokens, all_reduced
from shardbook.local_tensors import local_part
from shardbook.model.adapters import LoraLinear, PackedLoraLinear
from shardbook.model.nf4 import ABSMAX, BLOCK, PACKED, PackedLinear, product_of_bytes, unpack_nf4
from shardbook.model.weights import MAGNITUDE
from shardbook.recipe import RecipeError


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
    has_all_tokens: bool = False  # around norms too: without a gradient alone (tensor.py: whole_tokens)

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

    def sum_parts(self, part: Tensor) -> Tensor:
        """Reduce-scatters size * n tokens [..., hidden], of which each rank has a partial sum, to [1, n, hidden], this
        rank's tokens of the sum; backward all-gathers."""
        if self.has_all_tokens:
            return all_reduced(part, self.group)
        return ReduceScatterTokens.apply(part, self)

    @property
    def group(self) -> dist.ProcessGroup:
        assert self.process_group is not None, "there is no mesh yet"
        return self.process_group


class ShardedLinear(nn.Linear):
    """A column- or row-parallel linear. A rank computes with all of the weight [out, in] that it holds or, where that
    is the whole matrix, with its own `rows` (column-parallel) or `columns` (row-parallel).

    The gradient of a sharded weight is complete on its rank: only fully_shard reduces it, over the data axes. That of a
    whole one is a partial sum (`sum_replicated_gradients`). Gradients of inputs are summed where the TPGroup gathers
    its tokens.
    """

    tp_group: TPGroup
    rows: tuple[slice, ...] = ()
    columns: slice | None = None
    is_row_parallel: bool = False  # the results of ranks are partial sums (TPGroup.sum_parts)
    local: dict[str, Tensor]  # this rank's parameters as plain tensors, set by hold_local_weights

    def forward(self, input: Tensor) -> Tensor:
        bias = self.local.get("bias")
        if self.is_row_parallel:
            output = self.tp_group.sum_parts(self.compute(input))
            return output if bias is None else output + bias
        return self.compute(input, None if bias is None else pick(bias, self.rows))

    def compute(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns what this rank's part makes of `input`, plus `bias`."""
        return self.product(input, bias)

    def product(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = self.local["weight"]
        if self.columns is not None:
            weight = weight[:, self.columns]
        return F.linear(input, pick(weight, self.rows), bias)


class ShardedPackedLinear(ShardedLinear, PackedLinear):
    """A ShardedLinear in four bits. A rank has whole blocks of a row. Where scales are `nested`, those of a
    row-parallel matrix stay whole on each rank, a byte for 64 numbers: a row's own scale is that of all its numbers."""

    first_block: int = 0  # of the blocks of a row that it has scales of, the first that it computes with

    def product(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        packed, absmax = self.local[PACKED], pick(self.local[ABSMAX], self.rows)
        if self.columns is not None:
            each = 2 * packed.element_size()  # numbers of a packed element
            packed = packed[:, self.columns.start // each : self.columns.stop // each]
        return product_of_bytes(input, pick(packed, self.rows), absmax, self.nested, bias, self.first_block)


class ShardedLoraLinear(ShardedLinear, LoraLinear):
    """A ShardedLinear with an adapter."""

    def compute(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        return LoraLinear.compute(self, input, bias)

    def magnitude(self) -> Tensor:
        return pick(self.local[MAGNITUDE], self.rows)

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        high: Any = self.lora_B
        update = self.scaling * (pick(high.local["weight"], self.rows) @ self.lora_A.weight)
        return torch.linalg.vector_norm(self.computed_rows(update.dtype) + update, dim=1)

    def computed_rows(self, dtype: torch.dtype) -> Tensor:
        """Returns the rows of the base's weight that a rank of a column-parallel one computes with."""
        return pick(self.local["weight"], self.rows).to(dtype)


class ShardedPackedLoraLinear(ShardedLoraLinear, ShardedPackedLinear, PackedLoraLinear):
    """A ShardedPackedLinear with an adapter."""

    def product(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        return ShardedPackedLinear.product(self, input, bias)

    def computed_rows(self, dtype: torch.dtype) -> Tensor:
        packed, absmax = (pick(self.local[name], self.rows) for name in (PACKED, ABSMAX))
        return unpack_nf4(packed, absmax, self.in_features, self.nested, dtype, again=False)


def gather_features(part: Tensor, tp_group: TPGroup, features: int) -> Tensor:
    """Gathers each rank's share [..., n] of so many `features`, [..., features], without autograd. Collective."""
    rows = part.flatten(0, -2)
    rows = F.pad(rows, (0, ceil_div(features, tp_group.size) - rows.shape[1])).t()  # the last rank may have fewer
    return all_gather_tokens(rows[None], tp_group)[0, :features].t().unflatten(0, part.shape[:-1])


def pick(full: Tensor, rows: tuple[slice, ...]) -> Tensor:
    """Returns the `rows` of `full`, one piece after another; without any named, all rows."""
    if len(rows) > 1:
        return torch.cat([full[piece] for piece in rows])
    return full[rows[0]] if rows else full


def sharded_kind(module: nn.Module) -> type[ShardedLinear]:
    if isinstance(module, LoraLinear):
        return ShardedPackedLoraLinear if isinstance(module, PackedLoraLinear) else ShardedLoraLinear
    return ShardedPackedLinear if isinstance(module, PackedLinear) else ShardedLinear


def make_row_parallel(module: nn.Linear, tp_group: TPGroup, columns: slice | None = None) -> None:
    """Makes a linear row-parallel: a rank takes its share of the input features, and the results are partial sums. Its
    `columns` where each rank keeps the whole matrix. Bounds of columns are `check_row_parallel`'s."""
    kind, share = sharded_kind(module), columns or tp_group.share(module.in_features)
    is_nested = issubclass(kind, ShardedPackedLinear) and bool(module.nested)
    for name, parameter in list(module.named_parameters(recurse=False)):
        if columns is None and parameter.ndim == 2 and not (name == ABSMAX and is_nested):
            shard_parameter(module, name, 1, tp_group)
    become(module, kind, tp_group=tp_group, is_row_parallel=True, columns=columns)
    if issubclass(kind, ShardedPackedLinear):
        has_all_scales = is_nested or columns is not None
        module.first_block = share.start // BLOCK * has_all_scales
    if isinstance(module, LoraLinear):
        if columns is None:
            shard_parameter(module.lora_A, "weight", 1, tp_group)
        become(module.lora_A, ShardedLinear, tp_group=tp_group, columns=columns)


def make_column_parallel(module: nn.Linear, tp_group: TPGroup, rows: Sequence[slice] = ()) -> None:
    """Makes a linear column-parallel: a rank computes its share of the output features. Its `rows` where each rank
    keeps the whole matrix."""
    for name, _ in [] if rows else list(module.named_parameters(recurse=False)):
        shard_parameter(module, name, 0, tp_group)
    if isinstance(module, LoraLinear):
        make_column_parallel(module.lora_B, tp_group, rows)
    become(module, sharded_kind(module), tp_group=tp_group, rows=tuple(rows))


def check_row_parallel(module: nn.Linear, name: str, firsts: Sequence[int]) -> None:
    """Raises RecipeError where a linear cannot be row-parallel on ranks whose columns begin at `firsts`."""
    setting = f"parallel.tp_size = {len(firsts)}"
    if hasattr(module, PACKED) and (split := [first for first in firsts if first % BLOCK]):
        raise RecipeError(
            f"{setting} and model.load_in_4bit = true: {name} takes {module.in_features} numbers, of which a rank's "
            f"share would begin at number {split[0]}, inside a block of {BLOCK} of NF4; set parallel.tp_size lower"
        )
    if getattr(module, MAGNITUDE, None) is not None:
        raise RecipeError(
            f"{setting} and lora.use_dora = true: the norm of a row of {name} is over columns that ranks along tp share"
            f"; leave {name} out of lora.target_modules, or set lora.use_dora=false"
        )


def become(module: Any, kind: type[nn.Module], **attributes: Any) -> None:
    """Makes a module one of another `kind`, with these `attributes`."""
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)


def shard_parameter(module: nn.Module, name: str, dim: int, tp_group: TPGroup) -> None:
    """Replaces a parameter by this rank's share of it along `dim`."""
    full = getattr(module, name)
    share = tp_group.share(full.shape[dim])
    local = nn.Parameter(full.narrow(dim, share.start, share.stop - share.start).contiguous(), full.requires_grad)
    setattr(module, name, local)


def hold_local_weights(block: nn.Module) -> None:
    """Has a block's tensor-parallel linears compute with plain tensors: a compiled block that is recomputed cannot save
    what makes a DTensor (torch 2.13: its mesh is no Tensor). A hook sets them just before each forward of the block,
    because gathered parameters exist only from then on."""
    parts = [module for module in block.modules() if isinstance(module, ShardedLinear)]

    def before(block: nn.Module, inputs: Any) -> None:
        for module in parts:
            module.local = {name: local_part(each) for name, each in module.named_parameters(recurse=False)}

    block.register_forward_pre_hook(torch.compiler.disable(before))  # else the hook is compiled as a graph of its own
