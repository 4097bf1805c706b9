"""Names of the hub, and files and directories that are whole where they are there. Imports nothing of the house."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file. A kill or a full disk leaves it whole, or as it was."""
    side = path.with_suffix(".partial")
    side.write_bytes(content.encode() if isinstance(content, str) else content)
    side.replace(path)


@contextmanager
def whole_directory(out: Path, first_stays: bool = False) -> Iterator[Path]:
    """Gives an empty directory to fill, which becomes `out` when the block ends: in the place of what is there; with
    `first_stays`, as others make and read the same, only where nothing is."""
    side = out.with_name(f"{out.name}.{os.getpid()}.partial" if first_stays else f"{out.name}.partial")
    shutil.rmtree(side, ignore_errors=True)
    side.mkdir(parents=True)
    try:
        yield side
        if not first_stays:
            shutil.rmtree(out, ignore_errors=True)
        try:
            side.rename(out)
        except OSError:
            if not (first_stays and out.is_dir()):
                raise
    finally:
        shutil.rmtree(side, ignore_errors=True)


def is_hub_id(name: str) -> bool:
    """Says whether `name` is an id of the Hugging Face hub (owner/name), not a path."""
    return not name.startswith((".", "/", "~")) and name.count("/") == 1
