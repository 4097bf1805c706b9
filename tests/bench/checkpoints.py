"""Saving and loading a checkpoint beside a plain write and read of as many bytes, and beside DCP's own files, in turn.

    PYTHONPATH=src:tests/support .venv/bin/python tests/bench/checkpoints.py

One process: SmolLM2's tensors, with two moments and a step count each, at a width that fits a small machine. Each round
does all in turn on the same disk, each write just after as many pages were freed; of each the best round counts, and
only ratios within one run are compared. What a "cold" read takes is measured after the kernel was told to drop the
files. Kept in docs/benchmarks/checkpoints.json.
"""

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, state_dict_loader, state_dict_saver

from shardbook.boxes import assign_writes
from shardbook.run.checkpoint.async_save import AsyncSave, Items, StagedItems
from shardbook.run.checkpoint.format import begin, publish, read_stored
from shardbook.run.checkpoint.load import ItemReader
from shardbook.run.checkpoint.save import nbytes_of, to_item, write_finite

KEPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "checkpoints.json"
STEP_SECONDS = 0.3  # of a step's forward and backward
LAYERS, VOCABULARY = 30, 49152


def tensors_of(hidden: int) -> dict[str, torch.Tensor]:
    inner, heads = hidden * 8 // 3, hidden // 3
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCABULARY, hidden), "norm.weight": (hidden,)}
    for layer in range(LAYERS):
        block = {"q_proj": (hidden, hidden), "k_proj": (heads, hidden), "v_proj": (heads, hidden)}
        block |= {"o_proj": (hidden, hidden), "gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
        block |= {"down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    torch.manual_seed(0)
    found = {f"model.{name}": torch.randn(shape) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        found |= {f"optimizer.state.{name}.{moment}": torch.rand(shape) for moment in ("exp_avg", "exp_avg_sq")}
        found[f"optimizer.state.{name}.step"] = torch.zeros(())
    return found


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    work()
    took, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return took, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def write_plain(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    with (folder / "plain").open("wb", buffering=0) as file:
        for tensor in tensors.values():
            file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        os.fsync(file.fileno())


def free_pages(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Has the kernel free as many pages as a write takes: whoever writes first would pay for pages that the machine's
    host takes back meanwhile (a virtual machine's fresh page costs several times a used one's)."""
    write_plain(folder, tensors)
    (folder / "plain").unlink()


def read_plain(folder: Path, into: bytearray) -> None:
    with (folder / "plain").open("rb", buffering=0) as file:
        while file.readinto(into):
            pass


def list_items(tensors: dict[str, torch.Tensor]) -> Items:
    held = [(name, tensor, nbytes_of(tensor)) for name, tensor in tensors.items()]
    names, _ = assign_writes(held, [{"dp_replicate": 1, "dp_shard": 1}], 0)
    return [to_item(name, tensor) for name, tensor in tensors.items() if name in names]


def save_ours(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    items, side = list_items(tensors), begin(folder / "ours", 1, 1)
    publish(side, 1, {"step": 1}, write_finite(folder, side, 0, items), 0, lambda: None)


def stall_of(folder: Path, tensors: dict[str, torch.Tensor], async_save: AsyncSave) -> float:
    """The seconds for which a step waits for a save in a thread: to list its items, and, once STEP_SECONDS of a next
    step's forward and backward have gone by, for the rest of the copy."""
    began = time.perf_counter()
    items, side = list_items(tensors), begin(folder / "behind", 1, 1)
    later = partial(publish, side, 1, {"step": 1}, keep=0, check_held=lambda: None)
    async_save.begin(1, StagedItems(items, partial(write_finite, folder, side, 0)), side, later)
    waited, left, right = time.perf_counter() - began, *torch.rand(2, 256, 256)
    while time.perf_counter() - began < waited + STEP_SECONDS:
        left @ right
    began = time.perf_counter()
    async_save.wait_copied()
    waited += time.perf_counter() - began
    async_save.finish()
    return waited


def load_ours(folder: Path, into: dict[str, torch.Tensor]) -> None:
    path = folder / "ours" / "step-000001"
    ItemReader(path, read_stored(path).items).read(into)


def save_dcp(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    state_dict_saver.save(tensors, storage_writer=FileSystemWriter(folder / "dcp"), no_dist=True)


def load_dcp(folder: Path, into: dict[str, torch.Tensor]) -> None:
    state_dict_loader.load(into, checkpoint_id=folder / "dcp", no_dist=True)


def forget(folder: Path) -> None:
    """Has the kernel drop the files of a folder from its page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measure(place: Path, hidden: int, rounds: int) -> dict:
    tensors = tensors_of(hidden)
    into, buffer = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}, bytearray(4 << 20)
    size = sum(tensor.nbytes for tensor in tensors.values())
    works: dict[str, Callable[[Path], None]] = {
        "plain write": lambda folder: write_plain(folder, tensors),
        "save": lambda folder: save_ours(folder, tensors),
        "save, DCP": lambda folder: save_dcp(folder, tensors),
        "plain read": lambda folder: read_plain(folder, buffer),
        "load": lambda folder: load_ours(folder, into),
        "load, DCP": lambda folder: load_dcp(folder, into),
        "plain read, cold": lambda folder: read_plain(folder, buffer),
        "load, cold": lambda folder: load_ours(folder, into),
        "load, DCP, cold": lambda folder: load_dcp(folder, into),
    }
    best: dict[str, list[float]] = {name: [float("inf"), float("inf")] for name in works}
    async_save, stalls = AsyncSave(size + 64 * len(tensors)), list[float]()
    while not async_save.buffer:  # it is made beside the first steps of a run
        time.sleep(0.1)
    for _ in range(rounds):
        folder = Path(tempfile.mkdtemp(dir=place))
        stalls.append(stall_of(folder, tensors, async_save))
        for name, work in works.items():
            if name.endswith("cold"):
                forget(folder)
            elif name.partition(",")[0] in ("plain write", "save"):
                (folder / "freed").mkdir(exist_ok=True)
                free_pages(folder / "freed", tensors)
            took = seconds_of(partial(work, folder))
            best[name] = [min(old, new) for old, new in zip(best[name], took, strict=True)]
        assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())
        shutil.rmtree(folder)
    stall = {"first": stalls[0], "later": min(stalls[1:])}
    return {"bytes": size, "tensors": len(tensors), "seconds": best, "stall_seconds": stall}


def ratios_of(found: dict) -> dict[str, float]:
    """How fast we are as a multiple of another, by wall seconds."""
    wall = {name: took for name, (took, _) in found["seconds"].items()}
    pairs = {
        "save / plain write": ("plain write", "save"),
        "save / DCP's": ("save, DCP", "save"),
        "load / plain read, cold": ("plain read, cold", "load, cold"),
        "load / plain read, page cache": ("plain read", "load"),
        "load / DCP's, page cache": ("load, DCP", "load"),
        "load / DCP's, cold": ("load, DCP, cold", "load, cold"),
    }
    ratios = {name: round(wall[other] / wall[ours], 2) for name, (other, ours) in pairs.items()}
    return ratios | {"stall / save": round(found["stall_seconds"]["later"] / wall["save"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=288, help="width; 288: 0.4 GB, 576: SmolLM2's own 1.6 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--place", type=Path, default=KEPT.parents[2] / "runs", help="folder on the disk to measure")
    parser.add_argument("--out", type=Path, default=KEPT)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    asked.place.mkdir(parents=True, exist_ok=True)
    found = measure(asked.place, asked.hidden, asked.rounds)
    found |= {"ratios": ratios_of(found), "torch": torch.__version__, "cores": os.cpu_count()}
    found["load_average"] = round(os.getloadavg()[0], 1)
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, (wall, cpu) in found["seconds"].items():
        print(f"{name:20} {wall:7.2f} s, {cpu:6.2f} s of CPU, {found['bytes'] / wall / 1e9:6.2f} GB/s")
    print(*(f"stall, {which:13} {wall:7.3f} s" for which, wall in found["stall_seconds"].items()), sep="\n")
    print(*(f"{name:32} {ratio:6.2f}" for name, ratio in found["ratios"].items()), sep="\n")


if __name__ == "__main__":
    main()
