"""The kernels that are compiled on a GPU, each beside a copy of as many bytes: the loss head, the optimizers, a base in
four bits and ZeRO++'s blocks. A kernel whose figure is far below a copy's moves more than it must, or one number at a
time. Prints a line of JSON each.

    python tests/bench/gpu_kernels.py
"""

import json
from collections.abc import Callable
from functools import partial

import torch
from quantisation import against_a_copy, beside_a_copy, four_bits

from shardbook.comm.compile_on_cuda import fused
from shardbook.comm.quantize import dequantize, quantize
from shardbook.model.cross_entropy import chunk_cross_entropy
from shardbook.optim import adamw_bf16, elementwise
from shardbook.optim.elementwise import update_lion

LIMITS = torch.tensor([0.9, 0.1, 0.95, 0.05, 1e-8, 1e-5, 1.0])  # AdamW's coefficients


def loss_head(device: str) -> tuple[Callable[[], object], int]:
    """A chunk of 1,024 rows of Llama 3's vocabulary: two passes that read, one that writes."""
    rows, vocabulary = (1024, 128_256) if device == "cuda" else (64, 1024)
    logits = torch.randn(rows, vocabulary, device=device, dtype=torch.bfloat16)
    targets = torch.randint(0, vocabulary, (rows,), device=device)
    return partial(chunk_cross_entropy, targets, logits, slice(rows), True), 3 * logits.nbytes


def adamw(device: str) -> tuple[Callable[[], object], int]:
    """Four tensors of bf16 are read, three written; the noise, which is made and read beside them, counts as lost."""
    numel = 2**28 if device == "cuda" else 2**18
    tensors = [torch.randn(numel, device=device).mul_(0.02).bfloat16() for _ in range(4)]
    tensors[3].abs_()
    return partial(adamw_bf16.step_shard, tensors, LIMITS.to(device), 0), 7 * 2 * numel


def lion(device: str) -> tuple[Callable[[], object], int]:
    """Three tensors of fp32 are read, two written."""
    shape = (8192, 2**15) if device == "cuda" else (64, 2**10)
    tensors = [torch.randn(shape, device=device) for _ in range(3)]
    rates = elementwise.place_numbers([1.0, -1e-5, 0.1, 0.01], torch.device(device))
    update = fused(update_lion, device)
    return partial(update, *tensors, rates), 5 * tensors[0].nbytes


def blocks(device: str) -> list[dict]:
    """Eight slices of a gradient in fp32 become blocks, and back."""
    rows = torch.randn(8, 2**24 if device == "cuda" else 2**14, device=device)
    found = []
    for bits in (8, 4):
        sent, back = quantize(rows, bits)[None], torch.empty_like(rows)
        works = {
            "quantize": partial(quantize, rows, bits),
            "unpack": partial(dequantize, sent, back, bits),
        }
        for what, work in works.items():
            facts = {"what": f"{what} blocks", "dtype": "float32", "bits": bits}
            found.append(facts | against_a_copy(work, rows.numel(), rows.itemsize, bits, device))
            print(json.dumps(found[-1]), flush=True)
    return found


def main(device: str) -> list[dict]:
    found = []
    for name, build in {"loss head": loss_head, "adamw_bf16": adamw, "lion": lion}.items():
        found.append({"what": name} | beside_a_copy(*build(device), device))
        print(json.dumps(found[-1]), flush=True)
    return found + four_bits(device) + blocks(device)


if __name__ == "__main__":
    main("cuda" if torch.cuda.is_available() else "cpu")
