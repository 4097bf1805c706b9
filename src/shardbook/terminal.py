"""The console of commands, and its width. Imports nothing of this package."""

from rich.console import Console

LOG_WIDTH = 140  # columns of a log file, which has no edge to wrap at, and of the widest table


def build_console() -> Console:
    """Returns a console that wraps no line, as wide as its terminal and LOG_WIDTH at least: a table in 80 columns would
    show a digit of each number."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, LOG_WIDTH)
    return console
