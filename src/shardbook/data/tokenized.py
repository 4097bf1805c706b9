"""Tokenized rows: documents are checked, held out, and laid out in rows of the model.

A row of the model is a tuple of document numbers; packing changes only how many are in it.
"""

import bisect
import hashlib
import json
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from shardbook.data.encoding import Encoding, digest_tokenizer, encode_source, unread_fields
from shardbook.data.find import read_template, source_keys
from shardbook.data.sources import load_sources, mix
from shardbook.data.template import CLOCK
from shardbook.recipe import Data, RecipeError

SPLIT_SEED = 0  # of the held-out rows: the same for every train.seed, else another seed would train on them
SAMPLED = 1000  # documents whose tokens are in the digest of the data
Row = tuple[int, ...]


class SourceRows(NamedTuple):
    """A source as a summary names it."""

    name: str
    rows: int
    note: str = ""  # Source.note
    unread: tuple[str, ...] = ()  # fields of rows that hold something and are not read


Sources = tuple[SourceRows, ...]  # in order


class Totals(NamedTuple):
    """The counts of a step, or of an evaluation, over all ranks, by which a loss is divided."""

    tokens: float  # trained tokens
    examples: float  # rows of the data: documents, or pairs
    chosen_tokens: float  # trained tokens of each example's first sequence


NOTHING = Totals(0, 0, 0)


@dataclass(frozen=True)
class Documents:
    """Encoded documents and the rows they are laid out in."""

    # columns input_ids, mask: lists of int and bool; lengths: of each sequence in them; length, trained, and chosen
    # (trained tokens of the first sequence): int; cut: bool; content: int64, a digest of ids, mask and lengths;
    # unread: the names of the row's fields that are not read, as JSON
    encoded: Dataset
    rows: list[Row]
    mean_length: float  # tokens of a sequence
    summary: str
    totals: Totals = NOTHING  # of all rows
    reference: np.ndarray | None = None  # fp32 [encoded, sequences]: their log-probabilities under the reference model
    sources: Sources = ()  # of `encoded`
    digest: str = ""  # of the trained documents: digest_rows and, after a dash, the content of each


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
        other, documents, eval_sources = _encode_source(data.eval, "data.eval", data, tokenizer, folder, sequences)
        held_out = _lay_out(other, documents, data, len(other) - len(documents), sequences, eval_sources)
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
    if data.chat_template_date and CLOCK not in known:
        raise RecipeError(f"data.chat_template_date = {data.chat_template_date}: the chat template reads no clock")
    clock = data.chat_template_date or str(date.today()) if chats and CLOCK in known else ""
    key = (template, json.dumps(kwargs, sort_keys=True), data.system, data.train_on, tuple(sorted(data.columns)), clock)
    clock_note = f"its chat template reads the clock, which stands at {clock} (data.chat_template_date)" * bool(clock)
    encoding = Encoding(str(folder), digest_tokenizer(tokenizer), data.max_length, what, sequences, *key)
    # each source by itself: its columns need not fit another's
    names, wheres = zip(*source_keys(spec, what), strict=True)
    tables = [
        encode_source(part, replace(encoding, what=at), data.num_proc) if len(part) else None
        for part, at in zip(parts, wheres, strict=True)
    ]
    sources = tuple(
        SourceRows(
            name, len(part), "; ".join(filter(None, [part.note, clock_note])), unread_fields(table) if table else ()
        )
        for name, part, table in zip(names, parts, tables, strict=True)
    )
    encoded = concatenate_datasets([table for table in tables if table])
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
