"""What loading, saving and exporting Llama-3.1-70B costs beside the bytes, counted on this machine for 64 ranks.

No 70B is made: weights files are sparse, ranks are torch's fake process group, tensors lie on the meta device. What is
counted is exact; CPU seconds are this machine's. Prints the table of docs/benchmarks/loading.md.

    PYTHONPATH=src:tests/support python tests/bench/loading.py        # some minutes, 4 GB of memory
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from shardbook.axes import DP_REPLICATE, DP_SHARD
from shardbook.boxes import assign_writes
from shardbook.model.causal_lm import build_model
from shardbook.model.hub import INDEX
from shardbook.model.weight_files import open_tensors
from shardbook.model.weights import full_tensors, local_rows
from shardbook.run.checkpoint.save import nbytes_of, to_item

SHAPE = {  # Llama-3.1-70B
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
FILES = 30  # as the hub has it


class Cpu:
    """CPU seconds of this process while the context lasts."""

    def __enter__(self) -> "Cpu":
        self.began = time.process_time()
        return self

    def __exit__(self, *error) -> None:
        self.seconds = time.process_time() - self.began


class Sharded(torch.nn.Module):
    """The model's parameters as one rank of a fake world holds them, by their names."""

    def __init__(self, shapes: dict[str, torch.Size], mesh):
        super().__init__()
        self.tensors = {name: shard(shape, mesh) for name, shape in shapes.items()}

    def named_parameters(self, *anything, **named):
        return iter(self.tensors.items())


def shard(shape: torch.Size, mesh) -> DTensor:
    each = -(-shape[0] // mesh.size())
    rows = max(0, min(each, shape[0] - each * mesh.get_local_rank()))
    local = torch.empty(rows, *shape[1:], device="meta")
    stride = (shape[1:].numel(), 1)[-len(shape) :]
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def fake_ranks(world: int) -> Iterator:
    """The mesh of each rank in turn."""
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world)
        yield init_device_mesh("cpu", (world,), mesh_dim_names=(DP_SHARD,))
        dist.destroy_process_group()


def state_of(shapes: dict[str, torch.Size], mesh) -> dict[str, torch.Tensor]:
    """What a save has in hand: parameters and the state of AdamW, by their names."""
    tensors: dict[str, torch.Tensor] = {f"model.{name}": shard(shape, mesh) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        tensors[f"optimizer.state.{name}.step"] = torch.zeros(())
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.state.{name}.{moment}"] = shard(shape, mesh)
    return tensors


def count_loading(shapes: dict[str, torch.Size], world: int) -> None:
    names, files = list(shapes), min(FILES, len(shapes))
    with tempfile.TemporaryDirectory() as folder:
        weight_map, paths = {}, []
        for number in range(files):
            path, header, end = Path(folder) / f"model-{number:05d}.safetensors", {}, 0
            for name in names[number * len(names) // files : (number + 1) * len(names) // files]:
                size = 2 * shapes[name].numel()
                header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [end, end + size]}
                weight_map[name], end = path.name, end + size
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            path.write_bytes(len(text).to_bytes(8, "little") + text)
            with path.open("r+b") as file:
                file.truncate(8 + len(text) + end)  # sparse: no disk is used
            paths.append(path)
        (Path(folder) / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with Cpu() as ours, open_tensors(Path(folder)) as stored:
            opens = len({each.file.fileno() for each in stored.values()})
        with Cpu() as before:
            calls = 0
            for path in [*paths, *(Path(folder) / weight_map[name] for name in names for _ in range(2))]:
                with safe_open(path, "pt") as file:
                    file.keys()
                calls += 1
        read = []
        for mesh in fake_ranks(world):
            rows = [(local_rows(p)[1], p) for _, p in Sharded(shapes, mesh).named_parameters()]
            read.append(sum((part.stop - part.start) * p.shape[1:].numel() * 2 for part, p in rows))
    whole = sum(2 * shape.numel() for shape in shapes.values())
    assert sum(read) == whole, "ranks read a row twice, or not at all"
    print(f"| opens of weights files, a rank | {2 * calls:,} | {opens:,} |")  # safe_open opens twice (strace)
    print(f"| opens of weights files, {world} ranks | {2 * calls * world:,} | {opens * world:,} |")
    print(f"| bytes of files read by all ranks, GB | {whole / 1e9:.1f} | {sum(read) / 1e9:.1f} |")
    print(f"| CPU seconds of a rank in opening and checking | {before.seconds:.2f} | {ours.seconds:.2f} |")


def count_items(shapes: dict[str, torch.Size], world: int) -> None:
    """What each rank does at each save, beside reading and writing bytes: it lists its items."""
    items, seconds = list[int](), list[float]()
    for number, mesh in enumerate(fake_ranks(world)):
        tensors = state_of(shapes, mesh)
        with Cpu() as cpu:
            held = [(name, tensor, nbytes_of(tensor)) for name, tensor in tensors.items()]
            names, _ = assign_writes(held, [{DP_REPLICATE: 1, DP_SHARD: world}], number)
            items.append(len([to_item(name, tensor) for name, tensor in tensors.items() if name in names]))
        seconds.append(cpu.seconds)
    print(f"| {world} | {len(tensors):,} | {max(items):,} | {sum(seconds) / world:.2f} |", flush=True)


def count_export(shapes: dict[str, torch.Size], world: int) -> None:
    class Gathers(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, positional=(), named=None):
            out = function(*positional, **(named or {}))
            if "all_gather" in str(function):
                gathered.append(out.numel() * out.element_size())
            return out

    found = []
    for dtype in ("fp32", "bf16"):
        for mesh in fake_ranks(world):
            gathered: list[int] = []
            with Gathers():
                for _ in full_tensors(Sharded(shapes, mesh), dtype):
                    pass
            found.append((sum(gathered), max(gathered)))
            dist.destroy_process_group()
            break
    (before, most_before), (ours, most) = found
    print(f"| bytes gathered by a bf16 export, GB | {before / 1e9:.1f} | {ours / 1e9:.1f} |")
    print(f"| largest tensor gathered, GB | {most_before / 1e9:.2f} | {most / 1e9:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--items", action="store_true", help="count the items of checkpoints alone")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    config = AutoConfig.for_model("llama", **(SHAPE | {"num_hidden_layers": asked.layers}))
    shapes = {name: p.shape for name, p in build_model(config, "fp32").named_parameters()}
    print(f"{len(shapes)} tensors, {sum(map(torch.Size.numel, shapes.values())) / 1e9:.1f} G parameters\n")
    if not asked.items:
        print("| | before | now |\n|---|---|---|")
        count_loading(shapes, asked.world)
        count_export(shapes, asked.world)
    print("\n| ranks | tensors | items that a rank writes | CPU s, a rank |\n" + "|---" * 4 + "|")
    count_items(shapes, asked.world)
    print(f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB")


if __name__ == "__main__":
    main()
