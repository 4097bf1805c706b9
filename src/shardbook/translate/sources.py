"""The names of data sets in other programs' files, as sources of data.train."""

from pathlib import Path
from typing import Any

from shardbook.data.slices import split_slice
from shardbook.paths import is_hub_id
from shardbook.recipe import RecipeError
from shardbook.translate.rules import Refused, Settings

FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".gz", ".zst", ".txt")


def listed(value: Any) -> list[str]:
    """Returns a list, also one written as text with commas."""
    return [str(part).strip() for part in (value.split(",") if isinstance(value, str) else value) if str(part).strip()]


def is_of_hub(name: Any) -> bool:
    """Returns whether a data set's name is a hub id, not a file or a directory."""
    return isinstance(name, str) and is_hub_id(name) and not Path(name).exists() and Path(name).suffix not in FILES


def source_of(path: Any, split: Any = None, subset: Any = None) -> str:
    """Returns a source of data.train: a file, a directory, or a hub id with its subset, split and slice. Raises
    Refused."""
    if not isinstance(path, str) or not path:
        raise Refused("must be the name of a data set")
    split, bracket, part = str(split or "train").partition("[")
    parts = [] if subset in (None, "", "default") else [subset]
    parts += [split] if parts or split != "train" else []
    if parts and not is_of_hub(path):
        raise Refused(f"{path}: {':'.join(parts)} of files here has no counterpart: name its files in data.train")
    return checked(":".join([path, *parts]) + bracket + part)


def checked(source: str) -> str:
    """Returns a source whose slice, if it has one, data.train can have. Raises Refused."""
    try:
        name, _ = split_slice(source, "data.train")
    except RecipeError as error:
        raise Refused(str(error)) from None
    if "[" in name:
        raise Refused(f"{source}: a slice is [start:stop] at the end, of counts or percents")
    return source


def one_or_list(names: list[Any]) -> Any:
    return names[0] if len(names) == 1 else names


def columns_of(names: dict[str, Any]) -> Settings:
    """Returns data.columns for the fields whose columns have other names."""
    columns = {field: column for field, column in names.items() if column and column != field}
    return {"data.columns": columns} if columns else {}
