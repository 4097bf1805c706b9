"""The loader: chooses the rows that a rank sees in each step, and makes their tensors.

Invariant: the row at global index g is a pure function of (seed, epoch, g): seeking is O(1), and the stream of rows
is the same however many ranks and micro-batches split a step. Its only state is how many rows the run has consumed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from shardbook.arithmetic import round_up
from shardbook.data.tokenized import Documents, Row
from shardbook.model.batch import Batch
from shardbook.parallel.mesh import DataRank
from shardbook.recipe import Data, RecipeError, Train

# By device: rows are padded to a multiple of this many tokens, so that unpacked rows have few lengths. On a GPU kernels
# take tiles of 128 rows, and cuDNN's backward gave NaN for a dense mask at odd multiples of 64 (pytorch #196678).
ROUND_TO = {"cpu": 64, "cuda": 128}
MASK64 = 2**64 - 1


@dataclass(frozen=True)
class MicroBatch(Batch):
    """One micro-batch of one rank. Where context-parallel ranks split rows it holds a slice of each, of length L;
    cu_seqlens and max_seqlen are of the whole rows, and only the first slice has pairs."""

    pairs: int  # pairs of tokens of one document: the sum of each document's length squared
    trained: tuple[int, ...] = ()  # trained tokens of each sequence, in order: they sum to n
    # [sequences] fp32: `trained` of whole sequences, where an example holds several
    counts: Tensor | None = None
    # [sequences] indices into the flat [B * L] of their last tokens; -1 where another slice has it
    ends: Tensor | None = None
    reference: Tensor | None = None  # [sequences] fp32: log-probabilities under the reference model
    slices: int = 1  # of each row, of which this has one
    is_token: Tensor | None = None  # [B, L] bool: no padding; where somebody counts tokens

    @property
    def full_shape(self) -> torch.Size:
        rows, length = self.input_ids.shape
        return torch.Size((rows, length * self.slices))

    def to(self, device: torch.device) -> "MicroBatch":
        if device.type == "cpu":
            return self

        def move(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        moved: dict[str, Any] = {name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def permute(index: int, size: int, seed: int, epoch: int) -> int:
    """Returns the image of `index` in the permutation of range(size) of (seed, epoch). O(1) time and memory.

    A four-round Feistel network over the next even power of two, walked until it lands inside range(size)
    (cycle-walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002).
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for turn in range(4):
            left, right = right, left ^ (_mix(right, seed, epoch * 4 + turn) & low)
        index = left << half | right
        if index < size:
            return index


def _mix(value: int, seed: int, tweak: int) -> int:
    """Mixes its inputs into 64 bits: the finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014) over the three."""
    for word in (seed, tweak, value):
        value = (value + word * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & MASK64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK64
        value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK64
        value ^= value >> 31
    return value


@dataclass(frozen=True)
class Batching:
    """The shape of a micro-batch, and this rank's numbers along the axes that share rows."""

    row_length: int | None  # packed rows are padded to it; None: a row is one document, padded to the longest
    batch_size: int  # rows of a rank's micro-batch
    dp_rank: int
    dp_size: int
    documents: int = 1  # most documents in a row
    multiple: int = ROUND_TO["cpu"]  # row lengths are rounded up to a multiple of it
    sequences: int = 1  # of an example: 2 where it is a pair
    slice_number: int = 0  # of the slice of each row that this rank sees
    slices: int = 1
    copies: int = 1  # ranks that see the same tokens
    marks_padding: bool = False  # micro-batches say which tokens are padding


def choose_batching(
    data: Data,
    train: Train,
    at: DataRank,
    device_type: str,
    *parts: Documents | None,
    sequences: int = 1,
    marks_padding: bool = False,
) -> Batching:
    """Returns the batching of the rank `at` for the rows of `parts` on a device of `device_type`."""
    row_length = data.max_length * sequences if data.packing else None
    # of all parts, so that boundaries have the same shape in every micro-batch, of an evaluation too
    most = max((len(row) for part in parts if part for row in part.rows), default=1)
    multiple = math.lcm(ROUND_TO[device_type], at.row_ranks)  # so that ranks have equal shares of a row
    shape = row_length, train.per_device_train_batch_size
    where = at.dp_rank, at.dp_size, most, multiple, sequences, *at.slice_of_rows, at.copies
    return Batching(*shape, *where, marks_padding)


class RowError(RuntimeError):
    """The error of a row that existed when the run began and cannot be read."""


class Loader:
    """Makes the micro-batches of a step for one data-parallel rank, in the order of the permutation."""

    def __init__(self, documents: Documents, batching: Batching, accumulation: int, seed: int):
        self.documents, self.batching, self.accumulation, self.seed = documents, batching, accumulation, seed
        self.consumed_rows = 0

    @property
    def rows_per_step(self) -> int:
        return self.batching.batch_size * self.accumulation * self.batching.dp_size

    def row_at(self, index: int) -> Row:
        """Returns the row at `index` of the endless stream of epochs."""
        epoch, index = divmod(index, len(self.documents.rows))
        return self.documents.rows[permute(index, len(self.documents.rows), self.seed, epoch)]

    def step_at(self, consumed_rows: int) -> list[MicroBatch]:
        """Returns this rank's micro-batches of the step that begins after `consumed_rows` rows: a pure function, so a
        thread may prefetch it. Micro-batch m of all ranks is contiguous in the stream. RowError names the rows."""
        batching, micros = self.batching, []
        for micro in range(self.accumulation):
            _, rows = self._rows(consumed_rows, micro)
            try:
                micros.append(build_micro_batch(self.documents.encoded, rows, batching, self.documents.reference))
            except Exception as error:  # Arrow's, or of a file that another program truncated, or of a disk
                message = f"data.train: {self.name_rows(consumed_rows, micro)} cannot be read"
                raise RowError(f"{message}: {type(error).__name__}: {error}") from error
        return micros

    def name_rows(self, consumed_rows: int, micro: int) -> str:
        """Returns for people the rows of a micro-batch of the step that begins after `consumed_rows`, on this rank."""
        start, rows = self._rows(consumed_rows, micro)
        documents = ", ".join(str(document) for row in rows for document in row)
        return f"rows {start} to {start + len(rows) - 1} of the run (documents {documents})"

    def _rows(self, consumed_rows: int, micro: int) -> tuple[int, list[Row]]:
        batching = self.batching
        start = consumed_rows + (micro * batching.dp_size + batching.dp_rank) * batching.batch_size
        return start, [self.row_at(index) for index in range(start, start + batching.batch_size)]

    def state_dict(self) -> dict[str, Any]:
        rows, digest = len(self.documents.rows), self.documents.digest
        place = {"consumed_rows": self.consumed_rows, "rows_per_step": self.rows_per_step}
        return place | {"rows": rows, "seed": self.seed, "data": digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Seeks to a saved position. Raises RecipeError where that belongs to another stream of rows."""
        state_now = self.state_dict()
        if (state["rows"], state["seed"]) != (state_now["rows"], state_now["seed"]):
            raise RecipeError(
                f"the checkpoint was made with {state['rows']} rows and seed {state['seed']}, this recipe has "
                f"{state_now['rows']} rows and seed {state_now['seed']}: keep [data] and train.seed, "
                "or start a new run from the export (model.path)"
            )
        if state["data"] != state_now["data"]:
            raise RecipeError(
                f"the checkpoint was made with other data ({state['data']} there, {state_now['data']} here; "
                "as many rows): keep [data], and the day that a chat template writes (data.chat_template_date), or "
                "start a new run from the export (model.path)"
            )
        self.consumed_rows = state["consumed_rows"]


def count_work(micros: list[MicroBatch]) -> tuple[int, int]:
    """Returns the tokens of the rows, trained or not, padding included, and the pairs of tokens of one document."""
    return sum(micro.input_ids.numel() for micro in micros), sum(micro.pairs for micro in micros)


def eval_rows(documents: Documents, batching: Batching) -> Iterator[list[Row]]:
    """Yields the rows of this rank's micro-batches; all ranks together take each row once. All get the same number of
    micro-batches, else collectives would hang; the last ones of some ranks may have no rows."""
    stride, total = batching.batch_size * batching.dp_size, len(documents.rows)
    for start in range(batching.dp_rank * batching.batch_size, round_up(total, stride), stride):
        yield [documents.rows[index] for index in range(start, min(start + batching.batch_size, total))]


def eval_micro_batches(documents: Documents, batching: Batching) -> Iterator[MicroBatch]:
    for rows in eval_rows(documents, batching):
        yield build_micro_batch(documents.encoded, rows, batching, documents.reference)


def count_totals(micros: list[MicroBatch], sequences: int, slice_number: int = 0) -> tuple[int, int, int]:
    """Returns the counts that one rank's `micros` add to Totals, with `sequences` to an example. Slices have tokens of
    their own and the same examples, which the first one counts."""
    trained = [count for micro in micros for count in micro.trained]
    return sum(trained), len(trained) // sequences * (slice_number == 0), sum(trained[::sequences])


def sequences_of(document: dict[str, Any]) -> Iterator[tuple[list[int], list[bool]]]:
    """Yields the ids and mask of each sequence of an encoded document, which has them one after another."""
    at = 0
    for length in document.get("lengths") or [len(document["input_ids"])]:
        yield document["input_ids"][at : at + length], document["mask"][at : at + length]
        at += length


def build_micro_batch(
    encoded: Dataset, rows: Sequence[Row], batching: Batching, reference: np.ndarray | None = None
) -> MicroBatch:
    """Packs `rows` into tensors, with position_ids and cu_seqlens. Unpacked, each sequence is a row.
    Without rows it makes one row of padding, and no target.
    `reference`: [documents, sequences] fp32, of all documents in `encoded`."""
    content = [[part for document in row for part in sequences_of(encoded[document])] for row in rows] or [[]]
    if batching.row_length is None:
        content = [[part] for row in content for part in row] or [[]]
    used = [sum(len(ids) for ids, _ in row) for row in content]
    length = round_up(batching.row_length or max(1, *used), batching.multiple)
    shape = (len(content), length)
    starts, lengths, trained, ends = [], [], [], []
    ids, places = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, -1)  # of what is not trained, as -100 is in labels of transformers
    for row, parts in enumerate(content):
        at = 0
        for part in parts:
            tokens, mask = torch.tensor(part[0]), torch.tensor(part[1])
            place = slice(at, at + len(tokens))
            ids[row, place], places[row, place] = tokens, torch.arange(len(tokens))
            targets[row, at : at + len(tokens) - 1] = torch.where(mask[1:], tokens[1:], -1)
            starts.append(row * length + at)
            lengths.append(len(tokens))
            trained.append(int(mask[1:].sum()))
            at += len(tokens)
            ends.append(row * length + at - 1)
        if at < length:
            starts.append(row * length + at)
    max_seqlen = max([*lengths, *(length - tokens for tokens in used)])
    max_seqlen = min(length, max(ROUND_TO["cuda"], 1 << (max_seqlen - 1).bit_length()))
    most = batching.documents * batching.sequences if batching.row_length else 1
    cu_seqlens = torch.full((len(content) * (most + 1) + 1,), ids.numel(), dtype=torch.int32)
    cu_seqlens[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
    positions = (targets.flatten() >= 0).nonzero().flatten()
    packed, known = batching.row_length is not None, None
    if reference is not None:
        known = torch.from_numpy(reference[[document for row in rows for document in row]].flatten())
    targets = targets.flatten()[positions]
    facts = packed, max_seqlen, sum(length**2 for length in lengths), tuple(trained)
    counts = torch.tensor(trained, dtype=torch.float32) if batching.sequences > 1 else None
    is_token = (torch.arange(length) < torch.tensor(used)[:, None]) if batching.marks_padding else None
    of_sequences = counts, torch.tensor(ends, dtype=torch.int64), known
    micro = MicroBatch(ids, places, cu_seqlens, positions, targets, *facts, *of_sequences, is_token=is_token)
    return slice_rows(micro, batching) if batching.slices > 1 else micro


def slice_rows(micro: MicroBatch, batching: Batching) -> MicroBatch:
    """Returns a context-parallel rank's slice of the micro-batch `micro`. Positions and targets must exist before: the
    last token of a slice predicts the first of the next."""
    length = micro.input_ids.shape[1]
    each = length // batching.slices
    start = batching.slice_number * each
    assert micro.targets is not None and micro.ends is not None, "nothing says what is trained, or where sequences end"
    rows, columns = micro.positions // length, micro.positions % length
    in_slice = (start <= columns) & (columns < start + each)
    ids, places = (of[:, start : start + each].contiguous() for of in (micro.input_ids, micro.position_ids))
    positions = (rows * each + columns - start)[in_slice]
    # the sequence of each trained token, in the order of positions
    owners = torch.arange(len(micro.trained)).repeat_interleave(torch.tensor(micro.trained, dtype=torch.int64))
    trained = tuple(torch.bincount(owners[in_slice], minlength=len(micro.trained)).tolist())
    end_rows, end_columns = micro.ends // length, micro.ends % length
    ends_in_slice = (start <= end_columns) & (end_columns < start + each)
    ends = torch.where(ends_in_slice, end_rows * each + end_columns - start, -1)
    facts = micro.packed, micro.max_seqlen, micro.pairs * (batching.slice_number == 0), trained
    tensors = ids, places, micro.cu_seqlens, positions, micro.targets[in_slice]
    of_sequences = micro.counts, ends, micro.reference  # of whole sequences, on each slice
    is_token = None if micro.is_token is None else micro.is_token[:, start : start + each].contiguous()
    return MicroBatch(*tensors, *facts, *of_sequences, slices=batching.slices, is_token=is_token)
