"""Buffers that files hold: biases of routers, factors of layers.

Invariant: each is whole on every rank that has its block, and keeps its own dtype. They are in no checkpoint, but for
biases of routers that a run moves: training changes no others.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardbook.model.file_names import files_of
from shardbook.model.weight_files import open_tensors
from shardbook.recipe import RecipeError


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers of `model` that files hold, by name: those of the blocks that are here."""
    files = files_of(model)
    return {name: buffer for name, buffer in model.named_buffers() if name in files.buffers}


def load_buffers(model: nn.Module, folder: Path) -> None:
    """Fills from `folder` the buffers that a checkpoint does not hold. Raises RecipeError, on every rank, where one of
    the whole model is missing."""
    files = files_of(model)
    if files.buffers:
        with open_tensors(folder) as opened:
            stored = files.by_model_names(opened)
            if missing := [name for name in files.buffers if name not in stored]:
                raise RecipeError(f"weights in {folder} do not fit the model: missing {'; missing '.join(missing)}")
            read_buffers(model, stored)


def read_buffers(model: nn.Module, stored: Mapping[str, Any]) -> None:
    """Fills the buffers of `model` from the tensors of files, by the model's names."""
    for name, buffer in stored_buffers(model).items():
        read = stored[name].read_rows(slice(0, stored[name].shape[0] if stored[name].shape else 1))
        buffer.copy_(read.view(buffer.shape))
