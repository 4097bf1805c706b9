"""The model card of a run, written from its own record: run.json, resolved.toml and metrics.jsonl.

Invariant: a number that the run did not measure is absent; nothing here computes one.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from shardbook.paths import is_hub_id
from shardbook.run.directory import read_facts
from shardbook.run.metrics import read_rows

PACKAGES = ("shardbook", "torch", "transformers", "datasets", "cuda", "gpu")


def write_card(run: Path, name: str) -> tuple[str, str]:
    """Returns the card (Markdown, with the Hub's front matter) of a finished run under its `name`, and a plot of its
    losses (SVG)."""
    recipe, facts = tomllib.loads((run / "resolved.toml").read_text()), read_facts(run)
    rows = read_rows(run / "metrics.jsonl")
    mesh = " x ".join(f"{axis} {size}" for axis, size in facts.get("mesh", {}).items() if size > 1) or "one rank"
    data, model, method = recipe["data"], recipe["model"]["path"], recipe["method"]
    sources = [data["train"]] if isinstance(data["train"], str) else data["train"]
    ranks = facts.get("world_size", 1)
    said = {
        "base": f"{model} ({recipe['model']['revision']})",
        "method": method + f", LoRA of rank {recipe['lora']['r']}" * bool(recipe["lora"]["r"]),
        "data": ", ".join(map(str, sources)),
        "stage": f"{recipe['parallel']['stage']}, {mesh}",
        "steps": f"{facts['finished_steps']:,}",
        **_measured(rows),
        "versions": ", ".join(f"{package} {facts[package]}" for package in PACKAGES if package in facts),
    }
    front = {
        "library_name": "peft" if recipe["lora"]["r"] else "transformers",
        "tags": ["shardbook", method],
        "base_model": [model] if is_hub_id(model) else [],
        "datasets": list(filter(is_hub_id, (re.split(r"[:\[]", str(source))[0] for source in sources))),
    }
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items() if value), "---", ""]
    lines += [f"# {name}", ""]
    lines += [f"Trained with Shardbook, by `{method}` on {ranks} rank{'s' * (ranks > 1)}.", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in said.items() if value]
    if recipe["lora"]["r"] and method == "reward":  # transformers reads a score before the padding that it knows
        note = "Before the adapter scores, set `model.config.pad_token_id` to that of the tokenizer here."
    elif recipe["lora"]["r"]:
        note = "`GenerationConfig.from_pretrained` reads the tokens that end an answer."
    lines += ["", note] if recipe["lora"]["r"] else []
    lines += ["", "![Losses by step](losses.svg)", "", "## How to repeat it", "", "```"]
    lines += [f"shardbook train recipe.toml --nproc {ranks}", "```", "", "recipe.toml, every key:", "", "```toml"]
    lines += [(run / "resolved.toml").read_text().strip(), "```", ""]
    return "\n".join(lines), plot_losses(rows)


def _measured(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Returns the last value of each metric that a reader asks for first; without those that were not measured."""
    last = {key: value for row in rows for key, value in row.items()}
    shown = {
        "loss, at the end": ("train/loss", "{:.4f}", 1),
        "held-out loss": ("eval/loss", "{:.4f}", 1),
        "tokens": ("train/tokens", "{:,.0f}", 1),
        "tokens/s a device": ("perf/tokens_per_second_per_device", "{:,.0f}", 1),
        "peak memory of a GPU": ("memory/peak_bytes", "{:.1f} GB", 1e9),
        "sent by a rank in a step": ("comm/sent_bytes", "{:.3f} GB", 1e9),
    }
    return {said: form.format(last[key] / unit) for said, (key, form, unit) in shown.items() if key in last}


def plot_losses(rows: list[dict[str, Any]]) -> str:
    """Returns a line for training and one for held-out losses, as an SVG of 640 x 260."""
    losses = {"train": "train/loss", "held out": "eval/loss"}
    lines = {name: [(row["step"], row[key]) for row in rows if key in row] for name, key in losses.items()}
    points = [point for line in lines.values() for point in line] or [(0, 0.0)]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))

    def at(step: float, loss: float) -> str:
        x = 60 + 560 * (step - left) / max(right - left, 1)
        return f"{x:.1f},{220 - 200 * (loss - low) / max(high - low, 1e-9):.1f}"

    drawn = [
        f'<polyline points="{" ".join(at(*point) for point in line)}" fill="none" stroke="{color}" stroke-width="2"/>'
        f'<text x="{480 + 70 * number}" y="16" fill="{color}">{name}</text>'
        for number, ((name, line), color) in enumerate(zip(lines.items(), ("#1f77b4", "#d62728"), strict=True))
        if line
    ]
    axes = f'<text x="8" y="24">{high:.3f}</text><text x="8" y="222">{low:.3f}</text><text x="60" y="244">{left}</text>'
    axes += f'<text x="620" y="244" text-anchor="end">step {right}</text>'
    axes += '<path d="M60 20V222H620" fill="none" stroke="#888"/>'
    body = axes + "".join(drawn)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 260" font-size="13" fill="#888">{body}</svg>\n'
