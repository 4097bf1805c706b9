"""A frozen base in four bits: NF4 (QLoRA, arXiv 2305.14314, section 3 and appendix E).

Invariant: a block of 64 never crosses a row, so each rank quantises its own rows, and shards one after another are the
bytes of the whole. The bytes lie in tensors of the dtype of compute (torch 2.11's fully_shard takes no integers), and
nothing may copy them as numbers: byte_gather.py gathers them as bytes. A product keeps only these bytes for backward,
also compiled: forward and backward unpack by different calls, else the compiler would unpack once and keep the result.
Packed weights are never trained.
"""

import importlib.util
import itertools
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardbook.arithmetic import round_up
from shardbook.comm.compile_on_cuda import fused
from shardbook.comm.torch_private import slots_of
from shardbook.model.marks import BYTES, STANDS_FOR
from shardbook.recipe import RecipeError

BLOCK = 64
# appendix E: quantiles of a normal distribution, seven below zero and eight above, over the largest
CODES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
PACKED, ABSMAX = "weight_packed", "weight_absmax"
PACKED_END, ABSMAX_END = "_packed", "_absmax"  # how the names of what a parameter is packed in end
AT_ONCE = 2**22  # elements packed or unpacked at once, in fp32 or int32, where no kernel does it in one pass
SCALE_BYTES = 4  # of an fp32 number


class PackedLinear(nn.Linear):
    """A frozen linear whose weight [out, in] is `weight_packed`, out * in / 2 bytes by row, high nibble first, and
    `weight_absmax`, by row the fp32 absmax of each block or, `nested`, a byte for each and one fp32 scale."""

    nested: bool

    def forward(self, input: Tensor) -> Tensor:
        return packed_product(self, input, self.bias)


def pack_module(module: nn.Linear, name: str, dtype: torch.dtype, nested: bool) -> None:
    """Replaces the weight of `module`, whose name is `name`, as `pack_parameters` does."""
    pack_parameters(module, ("weight",), name, dtype, nested)
    module.nested = nested  # type: ignore[assignment]


def pack_parameters(module: nn.Module, keys: Collection[str], name: str, dtype: torch.dtype, nested: bool) -> None:
    """Replaces the matrices `keys` of `module`, which lie on the meta device and are frozen, each by two packed
    parameters of `dtype`. Raises RecipeError where the width of one is no multiple of BLOCK; `name`: the module's."""
    slots = slots_of(module)
    parameters = dict(slots)
    slots.clear()  # they keep their places: random weights are numbered in this order
    stands_for: dict[str, int] = {}
    for key, parameter in parameters.items():
        if key not in keys:
            slots[key] = parameter
            continue
        assert parameter is not None, f"{name}.{key} is no parameter"
        rows, width = parameter.shape
        if width % BLOCK:
            matrix = name if key == "weight" else f"{name}.{key}"
            raise RecipeError(
                f"model.load_in_4bit = true: rows of {matrix} have {width} numbers; must be a multiple of {BLOCK}, the "
                "block of NF4; set model.load_in_4bit=false"
            )
        sizes = {key + PACKED_END: width // 2, key + ABSMAX_END: absmax_bytes(width, nested)}
        for packed, size in sizes.items():
            empty = torch.empty(rows, size // dtype.itemsize, dtype=dtype, device="meta")
            slots[packed] = nn.Parameter(empty, requires_grad=False)
        stands_for |= {key + PACKED_END: rows * width, key + ABSMAX_END: 0}
    setattr(module, BYTES, tuple(stands_for))
    setattr(module, STANDS_FOR, stands_for)


def absmax_bytes(width: int, nested: bool) -> int:
    """Returns the bytes of a row's scales: an fp32 number for each block; `nested`: a byte for each block, padded to
    whole fp32 numbers, and one fp32 scale for the row."""
    blocks = width // BLOCK
    return round_up(blocks, SCALE_BYTES) + SCALE_BYTES if nested else blocks * SCALE_BYTES


def quantize_rows(rows: Tensor, nested: bool = False) -> tuple[Tensor, Tensor]:
    """Returns weights [n, in], of any float dtype, as bytes: uint8 [n, in / 2] and uint8 [n, absmax_bytes]. A pure
    function of each row. Not `nested`, they are the very bytes of bitsandbytes."""
    count, width = rows.shape
    packed = torch.empty(count, width // 2, dtype=torch.uint8, device=rows.device)
    scales = torch.zeros(count, absmax_bytes(width, nested), dtype=torch.uint8, device=rows.device)
    between = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(CODES)], device=rows.device)
    for part in _parts(count, width):
        blocks = rows[part].float().view(-1, width // BLOCK, BLOCK)
        absmax = blocks.abs().amax(-1)
        shares = blocks * (1 / absmax.where(absmax > 0, 1.0))[..., None]
        codes = torch.bucketize(shares, between, out_int32=True).to(torch.uint8).view(-1, width)
        packed[part] = codes[:, 0::2] << 4 | codes[:, 1::2]
        if not nested:
            scales[part] = absmax.view(torch.uint8)
            continue
        largest = absmax.amax(-1, keepdim=True)
        bytes_ = (absmax / largest.where(largest > 0, 1.0) * 255).round().to(torch.uint8)
        scales[part, : width // BLOCK] = bytes_
        scales[part, -SCALE_BYTES:] = largest.view(torch.uint8)
    return packed, scales


def _parts(count: int, width: int) -> Iterator[slice]:
    """Yields slices of `count` rows of `width`, about AT_ONCE elements each at most, so that scratch stays small."""
    each = max(1, AT_ONCE // width)
    return (slice(first, min(first + each, count)) for first in range(0, count, each))


def _read_scales(scales: Tensor, blocks: slice, nested: bool) -> Tensor:
    """Returns the scale of each of `blocks`, fp32 [n, blocks]."""
    if not nested:
        return scales.view(torch.float32)[:, blocks]
    return scales[:, blocks].float() * (scales[:, -SCALE_BYTES:].contiguous().view(torch.float32) / 255)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Returns the two numbers that each byte stands for, fp32 [256, 2]."""
    codes = torch.tensor(CODES, device=device)
    return torch.cartesian_prod(codes, codes)


@cache
def has_kernel() -> bool:
    """Returns whether bitsandbytes is installed: its kernel does in one pass what `_unpack` does in five."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return False
    import bitsandbytes  # noqa: F401

    return True


@torch.library.custom_op("shardbook::unpack_nf4", mutates_args=())
def unpack_nf4(
    packed: Tensor, absmax: Tensor, width: int, nested: bool, dtype: torch.dtype, again: bool, first_block: int = 0
) -> Tensor:
    """Returns the weights [n, width] in `dtype` that the bytes stand for: code * absmax in fp32, rounded once. `again`:
    in backward; it makes the two calls differ, else a compiler would merge them and keep the result. `first_block`: of
    the blocks that `absmax` has scales of, the one that `packed` begins with."""
    blocks = slice(first_block, first_block + width // BLOCK)
    values, scales = packed.view(torch.uint8), _read_scales(absmax.view(torch.uint8), blocks, nested)
    if has_kernel() and values.numel():
        kernel = torch.ops.bitsandbytes.dequantize_4bit.default
        return kernel(values.flatten(), scales.flatten(), BLOCK, "nf4", [len(values), width], dtype)
    out = torch.empty(len(values), width, dtype=dtype, device=values.device)
    if values.numel():
        unpack = fused(_unpack, values.device.type, nested, dtype, static_widths=True)
        unpack(values, scales, _pairs(values.device), out)
    return out


def _unpack(values: Tensor, scales: Tensor, pairs: Tensor, out: Tensor) -> None:
    """Writes into `out` [n, width] the weights of `values` (uint8 [n, width / 2]) and `scales` (fp32 [n, width /
    BLOCK]). Compiled it is one kernel over all rows, which looks each number up in the 16 codes; else it goes through
    parts of them, pass by pass, and looks up two at a time."""
    count, width = out.shape
    if torch.compiler.is_compiling():
        # In 256 pairs, 32 threads would meet up to 16 lines of a table; the codes lie in one.
        shifts = 4 * (1 - torch.arange(width, device=out.device) % 2)  # high nibble first
        nibbles = values[:, :, None].expand(-1, -1, 2).reshape(count, width) >> shifts.to(torch.uint8) & 15
        each = scales[:, :, None].expand(-1, -1, BLOCK).reshape(count, width)
        out.copy_(pairs[: len(CODES), 1][nibbles.int()] * each)
        return
    for part in _parts(count, width):
        numbers = F.embedding(values[part].int(), pairs).view(-1, width // BLOCK, BLOCK)
        out[part] = numbers.mul_(scales[part, :, None]).view(-1, width)


@unpack_nf4.register_fake
def _(
    packed: Tensor, absmax: Tensor, width: int, nested: bool, dtype: torch.dtype, again: bool, first_block: int = 0
) -> Tensor:
    return packed.new_empty(packed.shape[0], width, dtype=dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, packed: Tensor, absmax: Tensor, nested: bool, first_block: int) -> Tensor:
        ctx.save_for_backward(packed, absmax)
        ctx.width, ctx.nested, ctx.first_block = input.shape[-1], nested, first_block
        return F.linear(input, unpack_nf4(packed, absmax, ctx.width, nested, input.dtype, False, first_block))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight = unpack_nf4(*ctx.saved_tensors, ctx.width, ctx.nested, gradient.dtype, True, ctx.first_block)
        return gradient @ weight, None, None, None, None


def packed_product(module: nn.Module, input: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns input [..., in] times the transposed weight of a packed `module`, plus `bias`."""
    of: Any = module
    return product_of_bytes(input, of.weight_packed, of.weight_absmax, of.nested, bias)


def product_of_bytes(
    input: Tensor, packed: Tensor, absmax: Tensor, nested: bool, bias: Tensor | None = None, first_block: int = 0
) -> Tensor:
    """Returns input [..., n] times the transposed weight [out, n] that `packed` stands for, plus `bias`. `first_block`:
    of the blocks that `absmax` has scales of, the one that `packed` begins with."""
    out: Tensor = _Product.apply(input, packed, absmax, nested, first_block)
    return out if bias is None else out + bias


def unpacked_weight(module: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Returns the weight of a packed `module`, or this rank's rows of it where it is sharded, in `dtype`."""
    both: list[Any] = [module.weight_packed, module.weight_absmax]
    packed, absmax = (each.to_local() if isinstance(each, DTensor) else each.detach() for each in both)
    return unpack_nf4(packed, absmax, module.in_features, module.nested, dtype, again=False)


def fill_rows(packed: Tensor, absmax: Tensor, nested: bool, rows: Tensor, numbers: slice | None = None) -> None:
    """Quantises `rows` into this rank's part of the packed parameters; with `numbers`, only these of each row, beside
    the scales of all its blocks."""
    quantized, scales = quantize_rows(rows.to(packed.device), nested)
    if numbers is not None:
        quantized = quantized[:, numbers.start // 2 : numbers.stop // 2]
    for local, part in ((packed, quantized), (absmax, scales)):
        local.view(torch.uint8).copy_(part)
