"""Load: a run's state from a checkpoint, and parameters without ranks.

Invariant: a load that returns has verified each byte that it used; an error on one rank is raised on all. A rank opens
the files and reads the items in which it has a part, whatever layout wrote them. A load that raises leaves behind what
it had read until then, but for biases of routers: who goes on loads all of it again, or begins it anew.
"""

import contextlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardbook.boxes import Cut, local_box, overlap
from shardbook.local_tensors import local_values, plain_tensors
from shardbook.model.flash import current_flash
from shardbook.optim import state_kind
from shardbook.parallel.sharding import ShardedModel
from shardbook.ranks.distributed import broadcast_from_main, gather_results
from shardbook.recipe import RecipeError, first_line
from shardbook.run.checkpoint.format import (
    Item,
    StoredCheckpoint,
    TrainState,
    damaged,
    open_data,
    read_item,
    read_stored,
)
from shardbook.run.checkpoint.save import (
    BIASES,
    EVERY,
    FLASH,
    MODEL,
    OPTIMIZER,
    bytes_of,
    checkpoint_tensors,
    kept_shapes,
    not_of_files,
    random_states,
    world_facts,
)

RESIDUAL = "residual"  # exchanges whose rounding errors a checkpoint of before holds

# of frozen weights that a checkpoint depends on (CausalLM.frozen_identities): what a checkpoint with others is, and
# where to set the right ones
FROZEN = {
    "base": ("holds adapters of another base model", "[model]"),
    "teacher": ("learned from another teacher", "method and [distill]"),
}


def check_checkpoint(path: Path, sharded: ShardedModel) -> tuple[StoredCheckpoint, TrainState]:
    """Returns a checkpoint but for its tensors, and its TrainState. Raises Damaged, or RecipeError where it is
    incomplete or of another model. Collective."""
    stored = broadcast_from_main(lambda: _read(path), EVERY)  # by one rank: each file has a line for each tensor
    with _readable(path):
        state = stored.state
        ours, theirs = kept_shapes(sharded.layout, sharded.model), state["shapes"] | state.get(BIASES, {})
        ours |= sharded.layout.biases if state.get(BIASES) else {}
        train_state = TrainState(state["step"], state["tokens"], state["loader"], state["log"])
    if differ := [
        f"{name}: {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here"
        for name in ours | theirs
        if ours.get(name) != theirs.get(name)
    ]:
        raise RecipeError(
            f"checkpoint {path} is of another model ({len(differ)} parameters differ; {'; '.join(differ[:3])}); "
            "set model.path, method and [lora] to those of its run"
        )
    model: Any = sharded.model
    for key, (what, way_out) in FROZEN.items():
        digest = model.frozen_identities.get(key, "")
        if digest != (stored_digest := state.get(key, "")):
            raise RecipeError(
                f"checkpoint {path}: {what} ({stored_digest or 'none'} there, {digest or 'none'} here); set {way_out} "
                "to what the run began with"
            )
    return stored, train_state


def other_bits(stored: StoredCheckpoint) -> str:
    """Returns, for people, why a run that goes on from a checkpoint has other bits than one that never stopped; empty
    where attention runs by the same implementation."""
    now, before = current_flash(), stored.state[FLASH]
    return f"flash attention ran by {before} there, runs by {now} here, so bits differ" if now != before else ""


def load_checkpoint(
    path: Path, sharded: ShardedModel, optimizer: torch.optim.Optimizer, is_clean: bool = True
) -> tuple[TrainState, str]:
    """Loads the model from a whole checkpoint, the optimizer where its stored state is of the same kind, and, where
    the ranks are the same, this rank's random state.

    Returns the run's state, and a list for people of the parts that were not loaded, empty where all were. Raises
    RecipeError as check_checkpoint does, and, unless `is_clean`, where state that a load of a damaged checkpoint has
    changed would not be loaded. Collective.
    """
    stored, train_state = check_checkpoint(path, sharded)
    state = stored.state
    kind, stored_kind = state_kind(optimizer, sharded.layout.matrix_parts), state[OPTIMIZER]
    lost = [] if kind == stored_kind else [f"optimizer state: of {stored_kind}, here {kind}"]
    if lost and not is_clean:
        reason = f"checkpoint {path} cannot follow the load of a damaged one ({lost[0]})"
        raise RecipeError(f"{reason}; remove the damaged one, and start again")
    biases = state.get(BIASES, {})
    tensors = checkpoint_tensors(sharded.masters, None if lost else optimizer, biases)
    states = random_states() if state["ranks"] == world_facts(sharded) else {}
    with _undone_on_error([tensor for name, tensor in tensors.items() if name.removeprefix(MODEL) in biases]):
        gather_results(lambda: _load(path, stored.items, tensors | states), EVERY)
    if biases and sharded.router_biases:
        sharded.router_biases.are_state = True  # also where none is moved from now on
    for name, random in states.items():
        set_random = torch.cuda.set_rng_state if name.endswith(".cuda") else torch.set_rng_state
        set_random(random)
    lost += ["residuals of error feedback: none are kept now"] * bool(state.get(RESIDUAL))
    return train_state, "; ".join([*["random state: other ranks"] * (not states), *lost])


@contextlib.contextmanager
def _undone_on_error(tensors: list[Tensor]) -> Iterator[None]:
    """Gives `tensors` their values of before where the body raises: an older checkpoint, which is loaded then, may lack
    them."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    except BaseException:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        raise


def _load(path: Path, items: dict[str, list[Item]], tensors: dict[str, Tensor]) -> None:
    with _readable(path):
        ItemReader(path, items).read(tensors)


def checkpoint_shapes(path: Path) -> dict[str, torch.Size]:
    """Returns every parameter's full shape in a checkpoint, in order. Raises RecipeError where it is not whole."""
    with _readable(path):
        return {name: torch.Size(shape) for name, shape in _read(path).state["shapes"].items()}


def read_parameters(path: Path, shapes: dict[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    """Yields `(name, full tensor in fp32)` of the model parameters in a checkpoint, one at a time and without a process
    group, so that one host can export a 70B."""
    reader = ItemReader(path, _read(path).items)
    for name, shape in shapes.items():
        tensor = torch.empty(shape)
        with _readable(path):
            reader.read({f"{MODEL}{name}": tensor})
        yield name, tensor


def load_biases(path: Path, model: nn.Module) -> None:
    """Fills, without a process group, those biases of routers in `model` that a checkpoint holds."""
    with _readable(path):
        shapes = {name: torch.Size(shape) for name, shape in _read(path).state.get(BIASES, {}).items()}
    for name, bias in read_parameters(path, shapes):
        model.get_buffer(name).copy_(bias)


class ItemReader:
    """Reads and verifies the items of a checkpoint in which this rank has a part: one whose bytes lie one after another
    in a tensor on the host goes straight there, each other through one buffer."""

    def __init__(self, path: Path, items: dict[str, list[Item]]):
        self.path, self.buffer = path, memoryview(bytearray())
        self.by_name = dict[str, list[tuple[str, Item]]]()
        for file, item in ((file, item) for file, rows in items.items() for item in rows):
            self.by_name.setdefault(item.name, []).append((file, item))

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Fills this rank's part of each of `tensors`. Raises Damaged, before it reads, where not each element of it is
        in the checkpoint once."""
        wanted = [row for name, tensor in tensors.items() for row in self._find(name, tensor)]
        wanted.sort(key=lambda row: (row[0], row[1].begin))  # a file is read in order, so that the kernel reads ahead
        for file, rows in groupby(wanted, lambda row: row[0]):
            with open_data(self.path, file) as opened:
                for _, item, cut, target in rows:
                    self._read(file, opened, item, cut, target)

    def _find(self, name: str, tensor: Tensor) -> list[tuple[str, Item, Cut, Tensor]]:
        """Returns the items with a part of `tensor`: file, item, what they share, and this rank's part."""
        box, local = local_box(tensor, name), local_values(tensor)
        rows = self.by_name.get(name, [])
        for file, item in rows:
            if item.shape != list(box.shape):
                raise damaged(self.path, file, f"{name}: of shape {item.shape}, here {list(box.shape)}")
        shared = [(file, item, cut, local) for file, item in rows if (cut := overlap(box, item))]
        if (count := sum(cut.numel for _, _, cut, _ in shared)) != box.numel:
            raise damaged(self.path, "", f"{name}: it has {count:,} of {box.numel:,} elements")
        if not are_disjoint([cut for _, _, cut, _ in shared]):
            raise damaged(self.path, "", f"{name}: some of its {box.numel:,} elements are there twice, others are not")
        return shared

    def _read(self, file: str, opened: Any, item: Item, cut: Cut, target: Tensor) -> None:
        is_quantised = hasattr(target, "__tensor_flatten__")
        if not is_quantised and _has_layout(piece := target[cut.of_first], item):
            read_item(self.path, file, opened, item, bytes_of(piece))
            return
        if len(self.buffer) < item.length:
            self.buffer = memoryview(bytearray(item.length))
        stored = read_item(self.path, file, opened, item, self.buffer)
        if not is_quantised:
            piece.copy_(_view(stored, getattr(torch, item.dtype), item.sizes)[cut.of_second])
            return
        parts, is_all = plain_tensors(target), list(target.shape) == item.sizes and cut.numel == target.numel()
        if not is_all or sum(part.nbytes for part in parts) != item.length:
            raise damaged(self.path, file, f"{item.name}: another part of a quantised tensor than is asked for")
        at = 0
        for part in parts:
            part.copy_(_view(stored[at : at + part.nbytes], part.dtype, list(part.shape)))
            at += part.nbytes


def are_disjoint(cuts: list[Cut]) -> bool:
    """Returns whether no two of `cuts` share an element of the first box. Their edges divide it into cells, of which
    each cut covers some: where ranks cut a tensor as a grid, there are as many cells as cuts."""
    if len(cuts) < 2:
        return True
    slices = list(zip(*(cut.of_first for cut in cuts), strict=True))  # by dim
    edges = [sorted({edge for each in of_dim for edge in (each.start, each.stop)}) for of_dim in slices]
    numbers = [{edge: number for number, edge in enumerate(of_dim)} for of_dim in edges]
    counts = np.zeros([len(of_dim) - 1 for of_dim in edges], np.int32)
    for cut in cuts:
        cells = zip(numbers, cut.of_first, strict=True)
        counts[tuple(slice(number[each.start], number[each.stop]) for number, each in cells)] += 1
    return bool(counts.max() <= 1)


def _has_layout(piece: Tensor, item: Item) -> bool:
    """Returns whether an item's bytes are those of `piece` in host memory, in order."""
    is_plain = piece.device.type == "cpu" and piece.is_contiguous()
    return is_plain and [*piece.shape] == item.sizes and piece.dtype == getattr(torch, item.dtype)


def _view(data: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _read(path: Path) -> StoredCheckpoint:
    with _readable(path):
        return read_stored(path)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises Damaged for an error inside: the checkpoint was damaged after it was complete."""
    try:
        yield
    except Exception as error:
        if not_of_files(error):
            raise
        raise damaged(path, "", f"{type(error).__name__}: {first_line(error)}") from error
