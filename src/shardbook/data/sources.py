"""Sources: a name in the recipe becomes a `datasets.Dataset` of raw rows. Knows nothing of tokens."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value, disable_progress_bars, load_dataset, load_from_disk
from datasets.config import HF_DATASETS_CACHE as CACHE

from shardbook.data.files import HUB, SAVED, Files, csv_columns, find_files, odd_line, source_names, taken_columns
from shardbook.recipe import RecipeError, first_line


def load_sources(spec: str | list[str], what: str, columns: dict[str, str] | None = None) -> list[Dataset]:
    """Returns the rows of each source, their columns named as data.columns says. `what` is the recipe key, for errors.
    Raises RecipeError."""
    if not sys.stderr.isatty():  # in a log file a bar is one endless line
        disable_progress_bars()
    names = source_names(spec)
    parts = [_load_one(name, what) for name in names]
    if columns:
        both = zip(names, parts, strict=True)
        parts = [
            part.rename_columns(taken_columns(columns, part.column_names, names, what, name)) for name, part in both
        ]
    if not any(len(part) for part in parts):
        raise RecipeError(f"{what} = {spec!r}: holds no rows")
    return parts


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
            said = f"{len(part)} rows of source {number} can be trained, and {share} are its share"
            raise RecipeError(f"data.weights = {weights}: {said}; leave it out of data.train")
    both = zip(parts, shares, strict=True)
    return np.concatenate([part[np.arange(share) * len(part) // share] for part, share in both])


def _load_one(name: str, what: str) -> Dataset:
    files = find_files(name, what)
    if files.reader == SAVED:
        loaded = load_from_disk(str(files.paths[0]))
        if not isinstance(loaded, Dataset):
            raise RecipeError(f"{what} = {name!r}: holds the splits {', '.join(loaded)}; name the directory of one")
        return loaded
    if files.reader != HUB:
        return _read(files, name, what)
    hub_id, _, split = name.partition(":")
    try:
        return load_dataset(hub_id, split=split or "train")
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{what} = {name!r}: the hub did not give it ({type(error).__name__}: {first_line(error)}). "
            f"If it is gated set HF_TOKEN; without a network set {what} to a local file"
        ) from None


def _read(files: Files, name: str, what: str) -> Dataset:
    how: dict[str, Any] = {}
    try:
        if files.reader == "csv":  # all as text: a number or a date would not come back as it was written
            texts = Features(dict.fromkeys(csv_columns(files), Value("string")))
            how = {"sep": files.separator, "features": texts, "keep_default_na": False}
        return load_dataset(files.reader, data_files=[str(file) for file in files.paths], split="train", **how)
    except Exception as error:  # from datasets, pyarrow or the reader itself: all mean an unreadable file
        if "corresponds to no data" in str(error):
            raise RecipeError(f"{what} = {name!r}: holds no rows") from None
        unknown = f"{first_line(error.__cause__ or error)}; where the file is whole, delete its copy in {CACHE}"
        why = next(filter(None, map(_odd_line, files.paths)), unknown)
        raise RecipeError(f"{what} = {name!r}: cannot be read as {files.reader} ({why})") from None


def _odd_line(file: Path) -> str:
    """Returns the first line of a .jsonl file that holds no row, and why; empty where there is none."""
    for number, line in enumerate(file.open("rb") if file.suffix == ".jsonl" else (), 1):
        if why := odd_line(line):
            return f"line {number} of {file.name}: {why}"
    return ""
