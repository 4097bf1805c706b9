"""The outcome of a run, read from its directory, and its comparison with another run's.

Invariant: a number that a run did not measure is absent here too. Reads files only, of runs here or on a cluster.
"""

import json
import tomllib
from dataclasses import asdict, dataclass, field, replace
from math import ceil, prod
from pathlib import Path
from statistics import median
from typing import Any

from shardbook.comm.ledger import warmup_steps
from shardbook.recipe import first_line
from shardbook.run.log.recorder import read_rows
from shardbook.terminal import readable_bytes

CATEGORIES = ("params", "grads", "optimizer")  # of memory/<what>_bytes
MIN_STEPS = 6  # whose speeds are compared: by chance they all say the same in 3 of 100 pairs of runs
ROUNDING = 1e-5  # stages add in another order: they agree to 1e-6 in a step, and steps add up
PREFIXES = {"paper": "paper/", "predicted": "predicted/", "measured": ""}  # source -> prefix of its metrics' names
SPEED = "perf/tokens_per_second_per_device"
PEAK = "predicted/peak/"  # prefix of the metrics' names


@dataclass(frozen=True)
class Outcome:
    """The outcome of one variant. Bytes and seconds are its first rank's; lists run over logged steps."""

    name: str
    stage: str
    finished: bool
    note: str  # the reason why it is not finished
    mesh: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # run.json
    settings: dict[str, Any] = field(default_factory=dict)  # resolved.toml
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    eval_steps: list[int] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)
    memory: dict[str, dict[str, float]] = field(default_factory=dict)  # source -> category -> bytes
    traffic: dict[str, dict[str, float]] = field(default_factory=dict)  # predicted, measured -> "op over axis" -> bytes
    sent_bytes: float | None = None  # in a step, by the first rank
    inter_node_bytes: float | None = None
    step_seconds: list[float] = field(default_factory=list)  # without the first steps, which compile and load
    speeds: list[float] = field(default_factory=list)  # of the same steps, tokens a second of a device
    tokens_per_second: float | None = None  # their median
    mfu: float | None = None
    peak: dict[str, float] = field(default_factory=dict)  # of a step, by formula: term -> bytes
    peak_bytes: float | None = None  # measured, on a GPU
    away: dict[str, float] = field(default_factory=dict)  # a rank's offloaded state: host, disk -> bytes

    @property
    def fullest_bytes(self) -> float:
        """The peak of a step: as measured, else by formula; 0 where a run logged neither."""
        return self.peak_bytes or sum(self.peak.values())

    @property
    def rows(self) -> int:
        """The number of rows that all ranks take in a step: those along tp, cp and pp share each micro-batch."""
        if not self.settings or not self.facts:
            return 0
        train, sizes = self.settings["train"], self.settings["parallel"]
        micros = self.facts["world_size"] // prod(sizes.get(f"{axis}_size", 1) for axis in ("tp", "cp", "pp"))
        return int(micros * train["per_device_train_batch_size"] * train["gradient_accumulation_steps"])

    @property
    def resident_bytes(self) -> float:
        return sum(self.memory["measured"].values())


def read_outcome(run: Path, name: str) -> Outcome:
    """Returns the outcome of the run in directory `run`; without a step or readable files only its name and a note."""
    try:
        return _read_run(run, name)
    except FileNotFoundError:
        return Outcome(name, "", finished=False, note="it ended before its first step")
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # from a file that no run writes so
        return Outcome(name, "", finished=False, note=f"its files are damaged ({first_line(error)})")


def _read_run(run: Path, name: str) -> Outcome:
    rows = read_rows(run / "metrics.jsonl")
    settings = tomllib.loads((run / "resolved.toml").read_text())
    facts = json.loads((run / "run.json").read_text())
    train, trained = settings.get("train", {}), [row for row in rows if "train/loss" in row]
    counted = next((row for row in trained if "comm/sent_bytes" in row), None)
    last = max((row["step"] for row in rows), default=0)
    note = "" if facts["finished_steps"] else f"it ended after step {last}"
    if not note and counted is None:
        note = f"it logged no step (train.logging_steps = {train.get('logging_steps', 1)})"
    outcome = Outcome(name, settings["parallel"]["stage"], not note, note, facts["mesh"], facts, settings)
    if not trained or counted is None:
        return outcome
    first = warmup_steps(train.get("compile", False), facts["mesh"])
    later = trained[ceil(first / train.get("logging_steps", 1)) :] or trained
    evaluated = [row for row in rows if "eval/loss" in row]

    def middle(key: str) -> float | None:
        values = [row[key] for row in later if key in row]
        return median(values) if values else None

    return replace(
        outcome,
        steps=[row["step"] for row in trained],
        losses=[row["train/loss"] for row in trained],
        eval_steps=[row["step"] for row in evaluated],
        eval_losses=[row["eval/loss"] for row in evaluated],
        memory={
            source: {what: counted[key] for what in CATEGORIES if (key := f"{prefix}memory/{what}_bytes") in counted}
            for source, prefix in PREFIXES.items()
        },
        peak={
            key.removeprefix(PEAK).removesuffix("_bytes"): value
            for key, value in counted.items()
            if key.startswith(PEAK)
        },
        away={what: counted[key] for what in ("host", "disk") if (key := f"memory/{what}_bytes") in counted},
        traffic={
            source: {
                f"{parts[2].removesuffix('_bytes')} over {parts[1]}": value
                for key, value in counted.items()
                if key.startswith(f"{prefix}comm/") and len(parts := key.removeprefix(prefix).split("/")) == 3
            }
            for source, prefix in (("predicted", "predicted/"), ("measured", ""))
        },
        sent_bytes=counted["comm/sent_bytes"],
        inter_node_bytes=counted["comm/inter_node_bytes"],
        step_seconds=[row["perf/step_seconds"] for row in later],
        speeds=[row[SPEED] for row in later if SPEED in row],
        tokens_per_second=middle(SPEED),
        mfu=middle("perf/mfu"),
        peak_bytes=max((row["memory/peak_bytes"] for row in later if "memory/peak_bytes" in row), default=None),
    )


def differences(one: Outcome, other: Outcome) -> dict[int, float]:
    """Returns, for each step that both logged, the distance of the losses as a share of `other`'s loss."""
    ours, theirs = (dict(zip(run.steps, run.losses, strict=True)) for run in (one, other))
    return {step: abs(ours[step] - theirs[step]) / (abs(theirs[step]) or 1) for step in ours if step in theirs}


def first_difference(one: Outcome, other: Outcome) -> int | None:
    """Returns the first step whose losses differ in any bit; None where none does."""
    return next((step for step, apart in differences(one, other).items() if apart), None)


def judge(one: Outcome, base: Outcome) -> str:
    """Returns a verdict on `one` beside `base`: `same losses bitwise; 38% less memory; 20% lower peak by formula; 1.5x
    traffic; 12% slower`. Memory: bytes kept from step to step; peak: bytes at the fullest moment of a step."""
    if not one.finished:
        return one.note
    if one is base:
        sent = readable_bytes(one.sent_bytes or 0)
        return f"what the others are held against: {readable_bytes(one.resident_bytes)} kept, {sent} sent a step"
    step = first_difference(one, base)
    largest = max(differences(one, base).values(), default=None)
    if largest is None:
        words = ["no step that both logged"]
    elif one.rows != base.rows:
        words = [f"{one.rows} rows a step in place of {base.rows}, so other losses"]
    elif step is None:
        words = ["same losses bitwise"]
    elif largest < ROUNDING:
        words = [f"same losses but for rounding ({largest:.0e}, from step {step})"]
    else:
        words = [f"losses differ from step {step}, by {_short(100 * largest)}% at most"]
    if base.resident_bytes:
        words.append(f"{_beside(one.resident_bytes, base.resident_bytes, 'less', 'more')} memory")
    if one.away != base.away:
        kept = [f"{readable_bytes(size)} on {what}" for what, size in one.away.items()]
        words.append(" and ".join(kept) or "nothing off the device")
    if base.fullest_bytes and one.fullest_bytes and bool(base.peak_bytes) == bool(one.peak_bytes):
        apart = _beside(one.fullest_bytes, base.fullest_bytes, "lower", "higher")
        words.append(f"{apart} peak" + " by formula" * (not one.peak_bytes))
    if base.sent_bytes and one.sent_bytes is not None:
        ratio = one.sent_bytes / base.sent_bytes
        words.append("same traffic" if abs(ratio - 1) < 0.005 else f"{_short(ratio)}x traffic")
    return "; ".join([*words, *_beyond_noise(one.speeds, base.speeds)])


def _beyond_noise(speeds: list[float], base: list[float]) -> list[str]:
    """Returns how much faster or slower a device was, if of 20 steps that both ran 19 say the same. The same step has
    the same rows in both, and the first ones warm up in both."""
    signs = [speed > beside for speed, beside in zip(speeds[::-1], base[::-1], strict=False)]  # the last steps agree
    if len(signs) < MIN_STEPS:
        return []
    comparison = _beside(median(speeds), median(base), "slower", "faster")
    return (
        [comparison] if max(sum(signs), len(signs) - sum(signs)) >= 0.95 * len(signs) and comparison != "same" else []
    )


def _beside(count: float, base: float, below: str, above: str) -> str:
    share = count / base - 1
    return "same" if abs(share) < 0.005 else f"{abs(share):.0%} {above if share > 0 else below}"


def _short(value: float) -> str:
    return f"{float(f'{value:.2g}'):,g}"  # two digits, and 200 not 2e+02


def write_json(path: Path, title: str, outcomes: list[Outcome]) -> None:
    """Writes report.json: every outcome with its verdict, and the first step whose loss differs from the baseline's."""
    base = outcomes[0]
    variants = []
    for one in outcomes:
        step = first_difference(one, base) if one.finished and one is not base else None
        variants.append(asdict(one) | {"verdict": judge(one, base), "first_different_step": step})
    path.write_text(json.dumps({"comparison": title, "baseline": base.name, "variants": variants}, indent=1) + "\n")
