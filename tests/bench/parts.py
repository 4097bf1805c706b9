"""Parts of a step, as they are and as they were, in turn in one process: seconds, medians and ratios.

python tests/bench/parts.py       # writes docs/benchmarks/parts.json, which log.md tells of
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import get_total_norm

from shardbook.model.loss_head import LossHead
from shardbook.optim.clip import gradient_norm
from shardbook.parallel.library import shard_model

OUT = Path(__file__).parents[2] / "docs" / "benchmarks" / "parts.json"
ROUNDS = 9
TOKENS, WIDTH, VOCABULARY = 512, 576, 49_152  # of a micro-batch of SmolLM2


def in_turn(forms, rounds=ROUNDS):
    """Seconds of each form, round by round, after one round that does not count."""
    seconds = {name: [] for name in forms}
    for round_ in range(rounds + 1):
        for name, work in sorted(forms.items(), reverse=bool(round_ % 2)):
            began = time.perf_counter()
            work()
            if round_:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def loss_head():
    head = LossHead(WIDTH, VOCABULARY, bias=False)
    hidden, targets = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randint(0, VOCABULARY, (TOKENS,))

    def run(summed, chunk):
        head.chunk_tokens, head.weight.grad = chunk, None
        (head(hidden, targets, summed).sum() / TOKENS).backward()

    return {
        "gradients in forward": lambda: run(True, 1024),
        "cross_entropy": lambda: run(False, 1024),
        "gradients in forward, 4 chunks": lambda: run(True, 128),
        "recomputed, 4 chunks": lambda: run(False, 128),
    }


def norm():
    gradients = [torch.randn(VOCABULARY, WIDTH), *(torch.randn(WIDTH, 1536) for _ in range(60))]

    def copied():
        return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) ** 2 for g in gradients]).sum().sqrt()

    return {
        "by rows": lambda: gradient_norm(gradients),
        "fp64 copies": copied,
        "torch's own, fp32": lambda: get_total_norm(gradients),
    }


def blocks():
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 1536), nn.SiLU(), nn.Linear(1536, WIDTH)) for _ in range(8)))


def world_of_one():
    """A step of eight blocks: plain, ours under zero3, and fully_shard on a mesh of one."""
    plain, ours, bare = blocks(), blocks(), blocks()
    sharded = shard_model(ours, blocks=list(ours), stage="zero3")
    mesh = init_device_mesh("cpu", (1,))
    for block in (*bare, bare):
        fully_shard(block, mesh=mesh)
    rows = torch.randn(TOKENS, WIDTH)

    def step(model):
        model(rows).square().mean().backward()
        model.zero_grad()

    def step_ours():
        with sharded.micro_batch(is_last=True):
            step(ours)

    return {"plain": lambda: step(plain), "zero3": step_ours, "fully_shard": lambda: step(bare)}


def main() -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=OUT.parent, capture_output=True, text=True).stdout.strip()
    data = {"commit": commit, "torch": torch.__version__, "threads": torch.get_num_threads(), "cores": os.cpu_count()}
    data["parts"] = {}
    for name, make in {"loss head": loss_head, "gradient norm": norm, "world of one": world_of_one}.items():
        seconds = in_turn(make())
        first, *others = seconds
        ratios = {
            f"{other} / {first}": statistics.median(b / a for a, b in zip(seconds[first], seconds[other], strict=True))
            for other in others
        }
        data["parts"][name] = {"seconds": seconds, "ratios": ratios}
        for form, found in seconds.items():
            print(f"{name:14} {form:32} {statistics.median(found) * 1e3:8.1f} ms", flush=True)
        print(*(f"{pair}: {ratio:.2f}" for pair, ratio in ratios.items()), sep="\n")
    OUT.write_text(json.dumps(data, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
