"""How fast blocks, and a base in four bits, are quantised and unpacked, against a copy of the same bytes on the same
device, and what a step's worth of qwZ costs a Llama of 1B. Part of `make bench-gpu`; alone it prints its rows:

    python tests/bench/quantisation.py
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from shardbook.comm.quantize import buffer_bytes, dequantize, quantize
from shardbook.model.nf4 import has_kernel, quantize_rows, unpack_nf4

# of a Llama-3-70B block: q and o 8192 x 8192, k and v 8192 x 1024, three of 8192 x 28672, two norms
BLOCK_70B = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
RANKS = 8
ROUNDS = 5
IN_A_ROW = {"cuda": 8, "cpu": 2}  # calls between two looks at the clock: on a GPU the host launches ahead, as in a step


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Median of ROUNDS, each of some calls in a row, after one for warm-up and compilation."""
    taken = []
    for _ in range(ROUNDS + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(IN_A_ROW[device]):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) / IN_A_ROW[device])
    return statistics.median(taken[1:])


def bandwidths(device: str) -> list[dict]:
    """Of one rank of RANKS: its shard quantised, a whole gradient quantised, a whole unit unpacked, a gradient's slices
    summed. On a CPU, of a small unit: only to see that it runs."""
    rows, numel = [], BLOCK_70B if device == "cuda" else 2**22
    for dtype in (torch.bfloat16, torch.float32):
        whole = torch.randn(RANKS, numel // RANKS, device=device).to(dtype)
        for bits in (8, 4):
            sent = quantize(whole, bits)
            for what, ranks, work in (
                ("quantize a shard", 1, partial(quantize, whole[:1], bits)),
                ("quantize a gradient", RANKS, partial(quantize, whole, bits)),
                ("unpack a unit", RANKS, partial(dequantize, sent[None], whole, bits)),
                ("sum a gradient's slices", RANKS, partial(dequantize, sent, whole[0].float(), bits)),
            ):
                facts = {"what": what, "dtype": str(dtype).removeprefix("torch."), "bits": bits}
                rows.append(facts | against_a_copy(work, ranks * numel // RANKS, dtype.itemsize, bits, device))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def four_bits(device: str) -> list[dict]:
    """The largest matrix of a block out of its four bits, by bitsandbytes where it is there. On a CPU a small one."""
    rows, width = (8192, 28672) if device == "cuda" else (256, 4096)
    rows_of_facts = []
    for nested in (False, True):
        packed = quantize_rows(torch.randn(rows, width, device=device), nested)
        facts = {"what": "unpack four bits", "dtype": "bfloat16", "bits": 4, "double_quant": nested}
        work = partial(unpack_nf4, *packed, width, nested, torch.bfloat16, False)
        moved = rows * width * 2 + sum(each.nbytes for each in packed)
        rows_of_facts.append(facts | {"bitsandbytes": has_kernel()} | beside_a_copy(work, moved, device))
        print(json.dumps(rows_of_facts[-1]), flush=True)
    return rows_of_facts


def against_a_copy(work: Callable[[], object], numel: int, itemsize: int, bits: int, device: str) -> dict:
    """`work` on `numel` elements of blocks and their bytes."""
    return beside_a_copy(work, numel * itemsize + buffer_bytes(numel, bits), device)


def beside_a_copy(work: Callable[[], object], moved: int, device: str) -> dict:
    """`work`, which moves so many bytes, beside a copy that reads and writes as many together."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    mine = seconds_of(work, device)
    copy = seconds_of(partial(torch.empty_like(source).copy_, source), device)
    speed = {"bytes_per_second": moved / mine, "of_copy_bandwidth": copy / mine}
    return {"moved_bytes": moved, "seconds": mine} | speed


def qwz_seconds_of_a_step(device: str, units: list[int]) -> float:
    """What qwZ in 8 bits adds to a step of zero3 with one micro-batch: each unit, of so many parameters, gathered twice
    in bf16 by one rank of RANKS, without what it saves on the wire. fully_shard gathers nothing in a world of one."""
    total = 0.0
    for numel in set(units):
        whole = torch.randn(RANKS, -(-numel // RANKS), device=device).bfloat16()
        sent = quantize(whole, 8)

        def gather(whole: torch.Tensor = whole, sent: torch.Tensor = sent) -> None:
            quantize(whole[:1], 8)
            dequantize(sent[None], whole, 8)

        total += 2 * units.count(numel) * seconds_of(gather, device)
    return total


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bandwidths(device)
    four_bits(device)
    llama_1b = [60_821_504] * 16 + [128_256 * 2048 + 2048]  # blocks; the tied embedding with the last norm
    if device == "cuda":
        print(json.dumps({"llama_1b_qwz_seconds_of_a_step": qwz_seconds_of_a_step(device, llama_1b)}))
