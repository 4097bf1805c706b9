"""What the loop takes for itself: the time of a step outside of model, optimizer and collectives, by torch's profiler.

`shardbook.train` runs whole, its own profile on; the calls of the model (objective, backward), of clipping and of the
optimizer are marked from outside. What is left of the time from one optimizer step to the next is the loop's: taking
micro-batches and their counts, metrics, the ledger, the console. Writes docs/benchmarks/loop.json.

    python tests/bench/loop_share.py       # some three minutes on two cores, nothing else running
"""

import dataclasses
import gzip
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import record_function

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "benchmarks" / "loop.json"
FIRST, LAST = 3, 8
RANKS = 2
RECIPE = "smollm2-135m-fsdp"
STAGES = ["ddp", "zero3"]


def marked(name, work):
    def run(*words, **named):
        with record_function(name):
            return work(*words, **named)

    return run


def rank(words: list[str]) -> int:
    """One rank of a run, with the marks."""
    sys.path.append(str(ROOT / "tests" / "support"))
    from planted import replace

    from shardbook.optim.clip import clip_gradients
    from shardbook.run import prepare
    from shardbook.train import main

    objective = prepare.build_objective("sft", None)
    objective = dataclasses.replace(objective, terms=marked("model", objective.terms))
    prepare.build_objective = lambda *given: objective
    torch.Tensor.backward = marked("model", torch.Tensor.backward)
    replace(clip_gradients, marked("clip", clip_gradients))
    torch.optim.AdamW.step = marked("optimizer", torch.optim.AdamW.step)
    return main(words)


def measure(stage: str, folder: Path) -> dict:
    from shardbook.ranks.launch import free_port

    words = [RECIPE, f"parallel.stage={stage}", f"run.dir={folder}", f"run.name={stage}", "run.report_to=none"]
    words += [f"train.steps={LAST + 1}", f"train.profile_steps=[{FIRST}, {LAST}]", "train.export=false"]
    words += ["data.eval_size=0", "generate.steps=0", "train.per_device_train_batch_size=4", "train.logging_steps=1"]
    shared = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // RANKS))}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", *words],
            env=os.environ | shared | {"RANK": str(number), "LOCAL_RANK": str(number)},
        )
        for number in range(RANKS)
    ]
    if codes := [code for process in ranks if (code := process.wait())]:
        raise SystemExit(f"{stage}: a rank ended with {codes[0]}")
    with gzip.open(folder / stage / "profile" / "rank-0.json.gz") as file:
        return read(json.load(file)["traceEvents"])


def read(events: list[dict]) -> dict:
    """Seconds of the marked parts and of the rest, a step each: one ends where its optimizer step ends."""
    kinds = ("model", "clip", "optimizer")
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] in kinds
    )
    ends = [end for _, end, name in spans if name == "optimizer"]
    steps = []
    for begin, end in itertools.pairwise(ends):
        parts = dict.fromkeys(kinds, 0.0)
        for start, stop, name in spans:
            if begin <= start and stop <= end:
                parts[name] += (stop - start) / 1e6
        whole = (end - begin) / 1e6
        steps.append({"step": whole} | parts | {"loop": whole - sum(parts.values())})
    share = statistics.median(step["loop"] / step["step"] for step in steps)
    return {"seconds": steps, "loop_share": share}


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="loop-"))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    try:
        stages = {stage: measure(stage, folder) for stage in STAGES}
    finally:
        shutil.rmtree(folder)
    data = {"commit": commit, "torch": torch.__version__, "ranks": RANKS, "cores": os.cpu_count(), "stages": stages}
    OUT.write_text(json.dumps(data, indent=1) + "\n")
    for stage, found in stages.items():
        print(f"{stage:6} the loop's own share {found['loop_share']:.4f}")
        for step in found["seconds"]:
            print("      ", *(f"{name} {seconds:.3f}" for name, seconds in step.items()))
    return 0


if __name__ == "__main__":
    sys.exit(rank(sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main())
