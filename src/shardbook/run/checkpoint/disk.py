"""Disk: every file operation by which a checkpoint is written, published and removed. A test replaces and records them.

Invariant: a file is made once (O_EXCL) and never opened for writing again, so nobody changes a published file. Nothing
here knows what is in the files.
"""

import os
from collections.abc import Callable
from pathlib import Path

from shardbook.recipe import first_line


def make_directory(path: Path) -> None:
    path.mkdir(exist_ok=False)


def create(path: Path) -> int:
    """Returns the descriptor of a new file. Raises FileExistsError where there is one."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)


def write(file: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def sync(file: int) -> None:
    os.fsync(file)


def close(file: int) -> None:
    os.close(file)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable. Before that, a power loss can undo a file that was made, renamed or
    removed in it."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def rename(old: Path, new: Path) -> None:
    old.rename(new)


def remove(path: Path) -> None:
    path.unlink()


def remove_directory(path: Path) -> None:
    path.rmdir()


def write_file(path: Path, data: bytes) -> None:
    """Writes a new file, durably."""
    file = create(path)
    try:
        write(file, data)
        sync(file)
    finally:
        close(file)


def remove_tree(path: Path, warn: Callable[[str], None] = lambda line: None) -> None:
    """Removes a directory that no longer counts. Says what stays, and raises nothing: no number depends on it."""
    try:
        for each in sorted(path.iterdir()):
            if each.is_dir() and not each.is_symlink():
                remove_tree(each, warn)
            else:
                remove(each)
        remove_directory(path)
    except OSError as error:
        warn(f"{path}: cannot be removed ({first_line(error)})")
