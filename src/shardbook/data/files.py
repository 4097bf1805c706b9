"""The files of a source: found by its name in the recipe, their first row read without `datasets` and without torch.

Invariant: a launcher refuses a wrong path, a kind of file or a broken first row with the words that a rank would use.
"""

import csv
import gzip
import importlib.util
import io
import itertools
import json
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import IO, Any

from shardbook.data.chitchat import DATASETS, chitchat_file
from shardbook.data.formats import RawRow, read_row, split_pair
from shardbook.paths import is_hub_id
from shardbook.recipe import Data, RecipeError, first_line, nearest

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
PACKED = (".gz", ".zst")  # may stand behind each of them
SAVED, HUB = "saved", "hub"  # a directory that `datasets` saved, and a hub id
MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}  # the first two bytes of a file
BEGINNING = 2**20  # characters of a .json file that are looked at


@dataclass(frozen=True)
class Files:
    """The files of one source, of one kind."""

    reader: str  # of load_dataset, SAVED or HUB
    paths: list[Path]
    suffix: str = ""  # of READERS

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
    path = chitchat_file(name) if name in DATASETS else Path(name).expanduser()
    is_pattern = bool(set(name) & set("*?[")) and not path.exists()
    kind = "" if is_pattern else _kind(path)
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
        there = [(_kind(file), file) for file in sorted(listed) if file.is_file()]
        for suffix, reader in READERS.items():
            if files := [file for kind, file in there if kind == suffix]:
                return _readable(Files(reader, files, suffix), name, what)
        said = "no file matches it that ends with" if is_pattern else "has no saved dataset, and no file that ends with"
        raise RecipeError(f"{what} = {name!r}: {said} {', '.join(READERS)}")
    if not is_hub_id(name):
        raise RecipeError(f"{what} = {name!r}: no such directory, and not a hub id (owner/name or owner/name:split)")
    return Files(HUB, [])


def _kind(path: Path) -> str:
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
            with _open(path) as file:
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


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".zst":
        import zstandard

        return zstandard.open(path, "rb")  # type: ignore[no-any-return, unused-ignore]
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def csv_columns(files: Files) -> list[str]:
    """Returns the names in the first line of .csv or .tsv files: their columns are all read as text."""
    with _text(files.paths[0]) as text:
        return next(csv.reader(text, delimiter=files.separator), [])


def _text(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="")


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
        row = _first_row(find_files(name, what), name, what)
        if row is None:
            continue
        taken = taken_columns(data.columns, list(row), source_names(spec), what, name)
        row, at = {taken.get(key, key): value for key, value in row.items()}, f"{at}: row 0"
        sides = zip(split_pair(row, at), (", chosen", ", rejected"), strict=True) if sequences == 2 else [(row, "")]
        for side, more in sides:
            read_row(side, at + more, data.system, data.train_on)


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


def _first_row(files: Files, name: str, what: str) -> RawRow | None:
    """Returns the first row of `files`; None where only `datasets` can read it. Raises RecipeError where it is broken
    or there is none."""
    if files.reader in (SAVED, HUB):
        return None
    said = f"{what} = {name!r}"
    for path in files.paths:
        try:
            if files.reader == "parquet":
                import pyarrow.parquet as parquet

                first: Any = next(parquet.ParquetFile(path).iter_batches(batch_size=1), None)
                rows = first.to_pylist() if first is not None else []
            else:
                with _text(path) as text:
                    rows = _first_of_text(text, files)
        except UnicodeDecodeError as error:
            raise RecipeError(f"{said}: cannot be read as {files.reader} (not UTF-8: {first_line(error)})") from None
        except (OSError, ValueError, csv.Error) as error:  # pyarrow's errors are ValueErrors or OSErrors
            raise RecipeError(f"{said}: cannot be read as {files.reader} ({path.name}: {first_line(error)})") from None
        if rows is None or rows:
            return rows[0] if rows else None
    raise RecipeError(f"{said}: holds no rows")


def _first_of_text(text: io.TextIOWrapper, files: Files) -> list[RawRow] | None:
    """Returns the first row, in a list that is empty where there is none; None where it may be one of another form.
    Raises ValueError where it is broken."""
    if files.reader == "csv":
        rows = csv.DictReader(text, delimiter=files.separator)
        if len(names := list(rows.fieldnames or ())) == 1 and ";" in names[0]:
            raise ValueError(f"its first line, {names[0]}, is separated by ';'; only ',' separates columns")
        return list(itertools.islice(rows, 1))
    if files.suffix == ".jsonl":
        number, line = next(((number, line) for number, line in enumerate(text, 1) if line.strip()), (0, ""))
        if why := odd_line(line):
            raise ValueError(f"line {number}: {why}")
        return [json.loads(line)] if line else []
    beginning = text.read(BEGINNING).lstrip()
    if not beginning.startswith("["):
        return None if beginning else []  # lines of rows, or one table with the rows in a field
    try:
        row, _ = json.JSONDecoder().raw_decode(beginning[1:].lstrip())
    except ValueError:
        return None  # longer than the beginning, or broken, which datasets says
    return [row] if isinstance(row, dict) else None


def odd_line(line: str | bytes) -> str:
    """Returns the reason why a line of a .jsonl file holds no row; empty where it does, or is blank."""
    try:
        return "" if not line.strip() or isinstance(json.loads(line), dict) else "is no table of fields"
    except ValueError as error:
        return first_line(error)
