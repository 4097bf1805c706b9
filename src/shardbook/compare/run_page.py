"""The page of one run: losses, learning rate, speed, memory, traffic, samples. It reads files only, also of a run that
goes on."""

from pathlib import Path

from shardbook.compare.compare_page import by_step, describe, losses_of, memory_of, peak_of, summary_rows, traffic_of
from shardbook.compare.outcome import SPEED, read_outcome, read_rows
from shardbook.compare.page import HELD_OUT, Panel, render
from shardbook.recipe import RecipeError

LATEST = 4  # samples of a prompt that are shown, beside its first one
# title -> what it shows, the metric, the unit
CURVES = {
    "Learning rate": ("By step, after warm-up and decay.", "train/learning_rate", "learning rate"),
    "Gradient norm": ("Norm of the full gradient before it is clipped.", "train/grad_norm", "norm"),
    "Speed": ("Tokens a second of one device, in each step.", SPEED, "tokens/s"),
    "MFU": ("Share of the device's dense bf16 peak that the model's own arithmetic used.", "perf/mfu", "share"),
}
ELSEWHERE = {"train/loss", "train/tokens", *(metric for _, metric, _ in CURVES.values())}


def write_run_page(path: Path, run: Path) -> Path:
    """Writes the page of the run in directory `run`. Raises RecipeError where it logged no step."""
    outcome, rows = read_outcome(run, run.name), read_rows(run / "metrics.jsonl")
    if not outcome.losses:
        raise RecipeError(f"{run}: {outcome.note}; there is nothing to show")
    (((_, numbers)),) = summary_rows([outcome])
    numbers.pop("verdict")
    steps = f"{outcome.steps[-1]} steps" + ", not finished" * (not outcome.finished)
    panels = [
        Panel("Numbers", f"Of the last of {steps}; speed is the median.", [(run.name, numbers)], heads=("run",)),
        losses_of([outcome]),
        *(_curve(rows, title, words, {metric: metric}, unit) for title, (words, metric, unit) in CURVES.items()),
        *_objectives(rows),
        memory_of([outcome]),
        peak_of([outcome]),
        traffic_of([outcome]),
        _samples(read_rows(run / "samples.jsonl")),
    ]
    render(path, run.name, [describe(outcome)], [panel for panel in panels if panel])
    return path


def _curve(rows: list[dict[str, float]], title: str, words: str, columns: dict[str, str], unit: str) -> Panel | None:
    """Returns lines of metrics, column -> name; None where no step logged them, or only zeros."""
    found = {name: {int(row["step"]): row[key] for row in rows if key in row} for name, key in columns.items()}
    shown = by_step({name: values for name, values in found.items() if any(values.values())})
    return Panel(title, words, shown, "lines", ("step",), unit=unit, form="g", from_zero=True) if shown else None


def _objectives(rows: list[dict[str, float]]) -> list[Panel | None]:
    """Returns a panel for each further metric of the objective, of training and held-out rows."""
    names = list(dict.fromkeys(name for row in rows for name in row if name.startswith("train/")))
    return [
        _curve(rows, short, "A metric of the objective.", {short: name, short + HELD_OUT: f"eval/{short}"}, short)
        for name in names
        if name not in ELSEWHERE
        for short in [name.removeprefix("train/")]
    ]


def _samples(samples: list[dict[str, str]]) -> Panel | None:
    written: dict[str, dict[str, list[tuple[str, bool]]]] = {}
    for one in samples:
        written.setdefault(one["prompt"], {})[f"step {one['step']}"] = [(one["completion"], True)]
    rows = []
    for number, (prompt, steps) in enumerate(written.items(), 1):
        kept = [*list(steps)[:1], *list(steps)[1:][-LATEST:]]
        rows.append((f"Prompt {number}", {"prompt": [(prompt, False)]} | {step: steps[step] for step in kept}))
    words = f"What the model wrote after each prompt: at first, and the last {LATEST} times."
    return Panel("Samples", words, rows, "tokens") if rows else None
