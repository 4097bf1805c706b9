"""Symmetric block quantisation to 8 or 4 bits, payload and scales in one buffer (ZeRO++, arXiv 2306.10209, 3.1).

A row of n elements is cut into blocks (the last padded with zeros); a block's step is its largest magnitude divided by
127 or 7, and each element becomes a whole number of steps. Invariant: an element comes back within half a step (and the
rounding of the dtype asked for). What is not finite stays visible: a block with an inf or NaN comes back as NaN. A
block whose largest magnitude is below TINY comes back as zeros: its step could not be written as a normal number.
Pure functions of tensors; on CUDA the same functions are compiled, so that each is one fused kernel.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

LARGEST = {8: 127, 4: 7}  # bits -> steps on either side of zero: -128 and -8 stay unused, so that signs are alike
BLOCKS = (64, 128, 256)
SCALE_BYTES = 4  # fp32
TINY = 127 * 2.0**-126


def buffer_bytes(numel: int, bits: int, block: int) -> int:
    """Bytes of one row of `numel` elements: whole blocks of payload, then their scales."""
    blocks = -(-numel // block)
    return blocks * (block * bits // 8 + SCALE_BYTES)


def quantize(rows: Tensor, bits: int, block: int) -> Tensor:
    """[r, n] fp32 or bf16 -> [r, buffer_bytes(n)] uint8. `bits` 8 or 4, `block` elements with one scale."""
    return _fused(_quantize, rows.device.type)(rows, bits, block)


def dequantize(buffer: Tensor, numel: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    """[r, buffer_bytes(numel)] uint8 -> [r, numel] in `dtype`: the inverse of quantize, to half a step."""
    return _fused(_dequantize, buffer.device.type)(buffer, numel, bits, block, dtype)


@cache
def _fused(function: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True) if device_type == "cuda" else function


def _quantize(rows: Tensor, bits: int, block: int) -> Tensor:
    count, numel = rows.shape
    blocks = -(-numel // block)
    values = torch.nn.functional.pad(rows.float(), (0, blocks * block - numel)).view(count, blocks, block)
    most = values.abs().amax(-1, keepdim=True)
    scale = torch.where(most < TINY, 0.0, most / LARGEST[bits])
    scale = torch.where(most.isfinite(), scale, torch.nan)
    steps = (values / scale).nan_to_num(0.0).round().clamp(-LARGEST[bits], LARGEST[bits])
    if bits == 8:
        payload = steps.to(torch.int8).view(torch.uint8)
    else:
        nibbles = (steps + 8).to(torch.uint8)
        payload = nibbles[..., : block // 2] | nibbles[..., block // 2 :] << 4
    return torch.cat([payload.flatten(1), scale.squeeze(-1).view(torch.uint8)], dim=1)


def _dequantize(buffer: Tensor, numel: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
    count, blocks = buffer.shape[0], -(-numel // block)
    split = blocks * block * bits // 8
    payload = buffer[:, :split].view(count, blocks, -1)
    scale = buffer[:, split:].contiguous().view(torch.float32).unsqueeze(-1)
    if bits == 8:
        steps = payload.view(torch.int8)
    else:
        steps = torch.cat([payload & 15, payload >> 4], dim=-1).to(torch.int8) - 8
    return (steps * scale).to(dtype).view(count, -1)[:, :numel]
