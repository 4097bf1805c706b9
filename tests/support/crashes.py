"""A disk that remembers the file operations of a save, and what each moment leaves after a kill or a power loss."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shardbook.run.checkpoint import disk

Tree = dict[str, bytes | None]  # by path; None: a directory


@dataclass
class File:
    data: bytes = b""
    durable: bytes = b""


@dataclass
class Directory:
    names: dict[str, "File | Directory"] = field(default_factory=dict)
    durable: dict[str, "File | Directory"] = field(default_factory=dict)


def record(monkeypatch, folder: Path) -> list[tuple]:
    """The operations on files below `folder` from here on, in their order; each is done, too."""
    made, opened = [], {}

    def note(name: str, *paths: Path, more: tuple = ()) -> None:
        made.append((name, *(str(path.relative_to(folder)) for path in paths), *more))

    def create(path, real=disk.create):
        file = real(path)
        note("create", path)
        opened[file] = sum(each[0] == "create" for each in made)
        return file

    def write(file, data, real=disk.write):
        made.append(("write", opened[file], bytes(data)))
        real(file, data)

    def sync(file, real=disk.sync):
        made.append(("sync", opened[file]))
        real(file)

    monkeypatch.setattr(disk, "create", create)
    monkeypatch.setattr(disk, "write", write)
    monkeypatch.setattr(disk, "sync", sync)
    for name in ("make_directory", "sync_directory", "rename", "remove", "remove_directory"):
        monkeypatch.setattr(disk, name, partial(_both, note, name, getattr(disk, name)))
    return made


def _both(note, name: str, real, *paths: Path) -> None:
    real(*paths)
    note(name, *paths)


def moments(made: list[tuple]) -> Iterator[tuple[int, str, Tree]]:
    """What a disk that began empty holds after each number of operations: when the process was killed, when the power
    was lost, and when it was lost but names were durable early, which a file system may do."""
    root, files = Directory(), list[File]()
    for number, operation in enumerate([("begin",), *made]):
        _do(root, files, *operation)
        yield number, "killed", dict(_tree(root, False, False))
        yield number, "power lost", dict(_tree(root, True, True))
        yield number, "names early", dict(_tree(root, False, True))


def lay_out(tree: Tree, folder: Path) -> None:
    """Writes what a disk held into a new `folder`."""
    folder.mkdir()
    for path, data in tree.items():
        (folder / path).mkdir() if data is None else (folder / path).write_bytes(data)


def _do(root: Directory, files: list[File], name: str, *given) -> None:
    def place(path: str) -> tuple[Directory, str]:
        at, (*above, last) = root, Path(path).parts
        for part in above:
            at = at.names[part]
        return at, last

    match name, given:
        case (("make_directory" | "create"), [path]):
            at, last = place(path)
            at.names[last] = File() if name == "create" else Directory()
            if name == "create":
                files.append(at.names[last])
        case "write", [number, data]:
            files[number - 1].data += data
        case "sync", [number]:
            files[number - 1].durable = files[number - 1].data
        case "sync_directory", ["."]:
            root.durable = dict(root.names)
        case "sync_directory", [path]:
            at, last = place(path)
            at.names[last].durable = dict(at.names[last].names)
        case "rename", [old, new]:
            (at, last), (there, name) = place(old), place(new)
            there.names[name] = at.names.pop(last)
        case (("remove" | "remove_directory"), [path]):
            at, last = place(path)
            del at.names[last]


def _tree(at: Directory, names_lost: bool, bytes_lost: bool, before: str = "") -> Iterator[tuple[str, bytes | None]]:
    for name, each in (at.durable if names_lost else at.names).items():
        if isinstance(each, File):
            yield before + name, each.durable if bytes_lost else each.data
        else:
            yield before + name, None
            yield from _tree(each, names_lost, bytes_lost, f"{before}{name}/")
