"""Format: the files of a checkpoint are raw bytes with one hash an item, and a manifest with the hashes of the others.

`rank-<r>.bin` has the bytes of a rank's items one after another; `rank-<r>.items` has the name, place and xxh3_128 of
each; `state.json` has the part that is no tensor. `manifest.json` is written last; its first line is the hash of the
rest of it. Invariant: a checkpoint is whole or not there. It is written as `tmp-<step>-<token>`, made durable, and
published by one rename; it is unpublished by a rename too. Nothing is pickled. The hash finds damage, it is no
signature. Imports no torch, and knows no ranks but by the numbers of their files.
"""

import errno
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_128

from shardbook.recipe import RecipeError
from shardbook.run.checkpoint import disk
from shardbook.terminal import print_line

VERSION = 1  # of the files; in a manifest, where none is written it is 1
MANIFEST, STATE = "manifest.json", "state.json"
EARLIER = "*.distcp"  # the files of a checkpoint of 0.1, or of 0.2 before it was released
PIECE = 4 << 20  # bytes that are hashed and written at once, so that they are read from memory once
JOINED = 64 << 10  # smaller pieces are joined to this; larger ones are not copied, which would double the CPU's work
WAY_OUT = "; remove it, and the run goes on from the one before"
SIDE = "tmp-"  # what is not published, or no longer

Facts = list[Any]  # of a file, in the manifest: its size, and its hash; that of a .bin is in its .items


@dataclass(frozen=True)
class TrainState:
    """The state of a run that is not a tensor."""

    step: int  # optimizer steps done
    tokens: int  # trained tokens seen, all ranks
    loader: dict[str, Any]
    log: dict[str, int] = field(default_factory=dict)  # what the step log must find again: see its `mark`


class Damaged(RecipeError):
    """The error of a checkpoint that has other bytes than were written."""


class Item(NamedTuple):
    """One row of a `.items` file: a part of a tensor, as one rank wrote it."""

    name: str
    offsets: list[int]  # of the part in the whole tensor
    sizes: list[int]
    shape: list[int]  # of the whole tensor
    dtype: str
    begin: int  # in the .bin file
    length: int
    digest: str


class StoredCheckpoint(NamedTuple):
    """All of a checkpoint but its tensors' bytes, verified."""

    state: dict[str, Any]
    items: dict[str, list[Item]]  # by .bin file


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def step_of(path: Path) -> int:
    """Returns the step after which a checkpoint was written, by its name."""
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints in `folder`, newest first: damaged ones too, and those of earlier versions, since a run
    that passed over them would begin at step 0 beside them."""
    paths = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and path.is_dir()]
    return sorted(paths, key=step_of, reverse=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """Returns the checkpoint with the most steps in `folder`, or None."""
    return next(iter(list_checkpoints(folder)), None)


def begin(folder: Path, step: int, needed: int) -> Path:
    """Makes the directory in which a checkpoint of `needed` bytes is written. Its name has a token of its own: a rank
    that wakes up after its run was continued writes into another one. Raises OSError where there is no room."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        disk.make_directory(folder)
        disk.sync_directory(folder.parent)  # else a power loss takes the folder with all that is in it
    if (free := shutil.disk_usage(folder).free) < needed:
        reason = f"{os.strerror(errno.ENOSPC)}: {in_gb(needed)} are needed, {in_gb(free)} are free"
        raise OSError(errno.ENOSPC, reason)
    side = folder / f"{SIDE}{step:06d}-{secrets.token_hex(4)}"
    disk.make_directory(side)
    return side


def write_items(folder: Path, rank: int, items: Iterable[tuple[Facts, list[memoryview]]]) -> dict[str, Facts]:
    """Writes a rank's items, durably: of each its name, offsets, sizes, shape and dtype, and its bytes in parts.
    Returns the facts of both files for the manifest."""
    rows, joined, end = list[str](), bytearray(), 0
    file = disk.create(folder / f"rank-{rank}.bin")
    try:
        for facts, parts in items:
            digest, start = xxh3_128(), end
            for piece in (part[at : at + PIECE] for part in parts for at in range(0, len(part), PIECE)):
                digest.update(piece)
                if len(piece) < JOINED:
                    joined += piece
                if len(joined) >= JOINED or len(piece) >= JOINED:
                    disk.write(file, joined)
                    joined.clear()
                if len(piece) >= JOINED:
                    disk.write(file, piece)
                end += len(piece)
            rows.append(json.dumps([*facts, start, end - start, digest.hexdigest()]))
        disk.write(file, joined)
        disk.sync(file)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; rank {rank} had written {in_gb(end)}") from error
    finally:
        disk.close(file)
    text = ("[" + ",\n".join(rows) + "]").encode()
    disk.write_file(folder / f"rank-{rank}.items", text)
    return {f"rank-{rank}.bin": [end], f"rank-{rank}.items": _facts(text)}


def facts_of_ranks(side: Path, ranks: int) -> dict[str, Facts]:
    """Returns the facts of the files that all ranks have written."""
    facts = dict[str, Facts]()
    for rank in range(ranks):
        facts[f"rank-{rank}.bin"] = [(side / f"rank-{rank}.bin").stat().st_size]
        facts[f"rank-{rank}.items"] = _facts((side / f"rank-{rank}.items").read_bytes())
    return facts


def publish(
    side: Path, step: int, state: dict[str, Any], written: dict[str, Facts], keep: int, check_held: Callable[[], None]
) -> None:
    """Completes a checkpoint in which every rank has `written` its files, publishes it by one atomic rename, then
    removes all but the `keep` newest (0: keeps all). `check_held` raises where the run's lock is another launch's by
    now."""
    folder, text = side.parent, json.dumps(state, indent=1).encode()
    path = folder / name_of(step)
    disk.write_file(side / STATE, text)
    manifest = {"version": VERSION, "step": step, "files": written | {STATE: _facts(text)}}
    body = json.dumps(manifest)[1:].encode()
    disk.write_file(side / MANIFEST, _first_line(body) + body)
    disk.sync_directory(side)
    check_held()
    # a damaged one, from before which the run went on
    removed = [_unpublish(path, side.name)] if path.exists() else []
    disk.rename(side, path)
    disk.sync_directory(folder)
    # those of later steps are damaged ones that were gone back from, and will be replaced
    older = [each for each in list_checkpoints(folder) if step_of(each) <= step]
    removed += [_unpublish(each, side.name) for each in older[keep:]] if keep else []
    if removed:
        disk.sync_directory(folder)
    for each in removed:
        disk.remove_tree(each)


def _unpublish(path: Path, name: str) -> Path:
    aside = path.with_name(f"{name}-{path.name}")
    disk.rename(path, aside)
    return aside


def remove_leftovers(folder: Path) -> list[str]:
    """Removes what dead saves left in `folder`, and returns what could not be. The holder of the run's lock calls it:
    no other process of the run is alive."""
    stays = list[str]()
    for path in folder.glob(f"{SIDE}*"):
        disk.remove_tree(path, stays.append)
    return stays


def read_stored(path: Path) -> StoredCheckpoint:
    """Returns a checkpoint's state and items, verified, and checks that its files have their sizes. Raises Damaged, or
    RecipeError where there is no checkpoint, or one of another version of the files."""
    if any(path.glob(EARLIER)):
        raise RecipeError(
            f"checkpoint {path}: of an earlier version (0.1, or 0.2 before its release, wrote {EARLIER} files), which "
            f"is not read, only {MANIFEST} with .items files is; choose another run.name, and set model.path to an "
            "export by the version that wrote it"
        )
    if not path.is_dir():
        raise RecipeError(f"checkpoint {path}: incomplete or not a checkpoint (no {MANIFEST} in it)")
    listed = _read_manifest(path)
    state = json.loads(_read_whole(path, STATE, listed))
    items = dict[str, list[Item]]()
    for name, (size, *_) in listed.items():
        try:
            size_now = (path / name).stat().st_size
        except OSError as error:
            raise damaged(path, name, error.strerror or "") from error
        if size_now != size:
            raise damaged(path, name, f"{size_now} bytes, was {size}")
        if name.endswith(".items"):
            rows = [Item(*row) for row in json.loads(_read_whole(path, name, listed))]
            data, ends = name.removesuffix(".items") + ".bin", [0, *(row.begin + row.length for row in rows)]
            if ends != [*(row.begin for row in rows), *listed.get(data, [])]:
                raise damaged(path, name, f"its items are not all of {data}")
            items[data] = rows
    return StoredCheckpoint(state, items)


def open_data(path: Path, name: str) -> io.BufferedReader:
    """Opens a .bin file whose items will be read in order. Raises Damaged where that cannot be."""
    try:
        file = (path / name).open("rb")
    except OSError as error:
        raise damaged(path, name, error.strerror or "") from error
    # the kernel reads on while what has come is hashed; asked for what lies ahead (WILLNEED), it takes twice as long
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return file


def read_item(path: Path, name: str, file: io.BufferedReader, item: Item, buffer: memoryview) -> memoryview:
    """Returns an item's bytes, read from the open .bin file `name` into `buffer`, which has room for them. Raises
    Damaged where they are not those that were written."""
    view, digest, at = buffer[: item.length], xxh3_128(), 0
    try:
        file.seek(item.begin)
        while at < item.length and (count := file.readinto(view[at : at + PIECE])):
            digest.update(view[at : at + count])
            at += count
    except OSError as error:
        raise damaged(path, name, f"{item.name}: {error.strerror}") from error
    if digest.hexdigest() != item.digest:
        raise damaged(path, name, f"bytes {item.begin} to {item.begin + item.length}, of {item.name}")
    return view


def verify_run(run: Path) -> int:
    """Reads every checkpoint of a run directory, newest first, and prints a line for each. Returns the exit code: 1
    where one is damaged or not read."""
    paths, code = list_checkpoints(run / "checkpoints"), 0
    if not paths:
        raise RecipeError(f"{run}: has no checkpoint; name a run directory with checkpoints/step-<n>")
    for path in paths:
        try:
            verify(path)
            size = in_gb(sum(each.stat().st_size for each in path.iterdir()))
            print_line(f"checkpoint {path}: whole, {size}")
        except (RecipeError, OSError) as error:
            exists = path.exists()
            code = max(code, int(exists))
            print_line(error if exists else f"checkpoint {path}: its run has removed it meanwhile")
    return code


def verify(path: Path) -> None:
    """Reads all of a checkpoint. Raises as read_stored does, and Damaged where a byte is not what was written."""
    stored = read_stored(path)
    buffer = memoryview(bytearray(max((item.length for items in stored.items.values() for item in items), default=0)))
    for name, items in stored.items.items():
        with open_data(path, name) as file:
            for item in items:
                read_item(path, name, file, item, buffer)


def damaged(path: Path, name: str, what: str) -> Damaged:
    """Returns the error of a checkpoint whose file `name` is damaged, or empty where that is not known."""
    way_out = WAY_OUT * (path in list_checkpoints(path.parent)[:-1])
    return Damaged(f"checkpoint {path}: damaged ({f'{name}: ' * bool(name)}{what}){way_out}")


def in_gb(count: int) -> str:
    return f"{count / 10**9:.3g} GB"


def _facts(text: bytes) -> Facts:
    return [len(text), xxh3_128(text).hexdigest()]


def _first_line(body: bytes) -> bytes:
    return f'{{"xxh3_128": "{xxh3_128(body).hexdigest()}",\n'.encode()


def _read_manifest(path: Path) -> dict[str, Facts]:
    text = _read(path, MANIFEST)
    at = text.find(b"\n") + 1
    if text[:at] != _first_line(text[at:]):
        raise damaged(path, MANIFEST, "not as it was written")
    manifest = json.loads(text)
    if (version := manifest.get("version", 1)) != VERSION:
        raise RecipeError(
            f"checkpoint {path}: its files are of version {version}, and version {VERSION} is read; go on with the "
            "Shardbook that wrote it, or set model.path to an export by that one and choose another run.name"
        )
    if re.fullmatch(r"step-\d+", path.name) and manifest["step"] != step_of(path):
        raise damaged(path, MANIFEST, f"of step {manifest['step']}")
    if outside := [name for name in manifest["files"] if Path(name).name != name]:
        raise damaged(path, MANIFEST, f"names {outside[0]}")
    return dict(manifest["files"])


def _read_whole(path: Path, name: str, listed: dict[str, Facts]) -> bytes:
    """Returns a file that the manifest lists with a hash."""
    text = _read(path, name)
    if _facts(text) != listed.get(name):
        raise damaged(path, name, "not as it was written")
    return text


def _read(path: Path, name: str) -> bytes:
    try:
        return (path / name).read_bytes()
    except OSError as error:
        raise damaged(path, name, error.strerror or "") from error
