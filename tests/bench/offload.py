"""Offload, part by part, each as a ratio inside one run: AdamW in pieces against whole, our reads and writes against
fio's, the pipeline of the disk against its slower half, and the share of the host's step that a forward hides.

python tests/bench/offload.py [--folder DIRECTORY ON A DISK] [--rounds 5]

Writes docs/benchmarks/host.json. Without fio its rows are absent.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from parts import in_turn
from torch.optim.adamw import adamw
from transformers import AutoConfig

from shardbook.data.loader import MicroBatch
from shardbook.memory.direct_io import DirectFile, page_buffer
from shardbook.memory.host_adamw import BUCKET_BYTES
from shardbook.memory.tiers import RING
from shardbook.model.causal_lm import build_model
from shardbook.model.weights import init_weights
from shardbook.objectives.sft import sft_loss
from shardbook.optim.clip import clip_gradients
from shardbook.optim.elementwise import step_adamw
from shardbook.parallel.layout import build_layout
from shardbook.parallel.mesh import build_mesh
from shardbook.parallel.sharding import apply_stage
from shardbook.recipe import parse_recipe, resolve_precision
from shardbook.run.build import allocate_state

ROOT = Path(__file__).parents[2]
PARAMETERS = 32 * 2**20
BUCKET = BUCKET_BYTES // 12  # elements of masters and both moments
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def seconds(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def bench_adamw(rounds: int) -> dict:
    """Million parameters a second of one thread: whole tensors, and pieces of a bucket."""
    torch.set_num_threads(1)
    master, gradient, first, second = (torch.rand(PARAMETERS) for _ in range(4))

    def whole():
        betas = {"beta1": 0.9, "beta2": 0.999, "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}
        same = {"amsgrad": False, "maximize": False, "fused": True}
        adamw([master], [gradient], [first], [second], [], [torch.tensor(3.0)], **betas, **same)

    def pieces():
        for begin in range(0, PARAMETERS, BUCKET):
            cut = slice(begin, begin + BUCKET)
            step_adamw([[flat[cut]] for flat in (master, first, second, gradient)], [torch.tensor(3.0)], **SETTINGS)

    taken = in_turn({"whole": whole, "pieces": pieces}, rounds)
    return {name: [PARAMETERS / one / 1e6 for one in values] for name, values in taken.items()}


def bench_disk(folder: Path, rounds: int) -> dict:
    """GB/s of 1 GiB: ours, and fio's best of psync (4 jobs) and libaio (queue of 16)."""
    size = 2**30
    file, buffer = DirectFile(folder, size), page_buffer(64 * 2**20)
    buffer.random_(255)

    def ours(call):
        for offset in range(0, size, len(buffer)):
            call(buffer, offset)

    works = {"write": lambda: ours(file.write), "read": lambda: ours(file.read)}
    found = {name: [] for name in works}
    fio = {name: [] for name in works} if shutil.which("fio") else {}
    for number in range(rounds + 1):
        for name, work in works.items():
            rate = size / seconds(work) / 1e9
            best = max(fio_rate(folder, name, size, engine) for engine in ("psync", "libaio")) if fio else 0.0
            if number:
                found[name].append(rate)
                if fio:
                    fio[name].append(best)
    return {"ours": found, "fio": fio}


def fio_rate(folder: Path, what: str, size: int, engine: str) -> float:
    jobs = ["--numjobs=4", f"--size={size // 4}"] if engine == "psync" else ["--iodepth=16", f"--size={size}"]
    words = [f"--rw={what}", f"--ioengine={engine}", "--direct=1", "--bs=4M", "--group_reporting", *jobs]
    words += ["--name=bench", f"--directory={folder}", "--output-format=json", "--unlink=1"]
    said = subprocess.run(["fio", *words], capture_output=True, text=True, check=True).stdout
    return json.loads(said[said.index("{") :])["jobs"][0][what]["bw_bytes"] / 1e9


def bench_pipeline(folder: Path, rounds: int) -> dict:
    """Seconds of AdamW through a file: in a ring, against its transfers and its arithmetic alone."""
    parts, size = PARAMETERS // BUCKET, 3 * BUCKET * 4
    file = DirectFile(folder, parts * size)
    slots, gradient = [page_buffer(size) for _ in range(RING)], torch.rand(BUCKET)
    reader, writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def step(slot):
        flats = list(slot.view(torch.float32).split(BUCKET))
        step_adamw([[flat] for flat in (*flats, gradient)], [torch.tensor(3.0)], **SETTINGS)

    def transfers():
        reads = reader.submit(lambda: [file.read(slots[0], n * size) for n in range(parts)])
        writes = writer.submit(lambda: [file.write(slots[1], n * size) for n in range(parts)])
        reads.result(), writes.result()

    def ring():
        written = []

        def read(number):
            if number >= RING:
                written[number - RING].result()
            file.read(slots[number % RING], number * size)

        reads = {number: reader.submit(read, number) for number in range(RING - 1)}
        for number in range(parts):
            reads.pop(number).result()
            step(slots[number % RING])
            written.append(writer.submit(file.write, slots[number % RING], number * size))
            if (later := number + RING - 1) < parts:
                reads[later] = reader.submit(read, later)
        for future in written:
            future.result()

    def alone():
        for _ in range(parts):
            step(slots[0])

    return in_turn({"transfers": transfers, "adamw": alone, "ring": ring}, rounds)


def bench_hidden(rounds: int) -> dict:
    """The share of the host's steps that a forward hides: a real model of 12 blocks under zero3 with state on the host,
    clipping on; sleeps stand for computing (0.06 s a block) and for a unit's AdamW (0.05 s)."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **sizes, num_hidden_layers=12, vocab_size=512, tie_word_embeddings=True)
    words = ["train.steps=9", "offload.optimizer=cpu", "offload.params=cpu", "data.max_length=32"]
    recipe = resolve_precision(parse_recipe("[train]\n", "bench", words), "cpu")
    model = build_model(config, recipe.at_rest)
    own = (recipe.parallel, recipe.precision, model, model.parts, model.blocks)
    sharded = apply_stage(model, layout := build_layout(*own, 1, 1, recipe.offload), build_mesh(layout.sizes, "cpu"))
    optimizer = allocate_state(model, sharded, recipe.optim, torch.device("cpu"))
    init_weights(sharded.masters, 0)
    sharded.upload_shards()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: time.sleep(0.06))
    real = optimizer._step

    def step(*work):
        time.sleep(0.05)
        real(*work)

    optimizer._step = step
    ids = torch.randint(512, (1, 32))
    place = torch.arange(31)
    told = torch.tensor([0, 32], dtype=torch.int32)
    micro = MicroBatch(ids, torch.arange(32)[None], told, place, ids[0, 1:], packed=False, max_seqlen=32, pairs=0)
    found = {"hidden": [], "wait": [], "step": []}
    stepped = 0.05 * sum(bool(unit.shapes) for unit in layout.units)
    for number in range(rounds + 2):
        sharded.offloaded.waited = 0.0
        sharded.begin_step()
        with sharded.micro_batch(is_last=True):
            sft_loss(model, micro).backward()  # its forward waits for what the step before began
        waited = sharded.offloaded.waited
        if number > 1:
            for name, value in (("hidden", 1 - waited / stepped), ("wait", waited), ("step", stepped)):
                found[name].append(value)
        clip_gradients(sharded.gradients, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    torch.distributed.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=ROOT)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        data = {
            "torch": torch.__version__,
            "commit": commit.strip(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "adamw": bench_adamw(asked.rounds),
            "disk": bench_disk(Path(folder), asked.rounds),
            "pipeline": bench_pipeline(Path(folder), asked.rounds),
            "hidden": bench_hidden(asked.rounds),
        }
    (ROOT / "docs" / "benchmarks" / "host.json").write_text(json.dumps(data, indent=1) + "\n")
    for name, part in data.items():
        print(name, part if not isinstance(part, dict) else {key: summary(value) for key, value in part.items()})


def summary(value):
    if isinstance(value, dict):
        return {key: summary(inner) for key, inner in value.items()}
    return round(statistics.median(value), 3)


if __name__ == "__main__":
    main()
