"""Checkpoints as versions before 0.3 wrote them: DCP's files, and a marker."""

import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from shardbook.run.item_storage import ItemReader
from shardbook.run.stored_items import MARKER, STATE, read_stored


def whole_tensors(checkpoint: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint whose names begin with `prefix`, whole, without ranks."""
    items = read_stored(checkpoint).items
    box = {
        item.name: torch.empty(item.shape, dtype=getattr(torch, item.dtype))
        for rows in items.values()
        for item in rows
        if item.name.startswith(prefix)
    }
    state_dict_loader.load(box, storage_reader=ItemReader(checkpoint, items), no_dist=True)
    return box


def make_old(checkpoint: Path) -> Path:
    """Puts the same checkpoint, in the form of version 0.2, in the place of one."""
    tensors, state = whole_tensors(checkpoint), (checkpoint / STATE).read_bytes()
    shutil.rmtree(checkpoint)
    state_dict_saver.save(tensors, checkpoint_id=checkpoint, no_dist=True)
    (checkpoint / STATE).write_bytes(state)
    (checkpoint / MARKER).touch()
    return checkpoint
