"""Hub ids, and files and directories that are complete if they exist. Imports nothing of this package."""

import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def side_of(path: Path, is_shared: bool) -> Path:
    """Returns where `path` is made before it has its name. `is_shared`: several processes make it at once, maybe on
    several machines; each has a place of its own then. Not by pid: containers that share a cache have equal ones."""
    maker = f".{socket.gethostname()}-{secrets.token_hex(4)}" if is_shared else ""
    return path.with_name(f"{path.name}{maker}.partial")


def write_whole(path: Path, content: str | bytes, is_shared: bool = False) -> None:
    """Writes a file. After a kill, a power loss or on a full disk it is complete, or unchanged. `is_shared`: several
    processes may write it at once. Raises OSError, which names it."""
    side = side_of(path, is_shared)
    try:
        with naming(path):
            with side.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            side.replace(path)
    except BaseException:  # Ctrl-C too
        side.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an OSError of its block the name of `path`: one of writing has only a reason."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def whole_directory(out: Path, first_stays: bool = False) -> Iterator[Path]:
    """Yields an empty directory to fill, which becomes `out` when the block ends. It replaces an existing `out`; with
    `first_stays` an existing one stays, since other processes make the same directory and read it."""
    side = side_of(out, is_shared=first_stays)
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
    """Returns whether `name` is an id of the Hugging Face hub (owner/name), not a path."""
    return not name.startswith((".", "/", "~")) and name.count("/") == 1
