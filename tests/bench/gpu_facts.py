"""What a machine with a GPU is, as JSON: versions, memory, and the rates of its copies and products. Printed anew after
each part, so that what ends in the middle has said what it knew.

    python tests/bench/gpu_facts.py            # some ten seconds
    python tests/bench/gpu_facts.py --check    # one line and exit code 2 where there is no GPU to measure on
"""

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

PACKAGES = ("transformers", "accelerate", "datasets", "peft", "triton", "numpy", "pydantic")
FREE = 0.9  # of a card's memory, without which its figures are those of a neighbour too


def check() -> str:
    """The reason why nothing can be measured here; empty: it can."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    if not there:
        why = str(said[0].message).splitlines()[0] if said else "torch sees no CUDA device"
        return f"no GPU to measure on: {why}"
    free, total = torch.cuda.mem_get_info(0)
    if free < FREE * total:
        return f"GPU 0 has {free / 1e9:.1f} GB of its {total / 1e9:.1f} free: another program holds the rest"
    return ""


def seconds_of(work: Callable[[], object], rounds: int) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / rounds


def main() -> None:
    facts: dict = {"torch": torch.__version__, "python": platform.python_version(), "kernel": platform.release()}
    for name in PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "absent"
    facts["cores"] = len(os.sched_getaffinity(0))
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(("MemTotal", "MemAvailable")):
            facts[line.split(":")[0] + "_bytes"] = int(line.split()[1]) * 1024
    facts["disk_free_bytes"] = shutil.disk_usage("/tmp").free
    print(json.dumps(facts), flush=True)
    if not torch.cuda.is_available():
        return
    card = torch.cuda.get_device_properties(0)
    facts |= {"gpu": card.name, "memory_bytes": card.total_memory, "cudnn": torch.backends.cudnn.version()}
    facts |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "cuda": torch.version.cuda}
    with_driver = Path("/proc/driver/nvidia/version")
    if with_driver.is_file():
        facts["driver"] = with_driver.read_text().splitlines()[0]
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    copy = partial(torch.empty_like(source).copy_, source)
    facts["copy_bytes_per_second"] = 2 * source.nbytes / seconds_of(copy, 10)
    del source, copy
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    facts["product_flops"] = 2 * 8192**3 / seconds_of(partial(torch.mm, left, right), 10)
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    device = host.cuda()
    for way, into, out_of in (("to_device", device, host), ("to_host", host, device)):
        move = partial(into.copy_, out_of, non_blocking=True)
        facts[f"{way}_bytes_per_second"] = host.nbytes / seconds_of(move, 3)
    print(json.dumps(facts), flush=True)
    from torch import distributed as dist

    began = time.perf_counter()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    facts["nccl_of_one_seconds"] = time.perf_counter() - began
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if why := check():
            print(why, file=sys.stderr)
            sys.exit(2)
    else:
        main()
