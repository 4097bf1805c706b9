"""Does it learn as well? SmolLM2-135M on ChitChat under zero3 and under each switch of ZeRO++, or with each optimizer,
the same data in each.

Every rank count trains on the same rows in the same order. Ranks are started as two nodes, so that qgZ's gradients
cross between nodes in 4 bits. A variant that was stopped goes on where its last checkpoint is; one that has finished is
not run again. Writes docs/benchmarks/convergence.json or optimizers.json.

    make bench-convergence                         # hours on two cores
    make bench-optimizers
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from link import wait_for

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "benchmarks"
RECIPE = ROOT / "recipes" / "smollm2-135m-fsdp.toml"
ROWS = 4  # of 128 tokens in a step, over all ranks
ZEROPP = "parallel.stage=zeropp"
QWZ, HPZ = "parallel.quantize_weights=8", "parallel.secondary_shard=node"
QGZ = "parallel.quantize_gradients=[8,4]"
OURS = "optim.name=adamw_bf16"
STUDIES = {  # variants: ranks of a node, and keys; the first is what the others are held to
    "convergence": {  # hpZ needs two ranks in a node to differ from zero3
        "zero3": (1, []),
        "qwZ, 8 bits": (1, [ZEROPP, QWZ]),
        "qwZ, 4 bits": (1, [ZEROPP, "parallel.quantize_weights=4"]),
        "qgZ": (1, [ZEROPP, QGZ]),
        "hpZ": (2, [ZEROPP, HPZ]),
        "all": (2, [ZEROPP, QWZ, QGZ, HPZ]),
    },
    "optimizers": {
        "adamw": (1, []),
        "adamw_bf16": (1, [OURS]),
        "adamw_8bit": (1, ["optim.name=adamw_8bit"]),
        "adamw_bf16, weights in bf16": (1, [OURS, "precision.master=bf16"]),
    },
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", choices=STUDIES, default="convergence")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--variants", nargs="*", help="those of the study to run; without: all")
    parser.add_argument("--out", type=Path, help="docs/benchmarks/<study>.json")
    asked = parser.parse_args()
    variants, out = STUDIES[asked.of], asked.out or DATA / f"{asked.of}.json"
    if unknown := set(asked.variants or []) - set(variants):
        parser.error(f"--variants: {asked.of} has {', '.join(variants)}; not {', '.join(unknown)}")
    rows = json.loads(out.read_text())["variants"] if out.is_file() else {}
    for name in asked.variants or variants:
        per_node, keys = variants[name]
        print(f"{name}: 2 nodes of {per_node}, {' '.join(keys) or 'no switch'}", flush=True)
        run = ROOT / "runs" / f"{asked.of}-{asked.steps}-{name.replace(', ', '-').replace(' ', '-')}"
        if not finished(run, asked.steps):
            nodes = [subprocess.Popen(launch(node, run, per_node, keys, asked.steps), cwd=ROOT) for node in (0, 1)]
            if code := wait_for(nodes):
                print(f"bench-convergence: {name} ended with exit code {code}", file=sys.stderr)
                return code
        rows[name] = read(run, per_node, keys)
        print(f"{name}: held-out loss {rows[name]['eval'][0]:.4f} -> {rows[name]['eval'][-1]:.4f}", flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        whole = {"steps": asked.steps, "rows_of_128": ROWS, "cores": os.cpu_count()}
        in_order = {"variants": {name: rows[name] for name in variants if name in rows}}
        out.write_text(json.dumps(whole | in_order, indent=1) + "\n")
    print(out)
    return 0


def launch(node: int, run: Path, per_node: int, keys: list[str], steps: int) -> list[str]:
    return [
        *("env", "OMP_NUM_THREADS=1", sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", str(per_node)),
        *("--master_addr", "127.0.0.1", "--master_port", "29579", "-m", "shardbook.train", str(RECIPE)),
        *(f"run.dir={run.parent}", f"run.name={run.name}", "run.report_to=none", f"train.steps={steps}"),
        *(f"train.per_device_train_batch_size={ROWS // (2 * per_node)}", "train.export=false", "train.save_steps=50"),
        "generate.steps=0",
        *("train.save_total_limit=1", *keys),
    ]


def metrics_of(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def finished(run: Path, steps: int) -> bool:
    return any(row["step"] == steps and "eval/loss" in row for row in metrics_of(run))


def read(run: Path, per_node: int, keys: list[str]) -> dict:
    rows = metrics_of(run)
    steps = [row for row in rows if "train/loss" in row]
    facts = json.loads((run / "run.json").read_text())
    return {
        "environment": facts,
        "ranks_of_a_node": per_node,
        "keys": keys,
        "eval": [row["eval/loss"] for row in rows if "eval/loss" in row],
        "loss": [row["train/loss"] for row in steps],
        "grad_norm": [row["train/grad_norm"] for row in steps],
        "median_step_seconds": statistics.median(row["perf/step_seconds"] for row in steps),
    }


if __name__ == "__main__":
    sys.exit(main())
