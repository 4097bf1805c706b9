"""Weights files (safetensors), each opened once: first all headers are read, then the rows that a rank needs.

Invariant: every header fits the length of its file before the first row is read, and a row is read into memory of its
own. Not the library's `safe_open`: it opens a file twice and maps it, and pages that were read through a mapping stay
resident until it is closed, which would be the size of a second shard. It never reads a pickle.
The format is https://github.com/huggingface/safetensors#format: the length of the header (8 bytes, little-endian), the
header (JSON: dtype, shape and place of each tensor), the tensors, row by row, without holes.
"""

import contextlib
import hashlib
import io
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardbook.model.hub import damaged, read_header, weights_files

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HEADED = 2**16  # bytes of either end of a file by which copies are told apart
PIECE = 32 * 2**20  # bytes of a file that are hashed at once, or read at once to take some columns


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open file."""

    path: Path
    file: io.FileIO | io.BytesIO
    dtype: str  # as the format writes it
    shape: tuple[int, ...]
    start: int  # of its first byte in the file

    def read_part(self, rows: slice, columns: slice | None = None) -> Tensor:
        """Reads the `columns` of `rows`, as read_rows does. Columns do not lie together in the file, so whole rows are
        read, PIECE by PIECE, and the columns taken out of them."""
        if columns is None:
            return self.read_rows(rows)
        width = columns.stop - columns.start
        part = torch.empty(rows.stop - rows.start, width, dtype=FLOATS[self.dtype])
        step = max(1, PIECE // (self.shape[1] * part.element_size()))
        for first in range(rows.start, rows.stop, step):
            piece = slice(first, min(first + step, rows.stop))
            part[piece.start - rows.start : piece.stop - rows.start] = self.read_rows(piece)[:, columns]
        return part

    def read_rows(self, rows: slice) -> Tensor:
        """Reads rows `rows.start` to `rows.stop` along the first dim, to host memory, in the stored dtype, one of
        FLOATS. Raises RecipeError where the file ends early."""
        read = torch.empty(rows.stop - rows.start, *self.shape[1:], dtype=FLOATS[self.dtype])
        self.file.seek(self.start + rows.start * math.prod(self.shape[1:]) * read.element_size())
        left = read.flatten().view(torch.uint8).numpy().data
        while left:  # one call reads at most 2 GiB
            if not (count := self.file.readinto(left)):
                raise damaged(self.path, "it ended while it was read")
            left = left[count:]
        return read


def digest_share(folder: Path, rank: int, ranks: int) -> list[bytes]:
    """Returns the SHA-256 of every `ranks`th piece of the weights files, from the `rank`th on."""

    def digest(piece: tuple[Path, int]) -> bytes:
        path, start = piece
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(PIECE)).digest()

    pieces = [(path, start) for path in weights_files(folder) for start in range(0, path.stat().st_size, PIECE)]
    with ThreadPoolExecutor(4) as threads:  # hashing releases Python's lock, so threads do run at once
        return list(threads.map(digest, pieces[rank::ranks]))


def digest_ends(folder: Path) -> str:
    """Returns a digest of the names, sizes, first and last bytes (HEADED each) of a directory's safetensors and its
    config: enough to tell most copies of unlike files apart, and cheap. Numbers between the ends are not looked at."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*config.json")]):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size} ".encode() + file.read(HEADED))
            file.seek(max(0, size - HEADED))
            digest.update(file.read())
    return digest.hexdigest()


@contextlib.contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, StoredTensor]]:
    """Opens each weights file of a Hugging Face directory once, and yields every tensor by name, to be read while the
    context lasts. Raises RecipeError where there is no file, one is missing, or one is truncated."""
    tensors: dict[str, StoredTensor] = {}
    with contextlib.ExitStack() as files:
        for path in weights_files(folder):
            file = files.enter_context(path.open("rb", buffering=0))
            tensors |= {name: StoredTensor(path, file, *entry) for name, entry in read_header(path, file).items()}
        yield tensors
