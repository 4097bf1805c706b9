"""File names: a checkpoint's tensors under the names and in the shapes that a model has them, by transformers' own
conversion mappings, taken as data.

Invariant: each rank reads only its rows, also of experts that the model stacks and the files hold one by one. Written
files have the files' names again, as transformers' save_pretrained writes them. What is not known is refused by name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from shardbook.model.stored import Stored
from shardbook.recipe import RecipeError

MAY_BE_LEFT = "_keys_to_ignore_on_load_unexpected"  # transformers' name of such a list
# What text models' names begin with in files of models that see or hear too, and in the text model alone.
TEXT_PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))


@dataclass(frozen=True, eq=False)
class FileNames:
    """The names that a model's tensors have in its files. `whole`: transformers' model, whose parts the model has."""

    whole: PreTrainedModel
    buffers: tuple[str, ...]  # of the model that files hold
    embedding: str  # the embedding's weight
    head: str  # the head's weight
    is_tied: bool
    stacked: dict[
        str, torch.Size
    ]  # of the model: the files' shapes of parameters that are stacks, which it has as rows
    conversions: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "conversions", get_model_conversion_mapping(self.whole, add_legacy=False))

    def may_be_left(self, name: str) -> bool:
        """Returns whether a file may hold `name` though the model has no such tensor: its family says so."""
        return any(re.search(pattern, name) for pattern in getattr(self.whole, MAY_BE_LEFT, None) or [])

    def of_text(self, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
        """Returns the tensors of the text model in files of a model that has more, without the prefix that they have
        there; all tensors where there is no such prefix."""
        for prefix, kept in () if self.embedding in stored else TEXT_PREFIXES:
            found = {kept + name.removeprefix(prefix): each for name, each in stored.items() if name.startswith(prefix)}
            if self.embedding in found:
                head = {self.head: stored[self.head]} if self.head in stored else {}
                return found | head
        return stored

    def by_model_names(self, stored: Mapping[str, Stored]) -> "dict[str, Stored | Assembled]":
        """Returns the tensors of files by the model's names. Raises RecipeError for a conversion that is not known."""
        stored = self.of_text(stored)
        if not self.conversions:
            return {name: self._as_rows(name, each) for name, each in stored.items()}
        renamings = [each for each in self.conversions if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in self.conversions if isinstance(each, loading.WeightConverter)]
        found: dict[str, Stored | Assembled] = {}
        parts: dict[str, dict[str, list[Stored]]] = {}
        for name in sorted(stored, key=loading.dot_natural_key):
            new, pattern = loading.rename_source_key(name, renamings, converters)
            if pattern is None:
                found[new] = self._as_rows(new, stored[name])
            else:
                parts.setdefault(new, {}).setdefault(pattern, []).append(stored[name])
        of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        for new, by_pattern in parts.items():
            converter = of[next(iter(by_pattern))]
            ordered = [tuple(by_pattern.get(pattern, ())) for pattern in converter.source_patterns]
            found[new] = Assembled(tuple(ordered), _merges(new, converter.operations))
        return found

    def _as_rows(self, name: str, stored: Stored) -> Stored:
        """Returns a tensor, a stack as the matrix of all its rows."""
        if name not in self.stacked or len(stored.shape) != 3:
            return stored
        return replace(stored, shape=(stored.shape[0] * stored.shape[1], stored.shape[2]))

    def to_files(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields a model's tensor as its files hold it: one, or its parts."""
        if name in self.stacked:
            tensor = tensor.view(self.stacked[name])
        if not self.conversions:
            yield name, tensor
        else:
            yield from loading.revert_weight_conversion(self.whole, {name: tensor}).items()

    def shapes_in_files(self, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
        """Returns the shapes of files' tensors, in the order of the model's `shapes`."""
        whole = ((name, torch.empty(shape, device="meta")) for name, shape in shapes.items())
        return {new: part.shape for name, tensor in whole for new, part in self.to_files(name, tensor)}


# How a tensor is made of its files' tensors: whether they are stacked, one an expert, or put one after another.
MERGES: dict[tuple[tuple[str, Any], ...], bool] = {
    (("MergeModulelist", 0),): True,
    (("MergeModulelist", 0), ("Concatenate", 1)): True,
    (("Concatenate", 0),): False,
}


def _merges(name: str, operations: Sequence[Any]) -> bool:
    kinds = tuple((type(each).__name__, getattr(each, "dim", None)) for each in operations)
    if kinds not in MERGES:
        said = ", ".join(kind for kind, _ in kinds)
        raise RecipeError(f"weights: {name} is made of its files' tensors by {said}, which is not known here")
    return MERGES[kinds]


@dataclass(frozen=True)
class Assembled:
    """A tensor of a model that files hold in parts: of each of `sources`, in order, its tensors. `merges`: one an
    expert, the rows of one expert after those of another; else one source after another."""

    sources: tuple[tuple[Stored, ...], ...]
    merges: bool

    @property
    def pieces(self) -> list[Stored]:
        """The parts in the order of the whole's rows."""
        return [part for parts in (zip(*self.sources, strict=False) if self.merges else self.sources) for part in parts]

    @property
    def dtype(self) -> str:
        """The dtype of all parts, as the format writes it; all of them where they differ."""
        return " and ".join(sorted({part.dtype for parts in self.sources for part in parts}))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole; what cannot be put together has one that no model wants."""
        is_even = len({len(parts) for parts in self.sources}) == 1
        is_even &= all(part.shape == parts[0].shape for parts in self.sources for part in parts)
        inner = {part.shape[1:] for parts in self.sources for part in parts}
        if not all(self.sources) or len(inner) > 1 or (self.merges and not is_even):
            return (0,)
        return (sum(part.shape[0] for part in self.pieces), *inner.pop())

    def read_part(self, rows: slice, columns: slice | None = None) -> Tensor:
        """Reads `rows`, and of these the `columns`, as a Stored does."""
        read = self.read_rows(rows)
        return read if columns is None else read[:, columns]

    def read_rows(self, rows: slice) -> Tensor:
        """Reads rows along the first dim, of the parts that have them alone."""
        found, first = [], 0
        for part in self.pieces:
            start, stop = (min(max(place - first, 0), part.shape[0]) for place in (rows.start, rows.stop))
            if start < stop or not first:
                found.append(part.read_rows(slice(start, stop)))
            first += part.shape[0]
        return torch.cat(found)
