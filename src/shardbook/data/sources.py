"""Sources: a name in the recipe becomes a `datasets.Dataset` of raw rows. Knows nothing of tokens."""

import json
import math
import sys
from pathlib import Path

import numpy as np
from datasets import Dataset, disable_progress_bars, load_dataset, load_from_disk
from datasets.config import HF_DATASETS_CACHE as CACHE

from shardbook.data.chitchat import DATASETS, chitchat_file
from shardbook.paths import is_hub_id
from shardbook.recipe import RecipeError, first_line

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def source_names(spec: str | list[str]) -> list[str]:
    return [spec] if isinstance(spec, str) else spec


def load_sources(spec: str | list[str], what: str) -> list[Dataset]:
    """Returns the rows of each source. `what` is the recipe key, for errors. Raises RecipeError."""
    if not sys.stderr.isatty():  # in a log file a bar is one endless line
        disable_progress_bars()
    parts = [_load_one(name, what) for name in source_names(spec)]
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
    if not name:
        raise RecipeError(f"{what} = '': needs a file, a directory, a hub id or {' or '.join(DATASETS)}")
    path = chitchat_file(name) if name in DATASETS else Path(name).expanduser()
    reader = READERS.get(path.suffix.lower())
    if path.is_file() and not reader:
        raise RecipeError(f"{what} = {name!r}: this kind of file is not read; {', '.join(READERS)} are")
    if reader and not path.is_dir():
        if not path.is_file():
            raise RecipeError(f"{what} = {name!r}: no such file")
        return _read(reader, [path], name, what)
    if path.is_dir():
        if (path / "state.json").is_file():
            loaded = load_from_disk(str(path))
            if not isinstance(loaded, Dataset):
                raise RecipeError(f"{what} = {name!r}: holds the splits {', '.join(loaded)}; name the directory of one")
            return loaded
        for suffix, reader in READERS.items():
            if files := sorted(file for file in path.glob(f"*{suffix}") if file.is_file()):
                return _read(reader, files, name, what)
        raise RecipeError(f"{what} = {name!r}: the directory has no {', '.join(READERS)} file and no saved dataset")
    if not is_hub_id(name):
        raise RecipeError(f"{what} = {name!r}: no such directory, and not a hub id (owner/name or owner/name:split)")
    hub_id, _, split = name.partition(":")
    try:
        return load_dataset(hub_id, split=split or "train")
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{what} = {name!r}: the hub did not give it ({type(error).__name__}: {first_line(error)}). "
            f"If it is gated set HF_TOKEN; without a network set {what} to a local file"
        ) from None


def _read(reader: str, files: list[Path], name: str, what: str) -> Dataset:
    if not any(file.stat().st_size for file in files):
        raise RecipeError(f"{what} = {name!r}: holds no rows")
    try:
        return load_dataset(reader, data_files=[str(file) for file in files], split="train")
    except Exception as error:  # from datasets, pyarrow or the reader itself: all mean an unreadable file
        if "corresponds to no data" in str(error):
            raise RecipeError(f"{what} = {name!r}: holds no rows") from None
        unknown = f"{first_line(error.__cause__ or error)}; where the file is whole, delete its copy in {CACHE}"
        why = next(filter(None, map(_odd_line, files)), unknown)
        raise RecipeError(f"{what} = {name!r}: cannot be read as {reader} ({why})") from None


def _odd_line(file: Path) -> str:
    """Returns the first line of a .jsonl file that holds no row, and why; empty where there is none."""
    for number, line in enumerate(file.open("rb") if file.suffix == ".jsonl" else (), 1):
        try:
            why = "" if not line.strip() or isinstance(json.loads(line), dict) else "is no table of fields"
        except ValueError as error:
            why = first_line(error)
        if why:
            return f"line {number} of {file.name}: {why}"
    return ""
