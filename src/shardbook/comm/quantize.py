"""Symmetric block quantisation to 8 or 4 bits, payload and scales in one buffer (ZeRO++, arXiv 2306.10209, 3.1).

A row of n elements is split into blocks (the last padded with zeros); a block's step is its largest magnitude divided
by 127 or 7, and each element becomes a whole number of steps. Invariant: dequantising gives each element back within
half a step (and the rounding of the dtype asked for). Errors stay visible: a block with an inf or NaN becomes all NaN.
A block whose largest magnitude is below TINY becomes zeros: its step would not be a normal number.
Pure functions of tensors; on CUDA the same functions are compiled, so that their passes are fused.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from shardbook.arithmetic import ceil_div
from shardbook.comm.compile_on_cuda import fused

LARGEST = {8: 127, 4: 7}  # bits -> steps on either side of zero: -128 and -8 stay unused, for a symmetric range
BLOCK = 128  # elements that share a scale
SCALE_BYTES = 4  # fp32
TINY = 127 * 2.0**-126


def buffer_bytes(numel: int, bits: int) -> int:
    """Returns the bytes of one row of `numel` elements: whole blocks of payload, then their scales."""
    blocks = ceil_div(numel, BLOCK)
    return blocks * (BLOCK * bits // 8 + SCALE_BYTES)


def quantize(rows: Tensor, bits: int) -> Tensor:
    """Quantises `rows` [..., n], fp32 or bf16, to uint8 [..., buffer_bytes(n)]; `bits`: 8 or 4."""
    kernel = fused(_quantize, rows.device.type, bits, rows.dtype, static_widths=True)
    return kernel(rows, bits)


def dequantize(buffers: Tensor, out: Tensor, bits: int) -> None:
    """Writes into `out`, [..., n] fp32 or bf16, the sum over k of `buffers`, [k, ..., buffer_bytes(n)] uint8, added up
    in order, in fp32. With k = 1 it is the inverse of quantize, to half a step."""
    if not out.numel():
        return
    blocks = ceil_div(out.shape[-1], BLOCK)
    payload, scales = buffers.split([blocks * BLOCK * bits // 8, blocks * SCALE_BYTES], -1)
    # As numbers already here: a kernel would put each scale together from its bytes anew for each element.
    scales = scales.view(torch.float32)
    kernel = fused(_dequantize, out.device.type, bits, out.dtype, static_widths=True)
    kernel(payload, scales, out, bits)


def _constant(value: int, known: Iterable[int]) -> int:
    """Returns `value` as a constant for the compiler: else it makes bits a symbol, and general kernels."""
    return next(one for one in known if one == value)


def _quantize(rows: Tensor, bits: int) -> Tensor:
    bits = _constant(bits, LARGEST)
    values = rows.float()
    if short := -values.shape[-1] % BLOCK:
        values = torch.nn.functional.pad(values, (0, short))
    values = values.unflatten(-1, (-1, BLOCK))
    most = values.abs().amax(-1, keepdim=True)
    # Not a division: compilers for GPUs make a product of it, whose last bit would differ from the CPU's.
    scale = torch.where(most < TINY, 0.0, most * (1 / LARGEST[bits]))
    scale = torch.where(most.isfinite(), scale, torch.nan)
    # The payload of a block whose scale is 0 or NaN does not matter.
    steps = (values / torch.where(scale > 0, scale, torch.inf)).round()
    if bits == 8:
        payload = (steps.to(torch.int32) & 255).to(torch.uint8)  # not a view of int8, which would end a fused kernel
    else:
        nibbles = (steps + 8).to(torch.uint8)
        payload = nibbles[..., : BLOCK // 2] | nibbles[..., BLOCK // 2 :] << 4
    return torch.cat([payload.flatten(-2), _bytes_of(scale).flatten(-2)], dim=-1)


def _dequantize(payload: Tensor, scales: Tensor, out: Tensor, bits: int) -> None:
    bits = _constant(bits, LARGEST)
    payload = payload.unflatten(-1, (-1, BLOCK * bits // 8))
    if bits == 8:
        steps = payload.view(torch.int8)
    else:
        shifts = torch.tensor([[0], [4]], dtype=torch.uint8, device=payload.device)
        steps = (payload.unsqueeze(-2) >> shifts & 15).flatten(-2).to(torch.int8) - 8
    out.copy_((steps * scales.unsqueeze(-1)).flatten(-2).sum(0)[..., : out.shape[-1]])


def _bytes_of(scale: Tensor) -> Tensor:
    """Returns fp32 [..., 1] as uint8 [..., 4], lowest byte first. By arithmetic: a view would end a fused kernel."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scale.device)
    return (scale.view(torch.int32) >> shifts & 255).to(torch.uint8)
