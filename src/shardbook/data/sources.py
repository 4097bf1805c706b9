"""Sources: a name in the recipe becomes a `datasets.Dataset` of raw rows. Knows nothing of tokens.

Rows of JSON are kept as text (json_rows.py), rows of tables in their columns; `read_raw` gives both as they are.
"""

import csv
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import xxhash
from datasets import Dataset, Features, Value, disable_progress_bars, load_dataset, load_dataset_builder, load_from_disk
from datasets.config import HF_DATASETS_CACHE as CACHE

from shardbook.data.find import (
    HUB,
    JSON,
    READERS,
    SAVED,
    Files,
    csv_columns,
    find_files,
    kind_of,
    open_file,
    source_names,
    taken_columns,
)
from shardbook.data.formats import RawRow, without_none
from shardbook.data.json_rows import VERSION, JsonRow, read_json_rows
from shardbook.data.slices import split_slice
from shardbook.paths import write_whole
from shardbook.recipe import RecipeError, first_line

JSON_COLUMNS = Features({name: Value("large_string" if name == "text" else "string") for name in JsonRow._fields})
ROWS_TOGETHER, LETTERS_TOGETHER = 10_000, 2**24  # of rows of JSON that are written at once
HASHED_TOGETHER = 2**24  # bytes


@dataclass(frozen=True)
class Source:
    """The raw rows of one source, as `read_raw` reads them."""

    table: Dataset  # of columns, or of JSON (JSON_COLUMNS)
    fields: dict[str, set[str]]  # in order: the names of the rows' fields, and the kinds of their values (KINDS)
    renames: dict[str, str]  # column -> the field that it is read as
    is_json: bool
    note: str = ""  # what a table's one type for all rows may have changed

    def __len__(self) -> int:
        return len(self.table)


def read_raw(columns: dict[str, list[Any]], renames: dict[str, str], is_json: bool) -> list[RawRow]:
    """Returns rows of a source's table, given by columns, with their fields as the recipe names them."""
    if is_json:
        rows: list[RawRow] = [json.loads(text) for text in columns["text"]]
    else:
        # a table has all rows' keys in each row
        rows = [without_none(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    return [{renames.get(name, name): value for name, value in row.items()} for row in rows] if renames else rows


def load_sources(spec: str | list[str], what: str, columns: dict[str, str] | None = None) -> list[Source]:
    """Returns the rows of each source, their columns named as data.columns says. `what` is the recipe key, for errors.
    Raises RecipeError."""
    if not sys.stderr.isatty():  # in a log file a bar is one endless line
        disable_progress_bars()
    names = source_names(spec)
    sources = []
    for name in names:
        files = find_files(name, what)
        local = files.reader != HUB
        source, part = split_slice(name, what)
        table, is_json = (_load_local(files, source, what), files.reader == JSON) if local else _load_hub(source, what)
        if part:
            if not (rows := part.rows(len(table))):
                raise RecipeError(f"{what} = {name!r}: this slice of it holds no rows")
            table = table.select(rows)
        fields = _fields_of_json(table) if is_json else _fields_of_columns(table)
        renames = taken_columns(columns or {}, list(fields), names, what, name)
        taken = {renames.get(name, name): kinds for name, kinds in fields.items()}
        sources.append(Source(table, taken, renames, is_json, "" if is_json else _note_of(table)))
    if not any(map(len, sources)):
        raise RecipeError(f"{what} = {spec!r}: holds no rows")
    return sources


def _fields_of_columns(table: Dataset) -> dict[str, set[str]]:
    return {name: {"text" if isinstance(kind, Value) else "a list"} for name, kind in table.features.items()}


def _fields_of_json(table: Dataset) -> dict[str, set[str]]:
    """Returns the fields that any row has, and the kinds of their values; a null has none."""
    fields: dict[str, set[str]] = {}
    for written in table.unique("fields"):
        for name, kind in json.loads(written).items():
            fields.setdefault(name, set()).update(filter(None, [kind]))
    return fields


def _note_of(table: Dataset) -> str:
    """Returns what a file of columns cannot say: a table deep inside a row, as a call's arguments, has the keys of all
    rows, so that a null of its own is as one of another's. Empty where no such table has a null."""
    some = table.data.slice(0, ROWS_TOGETHER)
    columns = zip(some.column_names, some.columns, strict=True)
    paths = [path for name, column in columns for chunk in column.chunks for path in _nulls(chunk, name, 0)]
    if not paths:
        return ""
    shown = ", ".join(list(dict.fromkeys(paths))[:3]) + ", ..." * (len(set(paths)) > 3)
    return f"all rows have one type: where {shown} is null it is left out, also where the row wrote null itself"


def _nulls(array: pa.Array, path: str, tables: int) -> Iterator[str]:
    """Yields the paths of nulls in tables that are inside of another one. A message's own are no loss: they are read as
    fields that are not there."""
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        yield from _nulls(array.flatten(), path, tables)
    elif pa.types.is_struct(array.type):
        for field, inside in zip(array.type, array.drop_null().flatten(), strict=True):
            if tables and inside.null_count:
                yield f"{path}.{field.name}"
            yield from _nulls(inside, f"{path}.{field.name}", tables + 1)


def mix(numbers: np.ndarray, counts: list[int], weights: list[float]) -> np.ndarray:
    """Returns as many row numbers as `numbers` has, shared among sources by weight, exact to a row (largest remainder):
    a source's rows repeat, or are left out, evenly. `counts`: rows of each source, in order. Raises RecipeError."""
    ends = np.cumsum(counts)
    parts = np.split(numbers, np.searchsorted(numbers, ends[:-1]))
    # divided by a power of two, which changes no share: else their sum may overflow
    parted = np.ldexp(np.array(weights, dtype=float), -math.frexp(max(weights))[1])
    exact = parted / sum(parted) * len(numbers)
    shares = np.floor(exact).astype(int)
    shares[np.argsort(shares - exact, kind="stable")[: len(numbers) - shares.sum()]] += 1
    for number, (part, share) in enumerate(zip(parts, shares, strict=True)):
        if not (len(part) and share):
            reason = f"{len(part)} rows of source {number} can be trained, and {share} are its share"
            raise RecipeError(f"data.weights = {weights}: {reason}; leave it out of data.train")
    both = zip(parts, shares, strict=True)
    return np.concatenate([part[np.arange(share) * len(part) // share] for part, share in both])


def _load_local(files: Files, name: str, what: str) -> Dataset:
    if files.reader == SAVED:
        try:
            loaded = load_from_disk(str(files.paths[0]))
        except IndexError:  # of `datasets`, for a table without a file
            raise RecipeError(f"{what} = {name!r}: holds no rows") from None
        if not isinstance(loaded, Dataset):
            raise RecipeError(f"{what} = {name!r}: holds the splits {', '.join(loaded)}; name the directory of one")
        return loaded
    return _read(files, name, what)


def hub_parts(name: str, what: str) -> tuple[str, str | None, str]:
    """Returns the hub id, subset and split of `owner/name`, `owner/name:split` or `owner/name:subset:split`. Raises
    RecipeError."""
    hub_id, *parts = name.split(":")
    if len(parts) > 2:
        raise RecipeError(f"{what} = {name!r}: must be owner/name, owner/name:split or owner/name:subset:split")
    return hub_id, (parts[0] or None) if len(parts) == 2 else None, parts[-1] or "train" if parts else "train"


def _load_hub(name: str, what: str) -> tuple[Dataset, bool]:
    """Returns the table of a hub id, and whether its rows are JSON: files of JSON are read as local ones are."""
    hub_id, subset, split = hub_parts(name, what)
    try:
        splits = _json_splits(hub_id, subset, split)
        if not splits:
            return load_dataset(hub_id, subset, split=split), False
    except (OSError, ValueError) as error:
        if listed := re.search(r"Config name is missing.*available configs: \[(.*?)\]", str(error), re.DOTALL):
            subsets = f"names no subset, and it has {listed[1]}; write {hub_id}:subset:{split}"
            raise RecipeError(f"{what} = {name!r}: {subsets}") from None
        raise RecipeError(
            f"{what} = {name!r}: the hub did not give it ({type(error).__name__}: {first_line(error)}). "
            f"If it is gated set HF_TOKEN; without a network set {what} to a local file"
        ) from None
    return _read_json(splits, split, f"{what} = {name!r}"), True


def _json_splits(hub_id: str, subset: str | None, split: str) -> dict[str, Files]:
    """Returns the files of each split that `split` names (train, or train+test), once they are here. Empty where they
    are not of JSON alone, or where the data set's own settings say that rows are in one field of a file. Which files
    they are is kept for later runs without a network."""
    named = ":".join(filter(None, (hub_id, subset, split)))
    known = Path(CACHE) / "json_rows" / f"{xxhash.xxh3_128_hexdigest(named.encode())}.json"
    try:
        builder = load_dataset_builder(hub_id, subset)
    except OSError:
        if not known.is_file():
            raise
        kept = json.loads(known.read_text())
        return {name: Files(JSON, list(map(Path, paths)), suffix) for name, (paths, suffix) in kept.items()}
    listed = builder.config.data_files or {}
    splits = {}
    for name in dict.fromkeys(split.split("+")):
        urls = list(listed.get(name, ()))
        suffixes = {kind_of(Path(url)) for url in urls}
        if (
            len(suffixes) != 1
            or READERS.get(suffix := suffixes.pop()) != JSON
            or getattr(builder.config, "field", None)
        ):
            return {}
        splits[name] = Files(JSON, list(map(Path, datasets.DownloadManager().download(urls))), suffix)
    known.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: [list(map(str, files.paths)), files.suffix] for name, files in splits.items()}
    write_whole(known, json.dumps(kept), is_shared=True)
    return splits


def _read_json(splits: dict[str, Files], split: str, source: str) -> Dataset:
    """Returns the table of JSON files. `source`: its key and name, for errors. Raises RecipeError."""
    try:
        return JsonTable(splits).load(split)
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        if "corresponds to no data" in str(error):
            raise RecipeError(f"{source}: holds no rows") from None
        why = first_line(error.__cause__ or error)  # `datasets` wraps what the reader raises
        raise RecipeError(f"{source}: cannot be read as json ({why})") from None


def _read(files: Files, name: str, what: str) -> Dataset:
    how: dict[str, Any] = {}
    source = f"{what} = {name!r}"
    if files.reader == JSON:
        return _read_json({"train": files}, "train", source)
    if files.reader == "csv":  # all as text: a number or a date would not come back as it was written
        try:
            texts = Features(dict.fromkeys(csv_columns(files), Value("string")))
        except (ValueError, csv.Error) as error:
            raise RecipeError(f"{source}: cannot be read as csv ({first_line(error)})") from None
        how = {"sep": files.separator, "features": texts, "keep_default_na": False}
    try:
        # `datasets` knows a file by its path and time: by the name it also knows it by what is in it
        paths = [str(file) for file in files.paths]
        return load_dataset(files.reader, _digest({"train": files}), data_files=paths, split="train", **how)
    except Exception as error:  # from datasets, pyarrow or the reader itself: all mean an unreadable file
        if "corresponds to no data" in str(error):
            raise RecipeError(f"{source}: holds no rows") from None
        why = f"{first_line(error.__cause__ or error)}; where the file is whole, delete its copy in {CACHE}"
        raise RecipeError(f"{source}: cannot be read as {files.reader} ({why})") from None


def _digest(splits: dict[str, Files]) -> str:
    """Returns a digest of the names, sizes and bytes of files, which is the same on every machine that has them."""
    digest = xxhash.xxh3_128()
    for split, files in splits.items():
        for path in files.paths:
            digest.update(f"{split} {files.label(path)} {path.stat().st_size} ".encode())
            with path.open("rb") as file:
                while part := file.read(HASHED_TOGETHER):
                    digest.update(part)
    return digest.hexdigest()


class JsonTable(datasets.ArrowBasedBuilder):  # type: ignore[misc, unused-ignore]
    """The rows of JSON files as a table of JSON_COLUMNS. `datasets` keeps it where it keeps all tables, under a digest
    of what the files hold: a file that changes is read again, whatever its time says."""

    def __init__(self, splits: dict[str, Files]) -> None:
        self.splits = splits
        super().__init__(dataset_name="json_rows", config_name=f"{VERSION}-{_digest(splits)}")

    def load(self, split: str) -> Dataset:
        """Returns the table, which is made where this has not been done before. Raises ValueError for a bad row."""
        self.download_and_prepare()
        return self.as_dataset(split)  # type: ignore[no-any-return, return-value, unused-ignore]

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=JSON_COLUMNS)

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        return [datasets.SplitGenerator(name=name, gen_kwargs={"split": name}) for name in self.splits]

    def _generate_tables(self, split: str) -> Iterator[tuple[Any, pa.Table]]:
        files, rows = self.splits[split], list[JsonRow]()
        number = letters = 0
        for path in files.paths:
            with open_file(path) as file:
                for row in read_json_rows(file, files.label(path), files.suffix):
                    rows.append(row)
                    letters += len(row.text)
                    if len(rows) == ROWS_TOGETHER or letters >= LETTERS_TOGETHER:
                        yield (0, number), _table_of(rows)
                        rows, number, letters = [], number + 1, 0
        if rows:
            yield (0, number), _table_of(rows)


def _table_of(rows: list[JsonRow]) -> pa.Table:
    return pa.table(dict(zip(JsonRow._fields, zip(*rows, strict=True), strict=True)), JSON_COLUMNS.arrow_schema)
