"""The page of one run: losses, learning rate, speed, memory, traffic, samples. It reads files only, also of a run that
goes on."""

from pathlib import Path
from typing import Any

from shardbook.compare.compare_page import by_step, describe, losses_of, memory_of, peak_of, summary_rows, traffic_of
from shardbook.compare.outcome import SPEED, read_outcome
from shardbook.compare.page import HELD_OUT, PANELS, Panel, panel_of, render
from shardbook.recipe import RecipeError
from shardbook.run.log.recorder import read_rows

CURVES = {"rate": "train/learning_rate", "norm": "train/grad_norm", "speed": SPEED, "mfu": "perf/mfu"}
ELSEWHERE = {"train/loss", "train/tokens", *CURVES.values()}


def write_run_page(path: Path, run: Path) -> Path:
    """Writes the page of the run in directory `run`. Raises RecipeError where it logged no step."""
    outcome = read_outcome(run, run.name)
    if not outcome.losses:
        raise RecipeError(f"{run}: {outcome.note}; there is nothing to show")
    rows = read_rows(run / "metrics.jsonl")
    ((_, numbers),) = summary_rows([outcome])
    numbers.pop("verdict")
    steps = f"{outcome.steps[-1]} steps" + ", not finished" * (not outcome.finished)
    panels = [
        Panel("Numbers", f"Of the last of {steps}; speed is the median.", [(run.name, numbers)], heads=("run",)),
        losses_of([outcome]),
        *(_curve(rows, {metric: metric}, **PANELS["run"][name]) for name, metric in CURVES.items()),
        *_objectives(rows),
        memory_of([outcome]),
        peak_of([outcome]),
        traffic_of([outcome]),
        _samples(read_rows(samples) if (samples := run / "samples.jsonl").is_file() else []),
    ]
    render(path, run.name, [f"{outcome.stage}: {describe(outcome)}"], [panel for panel in panels if panel])
    return path


def _curve(rows: list[dict[str, float]], columns: dict[str, str], **texts: Any) -> Panel | None:
    """Returns lines of metrics, column -> name; None where no step logged them, or only zeros."""
    curves = {name: {int(row["step"]): row[key] for row in rows if key in row} for name, key in columns.items()}
    shown = by_step({name: values for name, values in curves.items() if any(values.values())})
    return Panel(rows=shown, kind="lines", heads=("step",), form="g", from_zero=True, **texts) if shown else None


def _objectives(rows: list[dict[str, float]]) -> list[Panel | None]:
    """Returns a panel for each further metric of the objective, of training and held-out rows."""
    names = list(dict.fromkeys(name for row in rows for name in row if name.startswith("train/")))
    return [
        _curve(rows, {short: name, short + HELD_OUT: f"eval/{short}"}, title=short, words="A metric of the objective.")
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
        kept = [*list(steps)[:1], *list(steps)[1:][-4:]]
        rows.append((f"Prompt {number}", {"prompt": [(prompt, False)]} | {step: steps[step] for step in kept}))
    return panel_of("run.samples", rows, "tokens") if rows else None
