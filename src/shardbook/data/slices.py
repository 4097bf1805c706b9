"""A slice of a source: the rows that `[start:stop]` behind its name leaves, by number or in percent.

It is written as `datasets` writes a part of a split, `train[:20%]`, behind any source. Imports no torch.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from shardbook.recipe import RecipeError

FORM = re.compile(r"(.+)\[(\d*)(%?):(\d*)(%?)\]")


@dataclass(frozen=True)
class Slice:
    """The rows from `start` to before `stop`, None for the first and the last. One `%` makes both numbers percents."""

    start: int | None
    stop: int | None
    in_percent: bool

    def rows(self, count: int) -> range:
        """Returns the numbers of the rows of `count` that it leaves; percents are rounded, as `datasets` does."""
        ends = (0 if self.start is None else self.start, self.stop)
        start, stop = (count if end is None else round(end * count / 100) if self.in_percent else end for end in ends)
        return range(start, min(stop, count))


def split_slice(name: str, what: str) -> tuple[str, Slice | None]:
    """Returns a source's name without its slice, and the slice. `what` is the recipe key, for errors. Raises
    RecipeError for a slice that is not at the end of one split, or of more than 100 percent."""
    if not (match := FORM.fullmatch(name)) or _is_path(name):
        return name, None
    source, start, from_percent, stop, to_percent = match.groups()
    if "+" in source.partition(":")[2] or FORM.fullmatch(source):
        raise RecipeError(f"{what} = {name!r}: a slice is of one split; write a list of sources")
    part = Slice(int(start) if start else None, int(stop) if stop else None, bool(from_percent or to_percent))
    if part.in_percent and max(part.start or 0, part.stop or 0) > 100:
        raise RecipeError(f"{what} = {name!r}: percents are at most 100")
    return source, part


def _is_path(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError:  # no name that a file can have
        return False
