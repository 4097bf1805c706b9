"""The console of commands, and its width. Imports nothing of this package."""

from rich.console import Console

LOG_WIDTH = 140  # columns of a log file, which has no edge to wrap at


def build_console() -> Console:
    """Returns a console that wraps no line, as wide as its terminal; LOG_WIDTH where it prints to a file."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console
