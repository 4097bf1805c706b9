"""Attention kernels side by side on one packed row: forward, backward, and how far each is from the dense mask.

`causal` and `causal, flash` attend across documents: what a row of one document costs, an upper bound for the others.
What torch or the device lacks is left out by name. Part of `make bench-gpu`; alone it prints its rows:

    python tests/bench/attention_kernels.py
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardbook.data.loader import Batching, build_micro_batch
from shardbook.model.attention import make_varlen
from shardbook.model.masks import attention_mask

ROUNDS = 10
EXACT = ("mask", "flex", "varlen")  # those that compute what the dense mask does


@dataclass(frozen=True)
class PackedRow:
    """One row of `length` tokens, cut into documents of `document` tokens, the last one shorter."""

    length: int
    heads: int
    head_dim: int
    document: int
    device: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def heads_first(self) -> list[Tensor]:
        """q, k, v: each [1, heads, length, head_dim], a leaf that needs a gradient."""
        dice = torch.Generator().manual_seed(0)
        shape = (1, self.heads, self.length, self.head_dim)
        return [torch.randn(shape, generator=dice).to(self.device, self.dtype).requires_grad_() for _ in range(3)]

    def documents(self) -> Tensor:
        """int64 [length]: the document of each token."""
        return torch.arange(self.length, device=self.device) // self.document

    def told(self) -> tuple[Tensor, torch.Size, bool, torch.dtype, int]:
        """What attention is told of the loader's micro-batch of this row."""
        sizes = [min(self.document, self.length - start) for start in range(0, self.length, self.document)]
        encoded = [{"input_ids": [0] * size, "mask": [True] * size} for size in sizes]
        here = Batching(self.length, 1, 0, 1, documents=len(sizes), multiple=1)
        micro = build_micro_batch(encoded, [tuple(range(len(sizes)))], here)
        return micro.cu_seqlens.to(self.device), micro.input_ids.shape, True, self.dtype, micro.max_seqlen

    def mask(self) -> Tensor:
        """bool [1, 1, length, length]: earlier tokens of one's own document."""
        documents = self.documents()
        causal = torch.ones(self.length, self.length, dtype=torch.bool, device=self.device).tril()
        return (causal & (documents[:, None] == documents[None, :]))[None, None]


Call = Callable[[], Tensor]  # -> the output in the kernel's own layout
Built = tuple[Call, list[Tensor], bool]  # the call, its q, k and v, whether heads come first


def dense(row: PackedRow, *backends: SDPBackend) -> Built:
    inputs, mask = row.heads_first(), row.mask()
    return within(backends, lambda: F.scaled_dot_product_attention(*inputs, mask)), inputs, True


def causal(row: PackedRow, *backends: SDPBackend) -> Built:
    inputs = row.heads_first()
    return within(backends, lambda: F.scaled_dot_product_attention(*inputs, is_causal=True)), inputs, True


def within(backends: tuple[SDPBackend, ...], call: Call) -> Call:
    """`call` with only those backends allowed; none: torch chooses."""

    def chosen() -> Tensor:
        with sdpa_kernel(list(backends)):
            return call()

    return chosen if backends else call


def flex(row: PackedRow) -> Built:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    inputs, documents = row.heads_first(), row.documents()

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[query] == documents[key])

    block = create_block_mask(allowed, None, None, row.length, row.length, device=row.device)
    kernel = torch.compile(flex_attention) if row.device == "cuda" else flex_attention
    return lambda: kernel(*inputs, block_mask=block), inputs, True


def varlen(row: PackedRow) -> Built:
    """The very call of the model, told what it is told of such a micro-batch."""
    told = attention_mask("varlen", *row.told())
    # heads first, as a model's are: a view of what lies with tokens first
    inputs = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in row.heads_first()]
    attend, module = make_varlen(), torch.nn.Module()

    def call() -> Tensor:
        return attend(module, *(t.transpose(1, 2) for t in inputs), told, row.head_dim**-0.5)[0][0]

    return call, inputs, False


KERNELS: dict[str, Callable[[PackedRow], Built]] = {
    "mask": dense,
    "mask, cuDNN": lambda row: dense(row, SDPBackend.CUDNN_ATTENTION),
    "mask, efficient": lambda row: dense(row, SDPBackend.EFFICIENT_ATTENTION),
    "causal, cuDNN": lambda row: causal(row, SDPBackend.CUDNN_ATTENTION),
    "causal, flash": lambda row: causal(row, SDPBackend.FLASH_ATTENTION),
    "flex": flex,
    "varlen": varlen,
}


def wait(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def milliseconds(call: Call, device: str, rounds: int) -> tuple[float, float]:
    """Forward and backward, each the mean of `rounds` after as many for warm-up, at most three."""
    for count in (min(3, rounds), rounds):
        began = wait(device)
        outputs = [call() for _ in range(count)]
        turned = wait(device)
        for output in outputs:
            output.backward(output.detach())
        ended = wait(device)
    return (turned - began) / rounds * 1e3, (ended - turned) / rounds * 1e3


def compare(row: PackedRow, rounds: int = ROUNDS) -> list[dict]:
    """One result a kernel: `forward_ms` and `backward_ms`, or `left_out` and why; `largest_difference` from the dense
    mask's output where both compute the same."""
    results, wanted = [], None
    for name, build in KERNELS.items():
        result: dict = {"kernel": name}
        try:
            call, inputs, heads_first = build(row)
            output = call().detach()
            output = output if heads_first else output.transpose(0, 1)[None]
            wanted = output if name == "mask" else wanted
            if name.startswith(EXACT) and wanted is not None:
                result["largest_difference"] = (output - wanted).abs().max().item()
            result["forward_ms"], result["backward_ms"] = milliseconds(call, row.device, rounds)
            assert all(t.grad is not None for t in inputs)
        # whatever a torch or a device says when it lacks a kernel: each has its own class of error
        except (ImportError, NotImplementedError, RuntimeError, ValueError, TypeError) as error:
            result["left_out"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
        results.append(result)
        print(describe(result), flush=True)
        if row.device == "cuda":
            torch.cuda.empty_cache()
    return results


def describe(result: dict) -> str:
    if "left_out" in result:
        return f"{result['kernel']:16} left out: {result['left_out']}"
    apart = f", {result['largest_difference']:.1e} from the mask" if "largest_difference" in result else ""
    return (
        f"{result['kernel']:16} forward {result['forward_ms']:.2f} ms, backward {result['backward_ms']:.2f} ms{apart}"
    )


def rows_of(device: str) -> list[PackedRow]:
    """Of the 8B shape, keys and values repeated to all heads, 8,192 tokens in 7, 32 and 100 documents, and 4,096; on a
    CPU a tiny one."""
    if device == "cuda":
        return [
            PackedRow(length, 32, 128, size, device)
            for length, size in ((8192, 1200), (4096, 1200), (8192, 264), (8192, 82))
        ]
    return [PackedRow(256, 2, 16, 100, device)]


def main(device: str, rounds: int = ROUNDS) -> list[dict]:
    """The results of every row, with its shape; printed row by row, as JSON."""
    found = []
    for row in rows_of(device):
        print(
            f"attention: 1 x {row.heads} heads x {row.length} x {row.head_dim}, documents of {row.document}", flush=True
        )
        found.append({"length": row.length, "heads": row.heads, "head_dim": row.head_dim, "document": row.document})
        found[-1]["kernels"] = compare(row, rounds)
        print(json.dumps(found[-1]), flush=True)
    return found


if __name__ == "__main__":
    main("cuda" if torch.cuda.is_available() else "cpu")
