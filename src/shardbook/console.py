"""The console: what rank 0 tells the person who started the run. Other ranks say nothing.

A progress bar on a terminal, plain lines elsewhere (a log file, CI), the same content in both.
"""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from shardbook.metrics import Metrics

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Teller:
    """Says things on rank 0, and shows how far the loop is while used as a context."""

    def __init__(self, is_main: bool):
        self.console = Console(quiet=not is_main, highlight=False, soft_wrap=True)
        self.progress: Progress | None = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        table = Table(title=title, show_header=False, title_justify="left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def start(self, done: int, steps: int) -> "Teller":
        self.steps = steps
        if self.console.is_terminal and not self.console.quiet:
            shown = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[now]}"),
                TimeElapsedColumn(),
                TextColumn("ETA"),
            )
            self.progress = Progress(*shown, TimeRemainingColumn(), console=self.console, transient=False)
            self.task = self.progress.add_task("train", total=steps, completed=done, now="")
        return self

    def __enter__(self) -> "Teller":
        if self.progress:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress:
            self.progress.stop()

    def advance(self, step: int, metrics: Metrics) -> None:
        """Show a finished step; without its metrics (not a logging step) only a progress bar moves."""
        parts = []
        if "train/loss" in metrics:
            parts.append(f"loss {metrics['train/loss']:.4f}")
        if "eval/loss" in metrics:
            parts.append(f"eval {metrics['eval/loss']:.4f}")
        if speed := metrics.get("perf/tokens_per_second_per_device"):
            parts.append(f"{speed:,.0f} tokens/s a device")
        if self.progress:
            self.progress.update(self.task, completed=step, **({"now": "  ".join(parts)} if parts else {}))
        elif parts:
            left = (self.steps - step) * metrics.get("perf/step_seconds", 0)
            eta = f"  ETA {int(left // 60)}:{int(left % 60):02d}" if left else ""
            self.say(f"step {step}/{self.steps}  " + "  ".join(parts) + eta)


def readable_bytes(count: float) -> str:
    """`1.5 GiB`"""
    for unit in UNITS:
        if count < 1024 or unit == UNITS[-1]:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError
