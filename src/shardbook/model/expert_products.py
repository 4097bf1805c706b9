"""Products of experts that ranks share, that have adapters, or lie in four bits: what transformers' grouped
implementation of experts computes, with LoRA's updates of stacks (peft's target_parameters) and of NF4's bytes,
unpacked some experts at once.

Invariant: the flags of transformers' experts interface say what a family computes; none is named. An update is a stack
too, A [experts * r, in] and B [experts * out, r], so whatever holds of a stack's rows holds of its update's.
"""

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  has the operator grouped_mm_fallback
from torch import Tensor, nn

from shardbook.comm.torch_private import has_values
from shardbook.model.experts import has_interface, view_stacks
from shardbook.model.marks import STACKED
from shardbook.model.nf4 import ABSMAX_END, PACKED_END, pack_parameters, unpack_nf4
from shardbook.model.weights import HIGH_STACK, LOW_STACK

MATRICES = ("gate_up_proj", "up_proj", "down_proj")  # the interface's names of stacks
UNPACKED_BYTES = 2**26  # of experts that are unpacked at once, at most, but for a larger one


class ExpertRows(NamedTuple):
    """Which rows of a product are whose: they lie in the order of their experts."""

    ids: Tensor  # [rows]: the expert of each
    offsets: Tensor  # int32 [experts]: where each one's end
    ends: list[int]  # the same on the host, where a product needs it


class ToRows(torch.autograd.Function):
    """Takes tokens [n, D] to rows [n * chosen, D] in the order of their experts: row i is token order[i] // chosen.
    `inverse` is the inverse of `order`. Backward adds up the rows of a token in the order of its choices: no atomics,
    so it is deterministic."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.chosen = chosen
        return tokens[order // chosen]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grad_output[inverse].unflatten(0, (-1, ctx.chosen)).sum(1), None, None, None


class Permute(torch.autograd.Function):
    """Puts rows into `order`, whose inverse is `inverse`. Backward puts them back, by the inverse: no scatter."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grad_output[inverse], None, None


def sort_by_expert(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the order of `ids` [rows] by expert, those of one in their order, and its inverse."""
    order = ids.argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def count_rows(ids: Tensor, experts: int) -> Tensor:
    """Returns how many of `ids` [rows] are each of so many `experts`, int64 [experts]."""
    return torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))


def transposed_stacks(model: nn.Module) -> set[str]:
    """Returns the names of the stacks of `model` whose matrices are [in, out]."""
    return {
        name for name, (experts, _) in find_expert_stacks(dict(model.named_modules())).items() if experts.is_transposed
    }


def is_packed(experts: Any) -> bool:
    """Returns whether a module of experts lies in four bits."""
    return hasattr(experts, "nested")


def find_expert_stacks(modules: Mapping[str, nn.Module]) -> dict[str, tuple[Any, str]]:
    """Returns the stacks of matrices among the parameters of `modules` that stand behind transformers' experts
    interface, by name: the module of each and its name there."""
    return {
        f"{stem}.{name}": (module, name)
        for stem, module in modules.items()
        if has_interface(module)
        for name in getattr(module, STACKED, {})
        if name in MATRICES
    }


def adapt_stacks(experts: Any, names: Collection[str], r: int, scaling: float, dtype: torch.dtype) -> None:
    """Adds to a module of experts, on the meta device, trained updates in `dtype`, of rank `r`, of its stacks
    `names`."""
    shapes = dict(getattr(experts, STACKED))
    for name in names:
        count, *outer = shapes[name]
        width, height = outer if experts.is_transposed else outer[::-1]
        for end, shape in ((LOW_STACK, (count, r, width)), (HIGH_STACK, (count, height, r))):
            empty = torch.empty(shape[0] * shape[1], shape[2], dtype=dtype, device="meta")
            experts.register_parameter(name + end, nn.Parameter(empty))
            shapes[name + end] = torch.Size(shape)
    experts.scaling, experts.is_on = scaling, True
    view_stacks(experts, shapes, compute_experts)


def pack_stacks(experts: Any, name: str, dtype: torch.dtype, nested: bool) -> None:
    """Packs the frozen stacks of a module of experts, whose name is `name`, in four bits, stored as `dtype`. Raises
    RecipeError where a width does not fit."""
    shapes, parameters = dict(getattr(experts, STACKED)), dict(experts.named_parameters(recurse=False))
    keys = [key for key in shapes if key in MATRICES and not parameters[key].requires_grad]
    pack_parameters(experts, keys, name, dtype, nested)
    parameters = dict(experts.named_parameters(recurse=False))
    for key in keys:
        count, height, _ = shapes.pop(key)
        for packed in (key + PACKED_END, key + ABSMAX_END):
            shapes[packed] = torch.Size((count, height, parameters[packed].shape[1]))
    experts.nested = nested
    view_stacks(experts, shapes, _compute_packed)


def compute_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns what `experts` make of `hidden_states` [n, D], whose tokens chose the experts `top_k_index` [n, chosen]
    with `top_k_weights` [n, chosen]."""
    chosen, flat = top_k_index.shape[1], top_k_index.flatten()
    order, inverse = sort_by_expert(flat)
    rows = compute_rows(experts, ToRows.apply(hidden_states, order, inverse, chosen), flat[order])
    weighted = Permute.apply(rows, inverse, order) * top_k_weights.flatten()[:, None]
    return weighted.unflatten(0, (-1, chosen)).sum(1).to(hidden_states.dtype)


def compute_rows(experts: Any, rows: Tensor, ids: Tensor) -> Tensor:
    """Returns what `experts` make of `rows` [rows, D], each of one expert, which lie in the order of these, `ids`
    [rows]."""
    offsets = count_rows(ids, experts.num_experts).cumsum(0).to(torch.int32)
    of_experts = ExpertRows(ids, offsets, _ends(offsets, len(ids)) if is_packed(experts) else [])
    rows = _product(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, of_experts)
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = _product(experts, "down_proj", rows, of_experts)
    return experts.post_expert_norm(rows) if getattr(experts, "has_post_expert_norm", False) else rows


# Compiled blocks break here: how many rows an expert has is read by the host.
_compute_packed = torch.compiler.disable(compute_experts)


def grouped_linear(rows: Tensor, weight: Tensor, offsets: Tensor, is_transposed: bool = False) -> Tensor:
    """Returns the products of `rows`, in the order of their experts, with each one's matrix in the stack `weight`
    [experts, out, in] or, `is_transposed`, [experts, in, out]. `offsets`: where the rows of each expert end."""
    matrices, rows = weight if is_transposed else weight.transpose(-2, -1), rows.to(weight.dtype)
    # the compiler knows the product in bf16 alone
    has_product = weight.dtype == torch.bfloat16 if torch.compiler.is_compiling() else _has_product(weight.device)
    if has_product:
        return F.grouped_mm(rows, matrices, offs=offsets)
    output: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, matrices, offsets)
    return output


@cache
def _has_product(device: torch.device) -> bool:
    """Returns whether torch has grouped products on a device: on a GPU older than Ampere it has none."""
    return device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def _ends(offsets: Tensor, rows: int) -> list[int]:
    """Returns `offsets` on the host, which waits for the device; a plan's as if every expert were chosen as often."""
    if has_values(offsets):
        return offsets.tolist()
    return [rows * (expert + 1) // len(offsets) for expert in range(len(offsets))]


def _product(experts: Any, name: str, rows: Tensor, of_experts: ExpertRows) -> Tensor:
    """Returns the product of `rows` with each one's expert in the stack `name`, its update and its bias added."""
    ids, offsets, ends = of_experts
    if hasattr(experts, name + PACKED_END):
        both = (getattr(experts, name + end) for end in (PACKED_END, ABSMAX_END))
        output = _PackedProduct.apply(rows, *both, ends, experts.nested, experts.is_transposed)
    else:
        output = grouped_linear(rows, getattr(experts, name), offsets, experts.is_transposed)
    if hasattr(experts, name + LOW_STACK) and experts.is_on:
        low = grouped_linear(rows, getattr(experts, name + LOW_STACK), offsets) * experts.scaling
        output = output + grouped_linear(low, getattr(experts, name + HIGH_STACK), offsets)
    return output + getattr(experts, f"{name}_bias")[ids] if experts.has_bias else output


class _PackedProduct(torch.autograd.Function):
    """Multiplies rows with experts in four bits, of which only the bytes are kept for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        packed: Tensor,
        absmax: Tensor,
        ends: list[int],
        nested: bool,
        is_transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(packed, absmax)
        ctx.ends, ctx.nested, ctx.is_transposed = ends, nested, is_transposed
        return _multiply(rows, packed, absmax, ends, nested, is_transposed, False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        packed, absmax = ctx.saved_tensors
        given = ctx.ends, ctx.nested, not ctx.is_transposed
        return _multiply(grad_output, packed, absmax, *given, True), *[None] * 5


def _multiply(
    rows: Tensor, packed: Tensor, absmax: Tensor, ends: list[int], nested: bool, is_transposed: bool, again: bool
) -> Tensor:
    """Returns the products of `rows` with experts of which `packed` and `absmax` have the bytes; `again`: in backward.
    One product an expert, since the host knows its rows: a grouped one would read them from the device again on GPUs
    where torch has no kernel of it (read in ATen's GroupedBlas.cpp, torch 2.13: all but Hopper and B200)."""
    height, width = packed.shape[1], packed.shape[2] * packed.element_size() * 2
    output = rows.new_empty(len(rows), width if is_transposed else height)
    starts, count = [0, *ends], max(1, UNPACKED_BYTES // (height * width * rows.element_size()))
    for first in range(0, len(ends), count):
        last = min(first + count, len(ends))
        if starts[first] == starts[last]:
            continue
        both = (each[first:last].flatten(0, 1) for each in (packed, absmax))
        weight = unpack_nf4(*both, width, nested, rows.dtype, again).unflatten(0, (-1, height))
        for expert, matrix in zip(range(first, last), weight, strict=True):
            begin, end = starts[expert], ends[expert]
            if begin < end:
                torch.mm(rows[begin:end], matrix if is_transposed else matrix.T, out=output[begin:end])
    return output
