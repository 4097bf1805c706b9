"""The console of commands and its width, and lines of ranks. Imports nothing of this package."""

import os

from rich.console import Console
from rich.filesize import pick_unit_and_suffix

LOG_WIDTH = 140  # columns of a log file, which has no edge to wrap at, and of the widest table
UNITS = ["B", "KiB", "MiB", "GiB", "TiB"]


def build_console() -> Console:
    """Returns a console that wraps no line, as wide as its terminal and LOG_WIDTH at least: a table in 80 columns would
    show a digit of each number."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, LOG_WIDTH)
    return console


def print_line(text: object, any_rank: bool = False) -> None:
    """Prints a line for people at once, on rank 0, or with `any_rank` on the rank that calls it. Where standard output
    is a program's (eval --json), evaluate.py has it redirected."""
    if any_rank or os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def readable_bytes(count: float) -> str:
    """Returns bytes for people: `1.5 GiB`."""
    scale, unit = pick_unit_and_suffix(int(count), UNITS, 1024)
    return f"{count / scale:,.{int(scale > 1)}f} {unit}"
