"""Tokenized rows: encodes, truncates, checks and caches them, then lays the documents out in rows of the model.

`datasets` caches the encoding under a fingerprint of the source, the tokenizer's content and the settings.
A row of the model is a tuple of document numbers; packing changes only how many are in it.
"""

import bisect
import functools
import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from shardbook.data.chat import Encoder
from shardbook.data.files import read_template, source_keys
from shardbook.data.formats import RawRow, split_pair
from shardbook.data.sources import Source, load_sources, mix, read_raw
from shardbook.recipe import Data, RecipeError, first_line

ENCODING_VERSION = 8  # raise it when an Encoder's result changes: the cache is keyed by it
# encoded at once; 64 rows are a seventh slower, a token takes 100 bytes meanwhile
ROWS_TOGETHER, BYTES_TOGETHER = 512, 4_000_000
SPLIT_SEED = 0  # of the held-out rows: the same for every train.seed, else another seed would train on them
SAMPLED = 1000  # documents whose tokens are in the digest of the data
Row = tuple[int, ...]


class SourceRows(NamedTuple):
    """A source as a summary names it."""

    name: str
    rows: int
    note: str = ""  # Source.note


Sources = tuple[SourceRows, ...]  # in order


class Totals(NamedTuple):
    """The counts of a step, or of an evaluation, over all ranks, by which a loss is divided."""

    tokens: float  # trained tokens
    examples: float  # rows of the data: documents, or pairs
    chosen_tokens: float  # trained tokens of each example's first sequence


NOTHING = Totals(0, 0, 0)


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
    version: int = ENCODING_VERSION


@dataclass(frozen=True)
class Documents:
    """Encoded documents and the rows they are laid out in."""

    # columns input_ids, mask: lists of int and bool; lengths: of each sequence in them; length, trained, and chosen
    # (trained tokens of the first sequence): int; cut: bool; content: int64, a digest of ids, mask and lengths
    encoded: Dataset
    rows: list[Row]
    mean_length: float  # tokens of a sequence
    summary: str
    totals: Totals = NOTHING  # of all rows
    reference: np.ndarray | None = None  # fp32 [encoded, sequences]: their log-probabilities under the reference model
    sources: Sources = ()  # of `encoded`
    digest: str = ""  # of the trained documents: digest_rows and, after a dash, the content of each


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


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Raises RecipeError where the tokenizer has ids that the model has no embedding for."""
    if len(tokenizer) > config.vocab_size:
        raise RecipeError(
            f"model.tokenizer: has {len(tokenizer)} tokens, the model {config.vocab_size} embeddings; "
            "use the tokenizer that belongs to the model"
        )


def build_documents(
    data: Data, tokenizer: PreTrainedTokenizerBase, folder: Path, sequences: int = 1
) -> tuple[Documents, Documents | None]:
    """Returns training and held-out documents (None without `eval` and `eval_size`), of `sequences` sequences each: 2
    for pairs. Raises RecipeError naming key and row."""
    encoded, usable, sources = _encode_source(data.train, "data.train", data, tokenizer, folder, sequences)
    dropped, held_out = len(encoded) - len(usable), None
    if data.eval:
        other, documents, there = _encode_source(data.eval, "data.eval", data, tokenizer, folder, sequences)
        held_out = _lay_out(other, documents, data, len(other) - len(documents), sequences, there)
    elif data.eval_size:
        size, rows = data.eval_size, len(usable)
        count = int(size) if size >= 1 else max(1, round(size * rows))
        if count >= rows:
            way_out = "add rows, or set data.eval_size=0"
            if rows > 1:
                way_out = "set data.eval_size to a share, 0.1, or fewer, or data.eval to other rows"
            raise RecipeError(f"data.eval_size = {size}: holds out all of the {rows} rows of data.train; {way_out}")
        order = np.random.RandomState(SPLIT_SEED).permutation(usable)
        usable = np.sort(order[count:])
        held_out = _lay_out(encoded, np.sort(order[:count]), data, 0, sequences, sources)
    if data.weights:
        usable = mix(usable, [source.rows for source in sources], data.weights)
    return _lay_out(encoded, usable, data, dropped, sequences, sources), held_out


def _encode_source(
    spec: str | list[str], what: str, data: Data, tokenizer: PreTrainedTokenizerBase, folder: Path, sequences: int
) -> tuple[Dataset, np.ndarray, Sources]:
    """Returns a key's encoded rows, the numbers of those with a trained token, and its sources. Raises RecipeError."""
    parts = load_sources(spec, what, data.columns)
    template, kwargs = read_template(data.chat_template), data.chat_template_kwargs
    known = template or str(tokenizer.chat_template or "")
    wholes = ("messages", "conversations", "instruction")
    chats = [name for part in parts for name in wholes if part.fields.get(name)]
    chats += [
        name for part in parts for name in ("prompt", "chosen") if part.fields.get(name, set()) & {"a list", "a table"}
    ]
    if chats and not known:
        raise RecipeError(
            f"{what}: rows hold {chats[0]}, but the tokenizer in {folder} has no chat template; "
            "set model.tokenizer to one that has, or data.chat_template to a file"
        )
    if data.system and not chats:
        raise RecipeError(f"data.system = {data.system[:40]!r}: only conversations have one, and {what} holds text")
    if unread := [name for name in kwargs if name not in known]:
        raise RecipeError(f"data.chat_template_kwargs = {kwargs}: the chat template does not read {unread[0]}")
    if sequences > 1 and data.train_on == "all":
        raise RecipeError("data.train_on = 'all': a preference is between answers; set data.train_on=assistant")
    key = (template, json.dumps(kwargs, sort_keys=True), data.system, data.train_on)
    encoding = Encoding(str(folder), _digest(tokenizer), data.max_length, what, sequences, *key)
    # each source by itself: its columns need not fit another's
    names, wheres = zip(*source_keys(spec, what), strict=True)
    sources = tuple(SourceRows(name, len(part), part.note) for name, part in zip(names, parts, strict=True))
    encoded = concatenate_datasets(
        [
            _map(part, replace(encoding, what=at), data.num_proc)
            for part, at in zip(parts, wheres, strict=True)
            if len(part)
        ]
    )
    trained = column(encoded, "trained")
    usable = np.flatnonzero(trained > 0)
    if not len(usable) or (len(usable) < len(trained) and not data.skip_untrainable):
        number = int(np.flatnonzero(trained == 0)[0])
        ends = np.cumsum([source.rows for source in sources])
        source = int(np.searchsorted(ends, number, side="right"))
        row = f"{wheres[source]}: row {number - ends[source] + sources[source].rows}"
        left = f"without a trained token{' in each answer, or with equal answers' * (sequences > 1)}"
        way_out = ", or set data.skip_untrainable=true" * (not data.skip_untrainable)
        raise RecipeError(
            f"{row}: data.max_length = {data.max_length} leaves it {left} "
            f"({len(trained) - len(usable)} of {len(trained)} rows); raise it{way_out}"
        )
    return encoded, usable, sources


def _map(source: Source, encoding: Encoding, num_proc: int) -> Dataset:
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


def _lay_out(
    encoded: Dataset, documents: np.ndarray, data: Data, dropped: int, sequences: int, sources: Sources
) -> Documents:
    length, trained, chosen, cut = (column(encoded, name)[documents] for name in ("length", "trained", "chosen", "cut"))
    rows: list[Row] = [(number,) for number in documents.tolist()]
    if data.packing:
        rows = pack(documents.tolist(), length.tolist(), data.max_length * sequences)
    examples = "documents" if sequences == 1 else "pairs"
    summary = f"{len(documents):,} {examples} in {len(rows):,} rows; "
    summary += f"{length.sum():,} tokens, {trained.sum():,} of them trained"
    if cut.any():
        summary += f"; {cut.sum():,} {examples} cut to {data.max_length}"
    if dropped:
        why = "a trained token" if sequences == 1 else "a trained token in each answer, or with equal answers,"
        summary += f"; {dropped:,} {examples} without {why} dropped"
    for source in sources:
        summary += f"; {source.name}: {source.note}" * bool(source.note)
    # checkpoints of earlier versions have only the first half: the loader compares as much as there is
    content = hashlib.sha256(column(encoded, "content")[documents].astype("<i8").tobytes()).hexdigest()[:16]
    digest = f"{digest_rows(encoded, documents, length, trained)}-{content}"
    mean, totals = float(length.mean()) / sequences, Totals(int(trained.sum()), len(documents), int(chosen.sum()))
    return Documents(encoded, rows, mean, summary, totals, None, sources, digest)


def digest_rows(encoded: Dataset, documents: np.ndarray, *counts: np.ndarray) -> str:
    """Returns a digest of the `counts` of all `documents` and of the tokens of SAMPLED of them: the same on every
    machine, and another for other data, unless only a few tokens differ. Cheap: nothing else is read."""
    digest = hashlib.sha256(b"".join(each.astype("<i8").tobytes() for each in counts))
    some = documents[np.linspace(0, len(documents) - 1, min(SAMPLED, len(documents)), dtype=np.int64)]
    for ids in encoded.with_format("numpy", columns=["input_ids"])[some.tolist()]["input_ids"]:
        digest.update(np.asarray(ids).astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def column(encoded: Dataset, name: str) -> np.ndarray:
    """Returns a column of numbers, [documents]; of `lengths`, [documents, sequences]."""
    stored = encoded.data.column(name).to_numpy()  # a Dataset in another format is a copy, with a digest of its own
    return np.stack(stored) if stored.dtype == object else stored


def pack(documents: list[int], lengths: list[int], capacity: int) -> list[Row]:
    """Packs documents by best-fit decreasing: each, longest first, goes where it leaves least room. Deterministic."""
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # room left -> bins with that room
    rooms: list[int] = []  # its keys, sorted
    for length, document in sorted(zip(lengths, documents, strict=True), key=lambda both: (-both[0], both[1])):
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


def _encode(
    rows: dict[str, list[Any]], indices: list[int], encoding: Encoding, renames: dict[str, str], is_json: bool
) -> dict[str, list[Any]]:
    """Returns a batch of a source's raw rows as encoded ones, both by columns."""
    raw = read_raw(rows, renames, is_json)
    wheres = [f"{encoding.what}: row {index}" for index in indices]
    try:
        encoded = _encode_rows(raw, wheres, encoding)
    except RecipeError as error:
        raise RecipeError(f"{error}{_place(str(error), wheres, rows['place'] if is_json else [])}") from None
    every, most = encoding.sequences, encoding.max_length
    grouped = [encoded[first : first + every] for first in range(0, len(encoded), every)]
    # the first token of a sequence is never predicted, so never trained; an example is not trained where one of its
    # sequences has no trained token, nor a pair of equal sequences
    trained = [[int(mask[1:most].sum()) for _, mask in parts] for parts in grouped]
    is_same = [every > 1 and np.array_equal(parts[0][0][:most], parts[-1][0][:most]) for parts in grouped]
    return {
        "input_ids": [np.concatenate([ids[:most] for ids, _ in parts]) for parts in grouped],
        "mask": [np.concatenate([mask[:most] for _, mask in parts]) for parts in grouped],
        "lengths": [[min(most, len(ids)) for ids, _ in parts] for parts in grouped],
        "length": [sum(min(most, len(ids)) for ids, _ in parts) for parts in grouped],
        "trained": [sum(counts) * (all(counts) and not same) for counts, same in zip(trained, is_same, strict=True)],
        "chosen": [counts[0] for counts in trained],
        "cut": [any(len(ids) > most for ids, _ in parts) for parts in grouped],
        "content": [_content([(ids[:most], mask[:most]) for ids, mask in parts]) for parts in grouped],
    }


def _encode_rows(raw: list[RawRow], wheres: list[str], encoding: Encoding) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the ids and the mask of each row, or of each of both sides of each pair."""
    if encoding.sequences == 2:
        raw = [side for row, where in zip(raw, wheres, strict=True) for side in split_pair(row, where)]
        wheres = [f"{where}, {name}" for where in wheres for name in ("chosen", "rejected")]
    return _cached_encoder(encoding).encode(raw, wheres)


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
    return Encoder(tokenizer, encoding.system, encoding.train_on, json.loads(encoding.chat_template_kwargs))


def _digest(tokenizer: Any) -> str:
    content = tokenizer.backend_tokenizer.to_str() + str(tokenizer.chat_template) + str(tokenizer.eos_token)
    return hashlib.sha256(content.encode()).hexdigest()
