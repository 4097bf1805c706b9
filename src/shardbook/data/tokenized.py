"""Tokenised rows: encode, cut, check and cache, then lay the documents out in rows of the model.

`datasets` caches the encoding under a fingerprint of the source, the tokenizer's content and the settings.
A row of the model is a tuple of document numbers; packing only changes how many are in it.
"""

import bisect
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from shardbook.data.chat import Encoder
from shardbook.data.sources import load_source
from shardbook.recipe import Data, RecipeError, first_line

ENCODING_VERSION = 1  # raise it when an Encoder returns something else: the cache is keyed by it
ENCODED_TOGETHER = 64  # rows: offsets of a token are two Python integers for a while
SPLIT_SEED = 0  # of the held-out rows: the same for every train.seed, else another seed would train on them
Row = tuple[int, ...]


@dataclass(frozen=True)
class Encoding:
    """What determines the tokens of a row; hashed by `datasets` as the key of its cache."""

    folder: str
    tokenizer_digest: str
    max_length: int
    what: str
    version: int = ENCODING_VERSION


@dataclass(frozen=True)
class Documents:
    """Encoded documents and the rows they are laid out in."""

    encoded: Dataset  # columns input_ids, mask: lists of int and bool; length, trained: int; cut: bool
    rows: list[Row]
    mean_length: float  # tokens of a document
    summary: str


def load_tokenizer(folder: Path, what: str) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`. Raises RecipeError without one that maps tokens to characters (a fast one)."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception on a malformed file
        raise RecipeError(f"{what}: no usable tokenizer in {folder} ({first_line(error)})") from None
    if not tokenizer.is_fast:
        needed = "a fast one (tokenizer.json), which the loss mask needs"
        raise RecipeError(f"{what}: the tokenizer in {folder} is not {needed}")
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Raise RecipeError where the tokenizer knows ids that the model has no embedding for."""
    if len(tokenizer) > config.vocab_size:
        raise RecipeError(
            f"model.tokenizer: has {len(tokenizer)} tokens, the model {config.vocab_size} embeddings; "
            "use the tokenizer that belongs to the model"
        )


def build_documents(data: Data, tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[Documents, Documents | None]:
    """Training and held-out documents (None without `eval` and `eval_size`). Raises RecipeError naming key and row."""
    encoded, usable = _encode_source(data.train, "data.train", data, tokenizer, folder)
    dropped, held_out = len(encoded) - len(usable), None
    if data.eval:
        other, documents = _encode_source(data.eval, "data.eval", data, tokenizer, folder)
        held_out = _lay_out(other, documents, data, len(other) - len(documents))
    elif data.eval_size:
        size, rows = data.eval_size, len(usable)
        count = int(size) if size >= 1 else max(1, round(size * rows))
        if count >= rows:
            raise RecipeError(f"data.eval_size = {size}: holds out all of the {rows} rows of data.train")
        order = np.random.RandomState(SPLIT_SEED).permutation(usable)
        held_out, usable = _lay_out(encoded, np.sort(order[:count]), data, 0), np.sort(order[count:])
    return _lay_out(encoded, usable, data, dropped), held_out


def _encode_source(
    spec: str | list[str], what: str, data: Data, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> tuple[Dataset, np.ndarray]:
    """The encoded rows of one source, and the numbers of those that have a trained token."""
    raw = load_source(spec, what)
    if "messages" in raw.column_names and not tokenizer.chat_template:
        raise RecipeError(
            f"{what}: rows hold messages, but the tokenizer in {folder} has no chat template; "
            "set model.tokenizer to one that has"
        )
    try:
        encoded = raw.map(
            _encode,
            with_indices=True,
            batched=True,
            batch_size=ENCODED_TOGETHER,
            fn_kwargs={"encoding": Encoding(str(folder), _digest(tokenizer), data.max_length, what)},
            remove_columns=raw.column_names,
            num_proc=data.num_proc if data.num_proc > 1 else None,
        )
    except UnicodeDecodeError as error:
        raise RecipeError(f"{what} = {spec!r}: not UTF-8 ({error.reason})") from None
    trained = _column(encoded, "trained")
    usable = np.flatnonzero(trained > 0)
    if not len(usable) or (len(usable) < len(trained) and not data.skip_untrainable):
        raise RecipeError(
            f"{what}: row {np.flatnonzero(trained == 0)[0]}: data.max_length = {data.max_length} leaves it "
            f"without a trained token ({len(trained) - len(usable)} of {len(trained)} rows); "
            "raise it, or set data.skip_untrainable=true"
        )
    return encoded, usable


def _lay_out(encoded: Dataset, documents: np.ndarray, data: Data, dropped: int) -> Documents:
    lengths = _column(encoded, "length")[documents]
    rows: list[Row] = [(number,) for number in documents.tolist()]
    if data.packing:
        rows = pack(documents.tolist(), lengths.tolist(), data.max_length)
    trained, cut = (int(_column(encoded, name)[documents].sum()) for name in ("trained", "cut"))
    said = f"{lengths.sum():,} tokens, {trained:,} of them trained"
    summary = f"{len(documents):,} documents in {len(rows):,} rows; {said}"
    if cut:
        summary += f"; {cut:,} documents cut to {data.max_length}"
    if dropped:
        summary += f"; {dropped:,} rows without a trained token dropped"
    return Documents(encoded, rows, float(lengths.mean()), summary)


def _column(encoded: Dataset, name: str) -> np.ndarray:
    return np.asarray(encoded.select_columns(name).with_format("numpy")[:][name])


def pack(documents: list[int], lengths: list[int], capacity: int) -> list[Row]:
    """Best-fit decreasing: each document, longest first, goes where it leaves the least room. Deterministic."""
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # room left -> bins with that room
    rooms: list[int] = []  # its keys, sorted
    for length, document in sorted(zip((-n for n in lengths), documents, strict=True)):
        length = -length
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            room, chosen = capacity, len(bins)
            bins.append([])
        else:
            room = rooms[at]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        bins[chosen].append(document)
        if room - length not in by_room:
            bisect.insort(rooms, room - length)
        by_room.setdefault(room - length, []).append(chosen)
    return [tuple(content) for content in bins]


def _encode(rows: dict[str, list[Any]], indices: list[int], encoding: Encoding) -> dict[str, list[Any]]:
    """A batch of raw rows, by columns, as encoded ones."""
    raw = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    encoder = _cached_encoder(encoding.folder)
    encoded = encoder.encode(raw, [f"{encoding.what}: row {index}" for index in indices])
    kept = [(ids[: encoding.max_length], mask[: encoding.max_length]) for ids, mask in encoded]
    return {
        "input_ids": [ids for ids, _ in kept],
        "mask": [mask for _, mask in kept],
        "length": [len(ids) for ids, _ in kept],
        # the first token of a document is never predicted, so it is never trained
        "trained": [int(mask[1:].sum()) for _, mask in kept],
        "cut": [len(ids) > encoding.max_length for ids, _ in encoded],
    }


@functools.lru_cache(maxsize=2)
def _cached_encoder(folder: str) -> Encoder:
    return Encoder(load_tokenizer(Path(folder), "model.tokenizer"))


def _digest(tokenizer: Any) -> str:
    content = tokenizer.backend_tokenizer.to_str() + str(tokenizer.chat_template) + str(tokenizer.eos_token)
    return hashlib.sha256(content.encode()).hexdigest()
