"""Speed and memory of the training loop on this machine's GPUs: 20 steps of the default recipe and of a Llama-3.2-1B
shape with random weights, unchanged but for the keys below. Writes docs/benchmarks/<device>.json: every metrics row,
the medians after warm-up, torch version and commit; and how fast blocks are quantised (quantisation.py).

    make bench-gpu
    python tests/bench/gpu.py --any-device --steps 2 --cases smollm2-135m-fsdp     # only to see that it runs
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from quantisation import bandwidths, qwz_seconds_of_a_step

ROOT = Path(__file__).parents[2]
WARMUP_STEPS = 5  # compilation, allocator growth
CASES = {
    "smollm2-135m-fsdp": ["train.compile=true"],
    "llama-3.2-1b-shape": [
        f"model.path={ROOT}/tests/bench/shapes/llama-3.2-1b",
        "model.tokenizer=smollm2-135m",  # its 49,152 ids are within the shape's vocabulary
        "model.init=random",
        "data.max_length=4096",
        "train.per_device_train_batch_size=4",
        "train.compile=true",
    ],
}
MEDIANS = ("perf/step_seconds", "perf/tokens_per_second_per_device", "perf/mfu", "memory/peak_bytes")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--any-device", action="store_true")
    asked = parser.parse_args()
    if not torch.cuda.is_available() and not asked.any_device:
        print("bench-gpu needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    found = {
        "quantisation": {"torch": torch.__version__, "rows": bandwidths(kind)},
    }
    with tempfile.TemporaryDirectory() as runs:
        for name in asked.cases:
            common = [
                f"run.dir={runs}",
                f"run.name={name}",
                "run.report_to=none",
                "train.export=false",
                "data.eval_size=0",
            ]
            words = ["smollm2-135m-fsdp", f"train.steps={asked.steps}", *common, *CASES[name]]
            subprocess.run([sys.executable, "-m", "shardbook.cli", "train", *words], cwd=ROOT, check=True)
            rows = [json.loads(line) for line in (Path(runs) / name / "metrics.jsonl").read_text().splitlines()]
            steady = rows[min(WARMUP_STEPS, len(rows) - 1) :]
            medians = {key: statistics.median(row[key] for row in steady) for key in MEDIANS if key in steady[0]}
            facts = json.loads((Path(runs) / name / "run.json").read_text())
            if name == "llama-3.2-1b-shape":  # 16 blocks; the tied embedding and the last norm
                seconds = qwz_seconds_of_a_step(kind, [60_821_504] * 16 + [128_256 * 2048 + 2048])
                medians["qwz_share_of_step"] = seconds / medians["perf/step_seconds"]
            found[name] = {"overrides": words[1:], "environment": facts, "medians": medians, "steps": rows}
            print(f"{name}: {medians}", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    out = ROOT / "docs" / "benchmarks" / (re.sub(r"\W+", "-", device.lower()) + ".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1).replace(runs, "RUNS").replace(f"{ROOT}/", "") + "\n")
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
