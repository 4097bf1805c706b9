"""The files of a source: found by its name in the recipe, and opened. Imports no `datasets` and no torch.

Invariant: a wrong path, a kind of file and a file that cannot be opened are refused before a row is read.
"""

import csv
import functools
import gzip
import importlib.util
import io
import os
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import IO, Any

from shardbook.data.chitchat import DATASETS, chitchat_file
from shardbook.data.slices import split_slice
from shardbook.paths import is_hub_id
from shardbook.recipe import RecipeError, first_line, nearest

JSON = "json"  # read by json_rows.py, not by `datasets`
READERS = {".jsonl": JSON, ".json": JSON, ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
PACKED = (".gz", ".zst")  # may stand behind each of them
SAVED, HUB = "saved", "hub"  # a directory that `datasets` saved, and a hub id
MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}  # the first two bytes of a file
PACKED_BYTES = 2**16  # of a .zst file that are unpacked at once


@dataclass(frozen=True)
class Files:
    """The files of one source, of one kind."""

    reader: str  # of load_dataset, SAVED or HUB
    paths: list[Path]
    suffix: str = ""  # of READERS

    def label(self, path: Path) -> str:
        """Returns the name of one of the files, with the folders that tell it from others of the same name."""
        return str(path.relative_to(self._folder))

    @functools.cached_property
    def _folder(self) -> str:
        return os.path.commonpath([path.parent for path in self.paths])

    @property
    def separator(self) -> str:
        return "\t" if self.suffix == ".tsv" else ","


def source_names(spec: str | list[str]) -> list[str]:
    return [spec] if isinstance(spec, str) else spec or [""]


def source_keys(spec: str | list[str], what: str) -> list[tuple[str, str]]:
    """Returns each source's name, and what an error about its rows begins with: the key, and the name if several."""
    names = source_names(spec)
    return [(name, f"{what}, {name}" if len(names) > 1 else what) for name in names]


def find_sources(spec: str | list[str], what: str) -> list[Files]:
    """Returns the files of each source, as `find_files` does. Raises RecipeError."""
    return [find_files(name, what) for name in source_names(spec)]


def find_files(name: str, what: str) -> Files:
    """Returns the files of the source `name`. `what` is the recipe key, for errors. Raises RecipeError where there are
    none, or none that is read."""
    if not name:
        reason = f"needs a file, a pattern of files (rows/*.jsonl), a directory, a hub id or {' or '.join(DATASETS)}"
        raise RecipeError(f"{what} = '': {reason}")
    source, _ = split_slice(name, what)
    path = chitchat_file(source) if source in DATASETS else Path(source).expanduser()
    try:
        is_pattern = not path.exists() and bool(set(source) & set("*?["))
    except OSError as error:
        raise RecipeError(f"{what} = {name!r}: {error.strerror}") from None
    kind = "" if is_pattern else kind_of(path)
    if path.is_file() and not kind:
        reason = f"this kind of file is not read; {', '.join(READERS)} are, also with {' or '.join(PACKED)} behind"
        raise RecipeError(f"{what} = {name!r}: {reason}")
    if kind and not path.is_dir():
        if not path.is_file():
            raise RecipeError(f"{what} = {name!r}: no such file")
        return _readable(Files(READERS[kind], [path], kind), name, what)
    if is_pattern or path.is_dir():
        if (path / "state.json").is_file():
            return Files(SAVED, [path])
        # Path.glob refuses some patterns
        listed = map(Path, glob(str(path), recursive=True)) if is_pattern else path.iterdir()  # noqa: PTH207
        kinds = [(kind_of(file), file) for file in sorted(listed) if file.is_file()]
        for suffix, reader in READERS.items():
            if files := [file for kind, file in kinds if kind == suffix]:
                return _readable(Files(reader, files, suffix), name, what)
        reason = (
            "no file matches it that ends with" if is_pattern else "has no saved dataset, and no file that ends with"
        )
        hint = "; a slice behind a name is [start:stop], of counts or percents" * ("[" in name)
        raise RecipeError(f"{what} = {name!r}: {reason} {', '.join(READERS)}{hint}")
    if ":" in source and Path(source.partition(":")[0]).exists():
        raise RecipeError(f"{what} = {name!r}: a file or a directory has no splits; name the files of one")
    if not is_hub_id(source):
        ids = "owner/name, owner/name:split or owner/name:subset:split"
        raise RecipeError(f"{what} = {name!r}: no such directory, and not a hub id ({ids})")
    return Files(HUB, [])


def kind_of(path: Path) -> str:
    """Returns the suffix of READERS that `path` has, before one of PACKED; empty where it has none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    last = "".join(suffixes[-2:-1] if suffixes and suffixes[-1] in PACKED else suffixes[-1:])
    return last if last in READERS else ""


def _readable(files: Files, name: str, what: str) -> Files:
    """Returns `files`. Raises RecipeError where one cannot be opened, its text is UTF-16, or all are empty."""
    at = f"{what} = {name!r}"
    if any(path.suffix == ".zst" for path in files.paths) and importlib.util.find_spec("zstandard") is None:
        raise RecipeError(f"{at}: reading .zst needs the package zstandard: pip install zstandard")
    empty = True
    for path in files.paths:
        try:
            with open_file(path) as file:
                beginning = file.read(4)
                if path.suffix == ".parquet" and beginning and not _ends_whole(file):
                    raise EOFError("truncated, or not parquet: it does not end with PAR1")
        except (OSError, EOFError) as error:
            why = (isinstance(error, OSError) and error.strerror) or first_line(error)
            raise RecipeError(f"{at}: {path.name} cannot be read ({why})") from None
        empty = empty and not beginning
        if files.reader != "parquet" and (mark := MARKS.get(beginning[:2]) or ("UTF-16" if b"\0" in beginning else "")):
            way_out = f"iconv -f {mark} -t UTF-8 {path.name} > utf8-{path.name}"
            raise RecipeError(f"{at}: {path.name} is {mark}, and only UTF-8 is read; {way_out}")
    if empty:
        raise RecipeError(f"{at}: holds no rows")
    return files


def _ends_whole(file: IO[bytes]) -> bool:
    """Returns whether an open .parquet file ends as each does, which its reader says without the name of the file."""
    file.seek(-4, os.SEEK_END)
    return file.read() == b"PAR1"


def open_file(path: Path) -> IO[bytes]:
    if path.suffix == ".zst":
        return io.BufferedReader(_Zst(path))
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


class _Zst(io.RawIOBase):
    """Reads the content of a .zst file. Raises OSError where it is none, EOFError where its last frame has no end,
    which zstandard's own reader takes for the end of the file."""

    def __init__(self, path: Path) -> None:
        self.file, self.content = path.open("rb"), io.BytesIO()
        self.frame: Any = None  # a decompressobj that has not ended

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()

    def readinto(self, target: Any) -> int:
        while not (size := self.content.readinto(target)) and (packed := self.file.read(PACKED_BYTES)):
            self.content = io.BytesIO(self._unpack(packed))
        if not size and self.frame:
            raise EOFError("it ends in the middle of a frame")
        return size

    def _unpack(self, packed: bytes) -> bytes:
        import zstandard

        content = b""
        while packed:
            self.frame = self.frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                content += self.frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            packed = self.frame.unused_data if self.frame.eof else b""
            if self.frame.eof:
                self.frame = None
        return content


def csv_columns(files: Files) -> list[str]:
    """Returns the names in the first line of .csv or .tsv files: their columns are all read as text. Raises
    ValueError where a file has one twice, of which only one would be read, or separates them by ';'."""
    every = []
    for path in files.paths:
        with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as text:
            try:
                columns = next(csv.reader(text, delimiter=files.separator), [])
            except UnicodeDecodeError as error:
                raise ValueError(f"{path.name}: not UTF-8: {error}") from None
        if len(columns) == 1 and ";" in columns[0]:
            separated = f"is separated by ';'; only {files.separator!r} separates columns"
            raise ValueError(f"{path.name}: its first line, {columns[0]}, {separated}")
        if twice := [name for name in dict.fromkeys(columns) if columns.count(name) > 1]:
            column = f"its first line has the column {twice[0]!r} twice; rename one, or leave it out"
            raise ValueError(f"{path.name}: {column}")
        every.append(columns)
    return every[0]


def read_template(file: str) -> str:
    """Returns the text of data.chat_template; empty where the key is. Raises RecipeError."""
    try:
        return Path(file).expanduser().read_text() if file else ""
    except (OSError, ValueError) as error:
        is_text = "{" in file
        why = "is a template, not a file: write it to one" if is_text else f"cannot be read ({first_line(error)})"
        raise RecipeError(f"data.chat_template = {file[:60]!r}: {why}") from None


def taken_columns(
    columns: dict[str, str], columns_of_file: list[str], names: list[str], what: str, name: str
) -> dict[str, str]:
    """Returns the field that each column of the source `name` is read as, where data.columns says so. Raises
    RecipeError for a column that is not among `columns_of_file`, unless another of several sources may have it."""
    taken = {}
    for field, column in columns.items():
        if column in columns_of_file:
            if field in columns_of_file and field != column:
                both = f"has {column} and {field} too; leave one of them out of the rows"
                raise RecipeError(f"data.columns = {columns}: {what} = {name!r} {both}")
            taken[column] = field
        elif len(names) == 1 or field not in columns_of_file:
            lacks = f"{what} = {name!r} has no column {column}; it has {', '.join(columns_of_file)}"
            raise RecipeError(f"data.columns = {columns}: {lacks}{nearest(column, columns_of_file)}")
    return taken
