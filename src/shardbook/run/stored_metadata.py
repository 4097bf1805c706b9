"""Reads DCP's checkpoints without running code in them: `.metadata` is a pickle, and an entry may be one.

Invariant: only classes that describe tensors are made, and only tensors are read, so a stranger's checkpoint runs no
code. (torch reads the tensors themselves with `weights_only`.)
"""

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from shardbook.recipe import RecipeError

METADATA = ".metadata"
# allowed names by their modules, as a pickle has them
NAMES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedReader, checkpoint: Path):
        super().__init__(file)
        self.checkpoint = checkpoint

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return Path  # the path at which it was written; it is not used
        if (module, name) == ("builtins", "getattr"):
            return type(Enum).__getitem__  # early Pythons 3.11 pickle an enum's member so; no other attributes
        if name not in NAMES.get(module, ()):
            raise RecipeError(
                f"checkpoint {self.checkpoint}: its {METADATA} asks for {module}.{name}, which is not called: a "
                "checkpoint of a run describes tensors and nothing else; name another one"
            )
        return super().find_class(module, name)


class Reader(FileSystemReader):
    """Reads the metadata once, when it is made: it lists every shard of every tensor, and DCP asks for it at each load.
    Raises RecipeError where it describes more than tensors."""

    def __init__(self, checkpoint: Path):
        super().__init__(checkpoint)
        with (checkpoint / METADATA).open("rb") as file:
            self._metadata: Metadata = _Unpickler(file, checkpoint).load()

    def read_metadata(self, *positional: Any, **named: Any) -> Metadata:
        return self._metadata


class TensorsOnly(DefaultLoadPlanner):
    """Loads tensors, and raises RecipeError for an entry stored as a pickle in place of one: DCP would run it."""

    def __init__(self, checkpoint: Path):
        super().__init__()
        self.checkpoint = checkpoint

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise RecipeError(
            f"checkpoint {self.checkpoint}: {read_item.dest_index.fqn} is a pickle there, which is not read; must be a "
            "tensor: name another one"
        )
