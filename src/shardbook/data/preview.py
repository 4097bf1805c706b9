"""A preview of the data as it will be trained: first rows token by token, lengths, padding, truncated and dropped rows.

Invariant: it shows and counts only what the loader would give. Needs a tokenizer, no weights.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from shardbook.arithmetic import ceil_div, round_up
from shardbook.data.loader import Loader, choose_batching, sequences_of
from shardbook.data.tokenized import Documents, build_documents, column
from shardbook.parallel.mesh import DataRank
from shardbook.recipe import Data, Train
from shardbook.terminal import build_console

BARS = 12  # of a histogram, at most
BAR = 40  # characters of the longest bar
SHOWN = 800, 200  # pieces of a long sequence that a terminal shows: of its beginning and of its end
EXACT = {"clean_up_tokenization_spaces": False}
COLUMNS = "source", "documents", "tokens", "trained", "median", "longest", "cut", "dropped"


class Piece(NamedTuple):
    """The text of one token, or of a few tokens that make one character."""

    text: str
    trained: bool
    tokens: int


class TokenSequence(NamedTuple):
    name: str  # of a pair: chosen or rejected
    pieces: list[Piece]
    tokens: int
    trained: int

    @property
    def title(self) -> str:
        return f"{self.name}{': ' * bool(self.name)}{self.tokens:,} tokens, {self.trained:,} of them trained"


class SourceCounts(NamedTuple):
    """The counts of a source, or of all sources, in an epoch, repeats included."""

    name: str
    lengths: np.ndarray
    trained: int
    cut: int
    dropped: int

    def cells(self) -> list[str]:
        tokens = int(self.lengths.sum())
        share = f"{self.trained / tokens:.0%}" if tokens else ""
        middle, most = (int(np.median(self.lengths)), int(self.lengths.max())) if len(self.lengths) else (0, 0)
        counts = (len(self.lengths), tokens, share, middle, most, self.cut, self.dropped)
        return [self.name, *(count if isinstance(count, str) else f"{count:,}" for count in counts)]


@dataclass(frozen=True)
class Preview:
    examples: list[tuple[str, list[TokenSequence]]]  # with the names of their rows
    parts: list[SourceCounts]  # each source, then all, then the held-out rows
    bars: list[tuple[int, int, int]]  # histogram of sequences' lengths: from, to, count
    summary: str
    unread: list[str]  # of each source that has some: its fields that are not read, in words


def take_preview(
    data: Data, train: Train, tokenizer: PreTrainedTokenizerBase, folder: Path, rows: int, sequences: int
) -> Preview:
    """Returns a preview of `data` in micro-batches as `train` has them: the first `rows` of each source, `sequences` to
    an example. Raises RecipeError where a run would."""
    documents, held_out = build_documents(data, tokenizer, folder, sequences)
    numbers = np.array([number for row in documents.rows for number in row])
    parts, examples, start = [], [], 0
    for name, count, *_ in documents.sources:
        numbers_of_source = numbers[(numbers >= start) & (numbers < start + count)]
        dropped = column(documents.encoded, "trained")[start : start + count] == 0
        parts.append(_count(name, documents, numbers_of_source, int(dropped.sum())))
        for number in np.unique(numbers_of_source)[:rows].tolist():
            title = f"{name}, row {number - start}"
            examples.append((title, _sequences(documents.encoded[number], tokenizer)))
        start += count
    if len(parts) > 1:
        parts.append(_count("together", documents, numbers, sum(part.dropped for part in parts)))
    if held_out:
        numbers_of_source = np.array([number for row in held_out.rows for number in row])
        lost = int((column(held_out.encoded, "trained") == 0).sum()) if data.eval else 0  # else they are counted above
        parts.append(_count("held out", held_out, numbers_of_source, lost))
    lengths = column(documents.encoded, "lengths")[numbers].flatten()
    padding, of = _padding(documents, data, train, sequences)
    summary = f"{documents.summary}; {padding:.1%} of {of} is padding"
    unread = [
        f"not read of {source.name}: {', '.join(source.unread)}"
        for each in (documents, held_out if data.eval else None)
        for source in (each.sources if each else ())
        if source.unread
    ]
    return Preview(examples, parts, _bars(lengths), summary, unread)


def _count(name: str, documents: Documents, numbers: np.ndarray, dropped: int) -> SourceCounts:
    lengths, trained, cut = (column(documents.encoded, key)[numbers] for key in ("length", "trained", "cut"))
    return SourceCounts(name, lengths, int(trained.sum()), int(cut.sum()), dropped)


def _padding(documents: Documents, data: Data, train: Train, sequences: int) -> tuple[float, str]:
    """Returns the share of padding in the first epoch's rows on a GPU, and a description of these rows."""
    batching = choose_batching(data, train, DataRank(), "cuda", documents, sequences=sequences)
    tokens = column(documents.encoded, "length")
    used = sum(int(tokens[number]) for row in documents.rows for number in row)
    if batching.row_length:
        length = round_up(batching.row_length, batching.multiple)
        return 1 - used / (length * len(documents.rows)), f"rows of {length:,} tokens"
    loader, longest = Loader(documents, batching, 1, train.seed), column(documents.encoded, "lengths").max(axis=1)
    order, padded = [loader.row_at(index)[0] for index in range(len(documents.rows))], 0
    for start in range(0, len(order), batching.batch_size):
        together = order[start : start + batching.batch_size]
        padded += len(together) * sequences * round_up(int(longest[together].max()), batching.multiple)
    return 1 - used / padded, f"micro-batches of {batching.batch_size}, unpacked,"


def _bars(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Returns the counts of `lengths` by ranges of a round width: from, to (both included), count."""
    most = int(lengths.max())
    width = next(step * 10**power for power in range(10) for step in (1, 2, 5) if step * 10**power * BARS > most)
    counts = np.bincount(lengths // width)
    return [(number * width, (number + 1) * width - 1, int(count)) for number, count in enumerate(counts)]


def _sequences(document: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[TokenSequence]:
    sequences, names = [], ("chosen", "rejected") if len(document["lengths"]) == 2 else ("",)
    for name, (ids, mask) in zip(names, sequences_of(document), strict=True):
        mask = [False, *mask[1:]]  # the first token is never predicted
        sequences.append(TokenSequence(name, _pieces(ids, mask, tokenizer), len(ids), sum(mask)))
    return sequences


def _pieces(ids: list[int], mask: list[bool], tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """Returns the text of each token, decoded after the one before it, which decides whether it begins with a space.
    Tokens of one character make one piece."""
    pieces: list[Piece] = []
    before, now = 0, 0  # the start of the last piece and of this one
    for end in range(1, len(ids) + 1):
        known, text = (str(tokenizer.decode(ids[before:to], **EXACT)) for to in (now, end))
        cut = text.endswith("\ufffd") and end < len(ids) and mask[end] == mask[now] and end - now < 4
        if not cut:
            new = text[len(known) :] if text.startswith(known) else str(tokenizer.decode(ids[now:end], **EXACT))
            shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in new)  # no terminal's commands
            pieces.append(Piece(shown, mask[now], end - now))
            before, now = now, end
    return pieces


def show_preview(preview: Preview) -> None:
    """Prints the preview on standard output: trained tokens in green, or in brackets where there are no colors."""
    console = build_console()
    is_plain = not console.is_terminal or console.no_color
    for title, sequences in preview.examples:
        console.print(title, style="bold", markup=False)
        for sequence in sequences:
            console.print(Text(sequence.title, style="italic"))
            console.print(as_text(sequence, is_plain), end="\n\n")
    table = Table(COLUMNS[0], *(Column(name, justify="right") for name in COLUMNS[1:]))
    for part in preview.parts:
        table.add_row(*part.cells())
    console.print(table)
    for line in (preview.summary, *preview.unread):
        console.print(line, markup=False)
    console.print("\ntokens of a sequence")
    most = max(count for _, _, count in preview.bars)
    wide = len(f"{preview.bars[-1][1]:,}")
    for first, last, count in preview.bars:
        console.print(f"{first:>{wide},} to {last:>{wide},}  {'█' * ceil_div(BAR * count, most):<{BAR}} {count:,}")


def as_text(sequence: TokenSequence, is_plain: bool) -> Text:
    """Returns a sequence as text for a terminal; of a long one the beginning and the end."""
    begin, end = SHOWN
    pieces, left = sequence.pieces, sequence.pieces[begin:-end]
    if left:
        omission = Piece(f"\n[... {sum(piece.tokens for piece in left):,} tokens ...]\n", False, 0)
        pieces = [*pieces[:begin], omission, *pieces[-end:]]
    text, inside = Text(), False
    for piece in [*pieces, Piece("", False, 0)]:
        if is_plain and piece.trained != inside:
            text.append("⟦" if piece.trained else "⟧")
            inside = piece.trained
        text.append(piece.text, style="green" if piece.trained else "dim")
    return text
