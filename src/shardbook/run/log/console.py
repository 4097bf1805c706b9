"""The console: rank 0's lines for the person who started the run. Other ranks print nothing.

A progress bar on a terminal, plain lines elsewhere (a log file, CI), the same content in both.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from shardbook.comm.ledger import Traffic
from shardbook.ranks.exits import PREEMPTED
from shardbook.run.log.recorder import Metrics
from shardbook.terminal import LOG_WIDTH, readable_bytes

PEAK_OFF = 0.05  # a predicted peak that is more off than this is reported

# metrics that one watches, beside the loss, by their names behind train/ and eval/
WATCHED = {
    "rewards/accuracies": ("accuracy", ".0%"),
    "rewards/margins": ("margin", ".3f"),
    "accuracy": ("accuracy", ".0%"),
    "margin": ("margin", ".3f"),
    "kl": ("kl", ".4f"),
}


class Output(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Keeps the run going, silently, where its output is closed: rich would end it."""
        self.quiet = True


class Console:
    """Prints on rank 0, and shows how far the loop is inside `start`."""

    def __init__(self, is_main: bool):
        terminal = sys.stdout.isatty()  # rich itself would take FORCE_COLOR for one
        self.output = Output(quiet=not is_main, highlight=False, soft_wrap=True, force_terminal=terminal)
        if not self.output.is_terminal:
            self.output.width = LOG_WIDTH
        self.progress: Progress | None = None

    def print(self, text: str) -> None:
        self.output.print(text, markup=False)

    def show_stopped(self, name: str, newest: Path | None, step: int, steps: int) -> int:
        """Shows the step at which a run stopped on request, and how to continue it: from its own `newest`
        checkpoint or, without one, from its beginning. Returns the exit code."""
        saved = f"after step {step} of {steps}, checkpoint saved" if newest else "before its first step"
        self.print(f"stopped  {saved}; continue with run.name={name}")
        return PREEMPTED

    def show(self, parts: Iterable[str | Table]) -> None:
        """Shows lines and tables, as `describe_job` makes them."""
        for part in parts:
            self.output.print(part, markup=False)

    def show_traffic(self, measured: Traffic, predicted: Traffic) -> None:
        """Shows the first step's traffic, and whether it was as predicted."""

        def describe(traffic: Traffic) -> str:
            return ", ".join(
                f"{op} over {axis} {readable_bytes(volume.payload_bytes)} in {volume.calls} calls"
                for (op, axis), volume in sorted(traffic.items())
            )

        verdict = "as predicted" if measured == predicted else f"but predicted were {describe(predicted)}"
        self.print(f"traffic  {describe(measured)}; {verdict}")

    @contextmanager
    def start(self, done: int, steps: int) -> Iterator[None]:
        """Shows progress around the loop: `done` of its `steps` are finished."""
        self.steps = steps
        if self.output.is_terminal and not self.output.quiet:
            shown = ("step", MofNCompleteColumn(), BarColumn(), "{task.fields[now]}", TimeElapsedColumn(), "ETA")
            self.progress = Progress(*shown, TimeRemainingColumn(), console=self.output)
            self.task = self.progress.add_task("train", total=steps, completed=done, now="")
        with self.progress or nullcontext():
            yield

    def show_step(self, step: int, metrics: Metrics) -> None:
        """Shows a finished step; without its metrics (not a logging step) only a progress bar moves."""
        if line := describe_peak(metrics):
            self.print(line)
        losses = {"train/loss": "loss", "eval/loss": "eval"}
        parts = [f"{word} {metrics[name]:.4f}" for name, word in losses.items() if name in metrics]
        for name, (word, form) in WATCHED.items():
            if (value := metrics.get(f"train/{name}", metrics.get(f"eval/{name}"))) is not None:
                parts.append(f"{word} {value:{form}}")
        if speed := metrics.get("perf/tokens_per_second_per_device"):
            parts.append(f"{speed:,.0f} tokens/s a device")
        if self.progress:
            self.progress.update(self.task, completed=step)
            if parts:
                self.progress.update(self.task, now="  ".join(parts))
        elif parts:
            left = (self.steps - step) * metrics.get("perf/step_seconds", 0)
            eta = f"  ETA {int(left // 60)}:{int(left % 60):02d}" if left else ""
            self.print(f"step {step}/{self.steps}  " + "  ".join(parts) + eta)

    def show_sample(self, step: int, prompt: str, completion: str) -> None:
        """Shows the end of a sample's prompt and the beginning of its completion, on one line."""
        asked, answer = " ".join(prompt.split()), " ".join(completion.split())
        self.print(f"sample   step {step}: {'...' * (len(asked) > 48)}{asked[-48:]} -> {answer[:72]}")


def describe_peak(metrics: Metrics) -> str:
    """Returns a line where the peak in `metrics` is more than 5% off the predicted one; else an empty string."""
    measured, predicted = metrics.get("memory/peak_bytes"), metrics.get("predicted/memory/peak_bytes")
    if not (measured and predicted) or abs(predicted / measured - 1) <= PEAK_OFF:
        return ""
    both = f"{readable_bytes(measured)} measured, {readable_bytes(predicted)} predicted"
    return f"peak     {both}: {predicted / measured - 1:+.0%}"
