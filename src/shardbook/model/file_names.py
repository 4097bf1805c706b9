"""File names: a checkpoint's tensors under the names and in the shapes that a model has them, by transformers' own
conversion mappings, taken as data.

Invariant: each rank reads only its rows, also of experts that the model stacks and the files hold one by one. Written
files have the files' names again, as transformers' save_pretrained writes them. What is not known is refused by name.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from shardbook.model.weight_files import StoredTensor
from shardbook.recipe import RecipeError

MAY_BE_LEFT = "_keys_to_ignore_on_load_unexpected"  # transformers' name of such a list
# What text models' names begin with in files of models that see or hear too, and in the text model alone.
TEXT_PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))


@dataclass(frozen=True, eq=False)
class FileNames:
    """The names that a model's tensors have in its files. `hf_model`: transformers' model that the model is made of."""

    hf_model: PreTrainedModel
    buffers: dict[str, Tensor]  # those of the whole model that files hold, on the meta device
    embedding: str  # the embedding's weight
    head: str  # the head's weight
    is_tied: bool
    # of the model: the files' shapes of parameters that are stacks, which it has as rows
    stacked: dict[str, torch.Size]
    conversions: list[Any] = field(init=False)
    shapes: "FullShapes" = field(init=False)  # before ranks share the parameters

    def __post_init__(self) -> None:
        object.__setattr__(self, "conversions", get_model_conversion_mapping(self.hf_model, add_legacy=False))
        shapes = {name: parameter.shape for name, parameter in self.hf_model.named_parameters()}
        object.__setattr__(self, "shapes", FullShapes(shapes | self.stacked))

    def may_be_left(self, name: str) -> bool:
        """Returns whether a file may hold `name` though the model has no such tensor: its family says so."""
        return any(re.search(pattern, name) for pattern in getattr(self.hf_model, MAY_BE_LEFT, None) or [])

    def of_text(self, stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
        """Returns the tensors of the text model in files of a model that has more, without the prefix that they have
        there; all tensors where there is no such prefix."""
        prefix, kept = self.text_prefix(stored)
        if not prefix:
            return stored
        text_tensors = {
            kept + name.removeprefix(prefix): each for name, each in stored.items() if name.startswith(prefix)
        }
        return text_tensors | ({self.head: stored[self.head]} if self.head in stored else {})

    def text_prefix(self, stored: Mapping[str, StoredTensor]) -> tuple[str, str]:
        """Returns what the text model's names begin with in files of a model that has more, and what in the text model;
        both empty in files of the text model itself."""
        for prefix, kept in () if self.embedding in stored else TEXT_PREFIXES:
            if self.embedding.startswith(kept) and prefix + self.embedding.removeprefix(kept) in stored:
                return prefix, kept
        return "", ""

    def describe_rest(self, stored: Mapping[str, StoredTensor]) -> str:
        """Returns a sentence on what files have beside the text model, which alone is exported; empty for nothing."""
        prefix, _ = self.text_prefix(stored)
        rest = {name.partition(".")[0] for name in stored if not name.startswith(prefix) and name != self.head}
        sentence = f"the text model alone, {type(self.hf_model).__name__}; its source has it under {prefix}"
        return f"{sentence}, beside {', '.join(sorted(rest)) or 'nothing'}, not exported" if prefix else ""

    def by_model_names(self, stored: Mapping[str, StoredTensor]) -> "dict[str, StoredTensor | Assembled]":
        """Returns the tensors of files by the model's names. Raises RecipeError for a conversion that is not known."""
        stored = self.of_text(stored)
        if not self.conversions:
            return {name: self._as_rows(name, each) for name, each in stored.items()}
        renamings = [each for each in self.conversions if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in self.conversions if isinstance(each, loading.WeightConverter)]
        tensors: dict[str, StoredTensor | Assembled] = {}
        parts: dict[str, dict[str, list[StoredTensor]]] = {}
        for name in sorted(stored, key=loading.dot_natural_key):
            new, pattern = loading.rename_source_key(name, renamings, converters)
            if pattern is None:
                tensors[new] = self._as_rows(new, stored[name])
            else:
                parts.setdefault(new, {}).setdefault(pattern, []).append(stored[name])
        of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        for new, by_pattern in parts.items():
            converter = of[next(iter(by_pattern))]
            kinds = [type(operation).__name__ for operation in converter.operations]
            if unknown := [kind for kind in kinds if kind not in MOVE_ROWS]:
                raise RecipeError(
                    f"weights: {new} is made of its files' tensors by {unknown[0]}, which is not known here"
                )
            ordered = {pattern: tuple(by_pattern.get(pattern, ())) for pattern in converter.source_patterns}
            asked = {"full_layer_name": new, "model": self.shapes, "config": self.hf_model.config}
            for target, name in self._targets(new, converter).items():
                tensors[name] = Assembled(ordered, converter, target, name in self.stacked, asked)
        return tensors

    def _targets(self, name: str, transform: Any) -> dict[str, str]:
        """Returns by their patterns the names of the tensors that `transform` makes together, `name` among them."""
        patterns = transform.target_patterns
        matched = next((pattern for pattern in patterns if pattern in name), patterns[0])
        return {pattern: name.replace(matched, pattern) for pattern in patterns}

    def _as_rows(self, name: str, stored: StoredTensor) -> StoredTensor:
        """Returns a tensor, a stack as the matrix of all its rows."""
        if name not in self.stacked or len(stored.shape) != 3:
            return stored
        return replace(stored, shape=(stored.shape[0] * stored.shape[1], stored.shape[2]))

    def to_files(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields a model's tensors as its files hold them: as they are, in parts, or several together once all came."""
        several = [each for each in self.conversions if len(each.target_patterns) > 1]
        held: dict[frozenset[str], dict[str, Tensor]] = {}
        for name, tensor in tensors:
            tensor = tensor.view(self.stacked.get(name, tensor.shape))
            of = next((each for each in several if any(pattern in name for pattern in each.target_patterns)), None)
            together = frozenset(self._targets(name, of).values() if of else [name])
            group = held.setdefault(together, {})
            group[name] = tensor
            if len(group) == len(together):
                del held[together]
                yield from (
                    loading.revert_weight_conversion(self.hf_model, group) if self.conversions else group
                ).items()

    def shapes_in_files(self, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
        """Returns the shapes of files' tensors, in the order of the model's `shapes`."""
        meta_tensors = ((name, torch.empty(shape, device="meta")) for name, shape in shapes.items())
        return {name: part.shape for name, part in self.to_files(meta_tensors)}


def files_of(model: Any) -> FileNames:
    """Returns the names that the tensors of `model` have in its files: of a CausalLM, or of a tree of its masters."""
    files: FileNames = model.files
    return files


# Operations that change no row, but its place, or leave rows out. (Along another dim they do: seen by what they make of
# numbers of rows.)
MOVE_ROWS = {"MergeModulelist", "Concatenate", "Chunk", "Split", "Interleave", "Inkling2UnpadVocab"}


@dataclass(frozen=True)
class FullShapes:
    """The model that an operation is told of while it moves numbers of rows: all that is asked of its parameters is a
    shape, of the whole, and a dtype, that of the numbers."""

    shapes: dict[str, torch.Size]

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], dtype=torch.int64, device="meta")


@dataclass(frozen=True, eq=False)
class Assembled:
    """A tensor of a model whose rows lie elsewhere in its files: in the tensors of `sources`, by patterns of their
    names, of which transformers' `converter` makes what it calls `target`. It is run on numbers of rows. `is_stack`:
    the model has all rows of a stack as one matrix. `asked`: what operations are told of the model."""

    sources: dict[str, tuple[StoredTensor, ...]]
    converter: Any
    target: str
    is_stack: bool
    asked: dict[str, Any]

    @property
    def pieces(self) -> list[StoredTensor]:
        """The files' tensors as matrices."""
        every = [part for parts in self.sources.values() for part in parts]
        return [replace(part, shape=(math.prod(part.shape[:-1]), *part.shape[1:][-1:])) for part in every]

    @property
    def dtype(self) -> str:
        """The dtype of all parts, as the format writes it; all of them where they differ."""
        return " and ".join(sorted({part.dtype for part in self.pieces}))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole; what cannot be put together has one that no model wants."""
        numbers, inner = self._numbers(), {part.shape[1:] for part in self.pieces}
        if numbers is None or len(inner) > 1:
            return (0,)
        return (*((numbers.numel(),) if self.is_stack else numbers.shape), *inner.pop())

    def describe(self) -> str:
        """Returns words on the files' tensors that it is made of: how many fit each pattern, and of which shapes."""
        shapes = {pattern: sorted({part.shape for part in parts}) for pattern, parts in self.sources.items()}
        kinds = {pattern: " or ".join(str(list(shape)) for shape in each) for pattern, each in shapes.items()}
        return ", ".join(
            f"{len(self.sources[pattern])} of {pattern} {kind}".rstrip() for pattern, kind in kinds.items()
        )

    def read_part(self, rows: slice, columns: slice | None = None) -> Tensor:
        """Reads `rows`, and of these the `columns`, as StoredTensor.read_part does."""
        read = self.read_rows(rows)
        return read if columns is None else read[:, columns]

    def read_rows(self, rows: slice) -> Tensor:
        """Reads rows along the first dim, from each part what lies between the first and the last one there."""
        shape, numbers = self.shape, self._numbers()
        assert numbers is not None, "it does not fit together"
        wanted, first, read = numbers.reshape(shape[0], -1)[rows].flatten(), 0, None
        for part in self.pieces:
            in_part = (wanted >= first) & (wanted < first + part.shape[0])
            if read is None or in_part.any():
                places = wanted[in_part] - first
                start, stop = (int(places.min()), int(places.max()) + 1) if len(places) else (0, 0)
                part_rows = part.read_rows(slice(start, stop))
                read = part_rows.new_empty(len(wanted), *part_rows.shape[1:]) if read is None else read
                read[in_part] = part_rows[places - start]
            first += part.shape[0]
        assert read is not None
        return read.view(rows.stop - rows.start, *shape[1:])

    def _numbers(self) -> Tensor | None:
        """Returns, for each row of the whole, its number among all rows of all parts; None where they do not fit."""
        numbers, first = dict[str, Any](), 0
        for pattern, parts in self.sources.items():
            for part in parts:
                leading = part.shape[:-1] if len(part.shape) > 1 else part.shape
                count = math.prod(leading)
                numbers.setdefault(pattern, []).append(torch.arange(first, first + count).view(*leading, 1))
                first += count
        patterns = self.converter.source_patterns, self.converter.target_patterns
        if len(numbers) < len(patterns[0]):
            return None
        try:
            for operation in self.converter.operations:
                numbers = operation.convert(numbers, *patterns, **self.asked)
            result: Tensor = numbers[self.target][0] if isinstance(numbers[self.target], list) else numbers[self.target]
            return result.squeeze(-1) if result.shape[-1] == 1 else None
        except (RuntimeError, ValueError, KeyError, AttributeError):  # uneven parts, or FullShapes is asked for more
            return None
