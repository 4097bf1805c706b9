"""Encoding: raw rows of a source become the columns of its encoded table, which `datasets` caches.

The cache's key is a fingerprint of the source, the tokenizer's content and the settings of an Encoding.
"""

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from shardbook.data.chat import Encoded, Encoder
from shardbook.data.fields import read_fields
from shardbook.data.find import read_template
from shardbook.data.formats import RawRow
from shardbook.data.pairs import split_pair
from shardbook.data.sources import Source, read_raw
from shardbook.recipe import RecipeError, first_line

ENCODING_VERSION = 9  # raise it when an Encoder's result changes: the cache is keyed by it
# encoded at once; 64 rows are a seventh slower, a token takes 100 bytes meanwhile
ROWS_TOGETHER, BYTES_TOGETHER = 512, 4_000_000


@dataclass(frozen=True)
class Encoding:
    """The settings that determine a row's tokens; `datasets` hashes them as the key of its cache."""

    folder: str
    tokenizer_digest: str
    max_length: int
    what: str
    sequences: int  # of an example
    chat_template: str  # the text; empty: the tokenizer's own
    chat_template_kwargs: str  # as JSON
    system: str
    train_on: str
    columns: tuple[str, ...]  # fields that data.columns names
    clock: str  # the day that the template reads; empty where it reads none
    version: int = ENCODING_VERSION


def load_tokenizer(folder: Path, what: str, chat_template: str = "") -> PreTrainedTokenizerBase:
    """Returns the tokenizer in `folder`, with the template in the file `chat_template` where one is named. Raises
    RecipeError without a tokenizer that maps tokens to characters (a fast one)."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception on a malformed file
        why = first_line(error) if (folder / "tokenizer.json").exists() else "it has no tokenizer.json"
        raise RecipeError(f"{what}: no usable tokenizer in {folder} ({why}); set model.tokenizer") from None
    if not tokenizer.is_fast:
        needed = "a fast one (tokenizer.json), which the loss mask needs"
        raise RecipeError(f"{what}: the tokenizer in {folder} is not {needed}")
    if chat_template:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def encode_source(source: Source, encoding: Encoding, num_proc: int) -> Dataset:
    """Returns the encoded rows of a source, as Documents has them. Raises RecipeError naming key and row."""
    raw = source.table
    fit = BYTES_TOGETHER * len(raw) // max(1, raw.data.nbytes)  # rows of the mean size
    try:
        return raw.map(
            _encode,
            with_indices=True,
            batched=True,
            batch_size=min(ROWS_TOGETHER, max(1, fit)),
            fn_kwargs={"encoding": encoding, "renames": source.renames, "is_json": source.is_json},
            remove_columns=raw.column_names,
            num_proc=num_proc if num_proc > 1 else None,
        )
    except UnicodeDecodeError as error:
        before = error.object[: error.start][-40:].decode(errors="replace")
        raise RecipeError(f"{encoding.what}: not UTF-8: byte {error.object[error.start]:#x} after {before!r}") from None


def unread_fields(encoded: Dataset) -> tuple[str, ...]:
    """Returns the names of fields that some row has and that are not read, in the order of the rows."""
    every = encoded.data.column("unread").unique().to_pylist()
    return tuple(dict.fromkeys(name for names in every for name in json.loads(names)))


def digest_tokenizer(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    template = json.dumps(template, sort_keys=True) if isinstance(template, dict) else str(template)
    content = tokenizer.backend_tokenizer.to_str() + template + str(tokenizer.eos_token)
    return hashlib.sha256(content.encode()).hexdigest()


def _encode(
    rows: dict[str, list[Any]], indices: list[int], encoding: Encoding, renames: dict[str, str], is_json: bool
) -> dict[str, list[Any]]:
    """Returns a batch of a source's raw rows as encoded ones, both by columns."""
    raw = read_raw(rows, renames, is_json)
    wheres = [f"{encoding.what}: row {index}" for index in indices]
    try:
        encoded, unread = _encode_rows(raw, wheres, encoding)
    except RecipeError as error:
        raise RecipeError(f"{error}{_place(str(error), wheres, rows['place'] if is_json else [])}") from None
    every, most = encoding.sequences, encoding.max_length
    grouped = [encoded[first : first + every] for first in range(0, len(encoded), every)]
    # the first token of a sequence is never predicted, so never trained; an example is not trained where one of its
    # sequences has no trained token, nor a pair of equal sequences
    trained = [[int(part.mask[1:most].sum()) for part in parts] for parts in grouped]
    is_same = [every > 1 and np.array_equal(parts[0].ids[:most], parts[-1].ids[:most]) for parts in grouped]
    return {
        "input_ids": [np.concatenate([part.ids[:most] for part in parts]) for parts in grouped],
        "mask": [np.concatenate([part.mask[:most] for part in parts]) for parts in grouped],
        "lengths": [[min(most, len(part.ids)) for part in parts] for parts in grouped],
        "length": [sum(min(most, len(part.ids)) for part in parts) for parts in grouped],
        "trained": [sum(counts) * (all(counts) and not same) for counts, same in zip(trained, is_same, strict=True)],
        "chosen": [counts[0] for counts in trained],
        "cut": [any(len(part.ids) > most for part in parts) for parts in grouped],
        "content": [_content([(part.ids[:most], part.mask[:most]) for part in parts]) for parts in grouped],
        "unread": unread,
    }


def _encode_rows(raw: list[RawRow], wheres: list[str], encoding: Encoding) -> tuple[list[Encoded], list[str]]:
    """Returns each row, or both sides of each pair, encoded, and the names of each row's fields that are not read, as
    JSON."""
    is_pair = encoding.sequences == 2
    both = [read_fields(row, at, is_pair, encoding.columns) for row, at in zip(raw, wheres, strict=True)]
    rows = [row for row, _ in both]
    if is_pair:
        rows = [side for row, where in zip(rows, wheres, strict=True) for side in split_pair(row, where)]
        wheres = [f"{where}, {name}" for where in wheres for name in ("chosen", "rejected")]
    encoded = _cached_encoder(encoding).encode(rows, wheres)
    unread = []
    for number, (_, left) in enumerate(both):
        sides = encoded[number * encoding.sequences : (number + 1) * encoding.sequences]
        inside = dict.fromkeys(f"{name} of messages" for side in sides for name in side.unread)
        unread.append(json.dumps([*left, *inside]))
    return encoded, unread


def _place(error: str, wheres: list[str], places: list[str]) -> str:
    """Returns the line and the file of the row that an error names, in brackets; empty where `places` has none."""
    both = zip(wheres, places, strict=False)
    return next((f" ({place})" for where, place in both if error.startswith((f"{where}:", f"{where},"))), "")


def _content(parts: list[tuple[np.ndarray, np.ndarray]]) -> int:
    """Returns a digest of the ids and masks of an example's sequences: made with them, so that a resume reads 8 bytes a
    document to know that none has changed."""
    digest = hashlib.blake2b(digest_size=8)
    for ids, mask in parts:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.astype("<i8").tobytes())
        digest.update(mask.astype("?").tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


@functools.lru_cache(maxsize=2)
def _cached_encoder(encoding: Encoding) -> Encoder:
    tokenizer = load_tokenizer(Path(encoding.folder), "model.tokenizer")
    if encoding.chat_template:
        tokenizer.chat_template = encoding.chat_template
    kwargs = json.loads(encoding.chat_template_kwargs)
    return Encoder(tokenizer, encoding.system, encoding.train_on, kwargs, encoding.clock)
