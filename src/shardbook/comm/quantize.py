"""Symmetric block quantisation to 8 or 4 bits, payload and scales in one buffer (ZeRO++, arXiv 2306.10209, 3.1).

A row of n elements is split into blocks (the last padded with zeros); a block's step is its largest magnitude divided
by 127 or 7, and each element becomes a whole number of steps. Invariant: dequantising gives each element back within
half a step (and the rounding of the dtype asked for). Errors stay visible: a block with an inf or NaN becomes all NaN.
A block whose largest magnitude is below TINY becomes zeros: its step would not be a normal number.
Pure functions of tensors; on CUDA the same functions are compiled, so that their passes are fused.
"""

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from shardbook.arithmetic import ceil_div
from shardbook.comm.fused import fused

LARGEST = {8: 127, 4: 7}  # bits -> steps on either side of zero: -128 and -8 stay unused, for a symmetric range
BLOCK = 128  # elements that share a scale
BLOCKS = (64, 128, 256)
SCALE_BYTES = 4  # fp32
TINY = 127 * 2.0**-126
CACHED = 2**18  # elements that eager passes work on at a time: 1 MiB in fp32


def buffer_bytes(numel: int, bits: int, block: int) -> int:
    """Returns the bytes of one row of `numel` elements: whole blocks of payload, then their scales."""
    blocks = ceil_div(numel, block)
    return blocks * (block * bits // 8 + SCALE_BYTES)


def quantize(rows: Tensor, bits: int, block: int) -> Tensor:
    """Quantises `rows` [..., n], fp32 or bf16, to uint8 [..., buffer_bytes(n)]; `bits`: 8 or 4; one scale a `block`."""
    piece = _piece(rows.device.type, prod(rows.shape[:-1]), rows.shape[-1], block)
    kernel = fused(_quantize, rows.device.type, bits, block, rows.dtype, static_widths=True)
    return kernel(rows, bits, block, piece)


def dequantize(buffers: Tensor, out: Tensor, bits: int, block: int) -> None:
    """Writes into `out`, [..., n] fp32 or bf16, the sum over k of `buffers`, [k, ..., buffer_bytes(n)] uint8, added up
    in order, in fp32. With k = 1 it is the inverse of quantize, to half a step."""
    if not out.numel():
        return
    piece = _piece(out.device.type, prod(buffers.shape[:-1]), out.shape[-1], block)
    blocks = ceil_div(out.shape[-1], block)
    payload, scales = buffers.split([blocks * block * bits // 8, blocks * SCALE_BYTES], -1)
    # As numbers already here: a kernel would put each scale together from its bytes anew for each element.
    scales = scales.view(torch.float32)
    kernel = fused(_dequantize, out.device.type, bits, block, out.dtype, static_widths=True)
    kernel(payload, scales, out, bits, block, piece)


def _piece(device_type: str, rows: int, numel: int, block: int) -> int:
    """Returns how many elements of a row, in whole blocks, are processed at a time: all where passes are fused; else as
    many as a core's cache holds, because each eager pass over more reads and writes memory."""
    blocks = ceil_div(numel, block) if device_type == "cuda" else max(1, CACHED // (rows * block))
    return blocks * block


def _constant(value: int, known: Iterable[int]) -> int:
    """Returns `value` as a constant for the compiler: else it makes bits and block symbols, and general kernels."""
    return next(one for one in known if one == value)


def _quantize(rows: Tensor, bits: int, block: int, piece: int) -> Tensor:
    bits, block = _constant(bits, LARGEST), _constant(block, BLOCKS)
    payloads, scales = zip(*(_encode(part, bits, block) for part in rows.split(piece, -1)), strict=True)
    return torch.cat([*payloads, *scales], dim=-1)


def _encode(values: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Returns payload and scales of the blocks of `values` [..., m], both as bytes."""
    values = values.float()
    if short := -values.shape[-1] % block:
        values = torch.nn.functional.pad(values, (0, short))
    values = values.unflatten(-1, (-1, block))
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
        payload = nibbles[..., : block // 2] | nibbles[..., block // 2 :] << 4
    return payload.flatten(-2), _bytes_of(scale).flatten(-2)


def _dequantize(payload: Tensor, scales: Tensor, out: Tensor, bits: int, block: int, piece: int) -> None:
    bits, block = _constant(bits, LARGEST), _constant(block, BLOCKS)
    pieces = payload.split(piece * bits // 8, -1), scales.split(piece // block, -1), out.split(piece, -1)
    for some, scale, into in zip(*pieces, strict=True):
        total = _decode(some, scale, bits, block).sum(0)
        into.copy_(total[..., : into.shape[-1]])


def _decode(payload: Tensor, scales: Tensor, bits: int, block: int) -> Tensor:
    payload = payload.unflatten(-1, (-1, block * bits // 8))
    if bits == 8:
        steps = payload.view(torch.int8)
    else:
        shifts = torch.tensor([[0], [4]], dtype=torch.uint8, device=payload.device)
        steps = (payload.unsqueeze(-2) >> shifts & 15).flatten(-2).to(torch.int8) - 8
    return (steps * scales.unsqueeze(-1)).flatten(-2)


def _bytes_of(scale: Tensor) -> Tensor:
    """Returns fp32 [..., 1] as uint8 [..., 4], lowest byte first. By arithmetic: a view would end a fused kernel."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scale.device)
    return (scale.view(torch.int32) >> shifts & 255).to(torch.uint8)
