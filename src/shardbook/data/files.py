"""The files of a source: found by its name in the recipe, their first row read without `datasets` and without torch.

Invariant: a launcher refuses a wrong path, a kind of file or a broken first row with the words that a rank would use.
"""

import csv
import functools
import gzip
import importlib.util
import io
import itertools
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import IO, Any

from shardbook.data.chitchat import DATASETS, chitchat_file
from shardbook.data.fields import read_fields
from shardbook.data.formats import RawRow, read_row, without_none
from shardbook.data.json_rows import read_json_rows
from shardbook.data.pairs import split_pair
from shardbook.data.slices import split_slice
from shardbook.paths import is_hub_id
from shardbook.recipe import Data, RecipeError, first_line, nearest

JSON = "json"  # read by json_rows.py, not by `datasets`
READERS = {".jsonl": JSON, ".json": JSON, ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
PACKED = (".gz", ".zst")  # may stand behind each of them
SAVED, HUB = "saved", "hub"  # a directory that `datasets` saved, and a hub id
MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}  # the first two bytes of a file
PACKED_BYTES = 2**16  # of a .zst file that are unpacked at once
LONGEST = 2**31 - 1  # characters of a field of a .csv file: any, where Python's own reader takes 131,072
BEGINNING = 2**20  # bytes of a .json file that are looked at


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


def find_files(name: str, what: str) -> Files:
    """Returns the files of the source `name`. `what` is the recipe key, for errors. Raises RecipeError where there are
    none, or none that is read."""
    if not name:
        said = f"needs a file, a pattern of files (rows/*.jsonl), a directory, a hub id or {' or '.join(DATASETS)}"
        raise RecipeError(f"{what} = '': {said}")
    source, _ = split_slice(name, what)
    path = chitchat_file(source) if source in DATASETS else Path(source).expanduser()
    try:
        is_pattern = not path.exists() and bool(set(source) & set("*?["))
    except OSError as error:
        raise RecipeError(f"{what} = {name!r}: {error.strerror}") from None
    kind = "" if is_pattern else kind_of(path)
    if path.is_file() and not kind:
        said = f"this kind of file is not read; {', '.join(READERS)} are, also with {' or '.join(PACKED)} behind"
        raise RecipeError(f"{what} = {name!r}: {said}")
    if kind and not path.is_dir():
        if not path.is_file():
            raise RecipeError(f"{what} = {name!r}: no such file")
        return _readable(Files(READERS[kind], [path], kind), name, what)
    if is_pattern or path.is_dir():
        if (path / "state.json").is_file():
            return Files(SAVED, [path])
        # Path.glob refuses some patterns
        listed = map(Path, glob(str(path), recursive=True)) if is_pattern else path.iterdir()  # noqa: PTH207
        there = [(kind_of(file), file) for file in sorted(listed) if file.is_file()]
        for suffix, reader in READERS.items():
            if files := [file for kind, file in there if kind == suffix]:
                return _readable(Files(reader, files, suffix), name, what)
        said = "no file matches it that ends with" if is_pattern else "has no saved dataset, and no file that ends with"
        hint = "; a slice behind a name is [start:stop], of counts or percents" * ("[" in name)
        raise RecipeError(f"{what} = {name!r}: {said} {', '.join(READERS)}{hint}")
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
    said = f"{what} = {name!r}"
    if any(path.suffix == ".zst" for path in files.paths) and importlib.util.find_spec("zstandard") is None:
        raise RecipeError(f"{said}: reading .zst needs the package zstandard: pip install zstandard")
    empty = True
    for path in files.paths:
        try:
            with open_file(path) as file:
                beginning = file.read(4)
        except (OSError, EOFError) as error:
            why = (isinstance(error, OSError) and error.strerror) or first_line(error)
            raise RecipeError(f"{said}: {path.name} cannot be read ({why})") from None
        empty = empty and not beginning
        if files.reader != "parquet" and (mark := MARKS.get(beginning[:2]) or ("UTF-16" if b"\0" in beginning else "")):
            way_out = f"iconv -f {mark} -t UTF-8 {path.name} > utf8-{path.name}"
            raise RecipeError(f"{said}: {path.name} is {mark}, and only UTF-8 is read; {way_out}")
    if empty:
        raise RecipeError(f"{said}: holds no rows")
    return files


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
    ValueError where a file has one twice."""
    every = []
    for path in files.paths:
        with _text(path) as text:
            every.append(next(csv.reader(text, delimiter=files.separator), []))
        _check_once(every[-1], path)
    return every[0]


def _check_once(columns: Sequence[str], path: Path) -> None:
    """Raises ValueError for a column that is there twice: only one of the two would be read."""
    if twice := [name for name in dict.fromkeys(columns) if columns.count(name) > 1]:
        raise ValueError(f"{path.name}: its first line has the column {twice[0]!r} twice; rename one, or leave it out")


def _text(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="")


def read_template(file: str) -> str:
    """Returns the text of data.chat_template; empty where the key is. Raises RecipeError."""
    try:
        return Path(file).expanduser().read_text() if file else ""
    except (OSError, ValueError) as error:
        is_text = "{" in file
        why = "is a template, not a file: write it to one" if is_text else f"cannot be read ({first_line(error)})"
        raise RecipeError(f"data.chat_template = {file[:60]!r}: {why}") from None


def check_first_rows(data: Data, spec: str | list[str], what: str, sequences: int) -> None:
    """Raises RecipeError where a source of `spec` cannot be found or opened, or its first row cannot be trained."""
    for name, at in source_keys(spec, what):
        files = find_files(name, what)
        row, place = _first_row(files, name, what)
        if row is None or (files.reader == JSON and not row.keys() >= {*data.columns.values()}):
            continue  # another row of JSON may have the column
        taken = taken_columns(data.columns, list(row), source_names(spec), what, name)
        row = row if files.reader == JSON else without_none(row)
        row, at = {taken.get(key, key): value for key, value in row.items()}, f"{at}: row 0"
        try:
            row, _ = read_fields(row, at, sequences == 2, data.columns)
            both = zip(split_pair(row, at), (", chosen", ", rejected"), strict=True) if sequences == 2 else [(row, "")]
            for side, more in both:
                read_row(side, at + more, data.system, data.train_on)
        except RecipeError as error:
            raise RecipeError(f"{error}{place}") from None


def taken_columns(columns: dict[str, str], there: list[str], names: list[str], what: str, name: str) -> dict[str, str]:
    """Returns the field that each column of the source `name` is read as, where data.columns says so. `there`: its
    columns. Raises RecipeError for one that it has not, unless another of several sources may have it."""
    taken = {}
    for field, column in columns.items():
        if column in there:
            if field in there and field != column:
                both = f"has {column} and {field} too; leave one of them out of the rows"
                raise RecipeError(f"data.columns = {columns}: {what} = {name!r} {both}")
            taken[column] = field
        elif len(names) == 1 or field not in there:
            lacks = f"{what} = {name!r} has no column {column}; it has {', '.join(there)}"
            raise RecipeError(f"data.columns = {columns}: {lacks}{nearest(column, there)}")
    return taken


def _first_row(files: Files, name: str, what: str) -> tuple[RawRow | None, str]:
    """Returns the first row of `files`, None where only `datasets` can read it, and its place as an error ends with it.
    Raises RecipeError where it is broken or there is none."""
    if files.reader in (SAVED, HUB):
        return None, ""
    said = f"{what} = {name!r}"
    for path in files.paths:
        try:
            if files.reader == "parquet":
                import pyarrow.parquet as parquet

                first: Any = next(parquet.ParquetFile(path).iter_batches(batch_size=1), None)
                rows = [(row, "") for row in first.to_pylist()] if first is not None else []
            elif files.reader == "csv":
                with _text(path) as text:
                    rows = [(row, "") for row in _first_of_table(text, path, files.separator)]
            else:
                rows = _first_of_json(path, files)
        except UnicodeDecodeError as error:
            raise RecipeError(f"{said}: cannot be read as {files.reader} (not UTF-8: {first_line(error)})") from None
        except (OSError, EOFError, zlib.error, ValueError, csv.Error) as error:  # of pyarrow: ValueErrors or OSErrors
            why = first_line(error)
            why = why if path.name in why else f"{path.name}: {why}"
            raise RecipeError(f"{said}: cannot be read as {files.reader} ({why})") from None
        if rows:
            return rows[0]
    raise RecipeError(f"{said}: holds no rows")


def _first_of_table(text: io.TextIOWrapper, path: Path, separator: str) -> list[RawRow]:
    """Returns the first row of a .csv or .tsv file, in a list that is empty where there is none. Raises ValueError
    where the names of columns are broken."""
    csv.field_size_limit(LONGEST)
    rows = csv.DictReader(text, delimiter=separator)
    if len(names := list(rows.fieldnames or ())) == 1 and ";" in names[0]:
        raise ValueError(f"{path.name}: its first line, {names[0]}, is separated by ';'; only ',' separates columns")
    _check_once(names, path)
    return list(itertools.islice(rows, 1))


def _first_of_json(path: Path, files: Files) -> list[tuple[RawRow | None, str]]:
    """Returns the first row and its place, in a list that is empty where there is none; None as the row where a long
    file begins with one that is longer than its BEGINNING, or broken. Raises ValueError where a row is broken."""
    name, more = files.label(path), b""
    with open_file(path) as file:
        if files.suffix != ".jsonl":
            beginning, more = file.read(BEGINNING), file.read(1)
            # the row that is cut is left out
            file = io.BytesIO(beginning[: beginning.rfind(b"}") + 1] if more else beginning)
        try:
            rows = itertools.islice(read_json_rows(file, name, files.suffix), 1)
            first: list[tuple[RawRow | None, str]] = [(json.loads(row.text), f" ({row.place})") for row in rows]
        except ValueError:
            if not more:
                raise
            first = []
    return first or [(None, "")] * bool(more)
