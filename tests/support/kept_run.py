"""A run directory as a finished run leaves it, without the run: what reads one needs no ranks."""

import json
from pathlib import Path

from shardbook.recipe import Recipe, Run, Train, dump_recipe

PARTS = [f"memory/{what}_bytes" for what in ("params", "grads")]
MEMORY = {f"{source}{part}": 2.0**20 for source in ("paper/", "predicted/", "") for part in PARTS}
TRAFFIC = {f"{source}comm/dp_shard/all_gather_bytes": 3.0 * 2**20 for source in ("predicted/", "")}
FACTS = {"mesh": {"dp_replicate": 1, "dp_shard": 2}, "world_size": 2, "torch": "2.13.0", "shardbook": "0.3.0"}


def keep_run(folder: Path, losses=(4.0, 3.0, 2.5, 2.25, 2.0, 1.5, 1.25), speed=100.0, finished=True, **metrics) -> Path:
    """Writes a run of as many steps as `losses`; a later step is a little faster. `metrics`: more of each step."""
    folder.mkdir(parents=True)
    recipe = Recipe(train=Train(steps=7), run=Run(name=folder.name))
    (folder / "resolved.toml").write_text(dump_recipe(recipe))
    (folder / "run.json").write_text(json.dumps(FACTS | {"finished_steps": len(losses) if finished else None}))
    rows = [{"step": 0, "eval/loss": 4.5}]
    for step, loss in enumerate(losses, 1):
        row = {"step": step, "train/loss": loss, "train/learning_rate": 1e-5 * step, "train/grad_norm": 1.0}
        row |= {"perf/step_seconds": 1.0, "perf/tokens_per_second_per_device": speed + step}
        row |= {"comm/sent_bytes": 2.0**20, "comm/inter_node_bytes": 0} | MEMORY | TRAFFIC
        rows.append(row | {"predicted/peak/params_bytes": 2.0**21} | metrics)
    rows[-1]["eval/loss"] = 2.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [
        {"step": step, "prompt": "why <b>?", "completion": f"at {step}\n", "tokens": 2} for step in range(0, 14, 2)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder
