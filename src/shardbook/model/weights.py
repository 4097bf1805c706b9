"""Weights: Hugging Face safetensors in and out of sharded DTensors, a slice at a time.

Reading: every rank opens each file itself, once, and reads only the rows of its own shards, so host memory peaks at
its shard plus one slice, and nothing is broadcast. Every name, shape, dtype and file length is checked before the first
byte is copied. Writing: one stream of full tensors into files of 5 GB, in a side directory that is renamed when whole.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from shardbook.boxes import local_box
from shardbook.local_tensors import local_part
from shardbook.model.dtypes import DTYPES
from shardbook.model.export_files import choose_padding, write_generation
from shardbook.model.file_buffers import read_buffers, stored_buffers
from shardbook.model.file_names import Assembled, FileNames, files_of
from shardbook.model.hub import INDEX
from shardbook.model.marks import NOT_STORED
from shardbook.model.nf4 import ABSMAX_END, PACKED_END, fill_rows
from shardbook.model.weight_files import FLOATS, open_tensors
from shardbook.paths import whole_directory
from shardbook.recipe import RecipeError

SHARD_BYTES = 5 * 10**9  # as transformers' save_pretrained
SHOWN = 6  # of what is wrong with weights files, in one line
ROWS_BYTES = 2**26  # of rows that are compared at once
SCORE = "score.weight"  # a reward model's head, which a causal LM's files do not have
MEANINGLESS = ".rotary_emb.inv_freq"  # saved as a weight by transformers before 4.32
Shapes = Mapping[str, Sequence[int]]  # of parameters, by name, in order
ADAPTERS = LOW, HIGH, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
LOW_STACK, HIGH_STACK = f"_{LOW}", f"_{HIGH}"  # how the names of updates of stacked experts end


def is_adapter(name: str) -> bool:
    """Returns whether `name` names an adapter's parameter (adapters.py)."""
    return any(word in ADAPTERS for word in name.split(".")) or name.endswith((LOW_STACK, HIGH_STACK))


def student_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields names and parameters of `model` without those of its teacher, which are in no file of the model."""
    return (named for named in model.named_parameters() if not named[0].startswith(NOT_STORED))


def load_weights(model: nn.Module, folder: Path, file_shapes: Shapes | None = None) -> None:
    """Fills the materialized, sharded parameters of `model` from the safetensors of `folder`. Raises RecipeError.
    `file_shapes`: of the whole model's, as `file_shapes` returns them, of which `model` may have a part.

    Values are cast to the parameter's dtype, or quantised to its bits. A tied head may be present, equal to the
    embedding. All missing, unexpected, misshapen and non-float entries are named in one error, before any tensor is
    read. A reward model's head is read where the files have it; a reward model ignores the language model's head.
    """
    slices = shard_slices(model)
    elsewhere = {name: shape for name, shape in (file_shapes or {}).items() if name not in slices}
    wanted = {name: part.shape for name, part in slices.items()} | elsewhere
    files = files_of(model)
    wanted |= {name: buffer.shape for name, buffer in files.buffers.items()}
    unread = {files.head} if files.is_tied or SCORE in wanted else set()
    with open_tensors(folder) as opened:
        stored = files.by_model_names(opened)
        if SCORE in wanted:
            wanted = {name: shape for name, shape in wanted.items() if name != SCORE or name in stored}
        problems = [f"missing {name}" for name in wanted if name not in stored]
        others = (name for name in stored if name not in wanted and name not in unread)
        left = (name for name in others if not name.endswith(MEANINGLESS) and not files.may_be_left(name))
        problems += [f"unexpected {name}" for name in left]
        for name in (name for name in wanted if name in stored):
            shape, dtype = list(stored[name].shape), stored[name].dtype
            if shape != list(wanted[name]):
                parts = f": its files have {each.describe()}" if isinstance(each := stored[name], Assembled) else ""
                problems.append(f"{name} has shape {shape}, the model wants {list(wanted[name])}{parts}")
            elif dtype not in FLOATS:
                problems.append(f"{name} has dtype {dtype}, not a float")
        if files.is_tied and files.head in stored and stored[files.head].dtype not in FLOATS:
            problems.append(f"{files.head} has dtype {stored[files.head].dtype}, not a float")
        if problems:
            more = f"; and {len(problems) - SHOWN} more" * (len(problems) > SHOWN)
            raise RecipeError(f"weights in {folder} do not fit the model: {'; '.join(problems[:SHOWN])}{more}")
        if files.is_tied and files.head in stored:
            _check_tied(stored[files.head], stored[files.embedding], folder)
        for name, part in ((name, part) for name, part in slices.items() if name in wanted):
            part.fill(stored[name].read_part(part.rows, part.columns))
        read_buffers(model, stored)


def _check_tied(head: Any, embedding: Any, folder: Path) -> None:
    """Raises RecipeError, on every rank, where files of a model that ties its head have another one: transformers keeps
    that head from 5.8 on, so the run would start from another model. One of them may have more rows, of padding. Each
    rank reads both tensors, which files of tied models seldom have."""
    step = max(1, ROWS_BYTES // (4 * head.shape[-1]))
    count = min(head.shape[0], embedding.shape[0])
    for first in range(0, count, step):
        rows = slice(first, min(first + step, count))
        ours, theirs = (each.read_rows(rows).float() for each in (head, embedding))
        if ours.shape != theirs.shape or not torch.equal(ours, theirs):
            differs = f"a head that differs from the embedding in rows {rows.start} to {rows.stop - 1}"
            raise RecipeError(
                f"weights in {folder}: tie_word_embeddings is true in config.json, and there is {differs}; set it "
                "to false (in a copy on a disk, if the model is the hub's)"
            )


@dataclass(frozen=True)
class ShardSlice:
    """The part of a tensor in the weights files, of `shape`, that this rank has: its `rows`, and of these the
    `columns`. `fill` takes them."""

    shape: torch.Size
    rows: slice
    fill: Callable[[Tensor], Any]
    columns: slice | None = None  # all of them

    def fill_from(self, full: Tensor) -> None:
        part = full[self.rows]
        self.fill(part if self.columns is None else part[:, self.columns])


def shard_slices(model: nn.Module) -> dict[str, ShardSlice]:
    """Returns the place of each parameter by its name in the files, in the model's order, a tied one once, under its
    embedding's name; adapters are in no file."""
    slices, parameters = {}, dict(student_parameters(model))
    for name, parameter in parameters.items():
        local, rows, columns = local_slices(parameter.detach())
        if name.endswith(PACKED_END):
            stem = name.removesuffix(PACKED_END)
            absmax = local_part(parameters[stem + ABSMAX_END].detach())
            nested = bool(model.get_submodule(name.rpartition(".")[0]).nested)
            slices[stem] = _packed_slice(parameter, rows, columns, partial(fill_rows, local, absmax, nested), nested)
        elif not name.endswith(ABSMAX_END) and not is_adapter(name):
            slices[name] = ShardSlice(parameter.shape, rows, local.copy_, columns)
    return slices


def _packed_slice(packed: Tensor, rows: slice, columns: slice | None, fill: Any, nested: bool) -> ShardSlice:
    """Returns the place of a matrix that is `packed`, of which this rank has these `rows`, and of the packed elements
    of each row these `columns`."""
    each = 2 * packed.element_size()  # numbers of a packed element
    shape = torch.Size((packed.shape[0], packed.shape[1] * each))
    numbers = None if columns is None else slice(columns.start * each, columns.stop * each)
    if nested:  # the scale of a row is that of all its numbers
        return ShardSlice(shape, rows, partial(fill, numbers=numbers))
    return ShardSlice(shape, rows, fill, numbers)


def file_shapes(full_shapes: Shapes, packed_numel: Mapping[str, int]) -> dict[str, torch.Size]:
    """Returns the shape of each weight of a model in its files, by its name there, in order: of its parameters
    `full_shapes` without adapters, and of packed ones, which stand for `packed_numel` elements, what they stand for."""
    shapes = {}
    for name, shape in full_shapes.items():
        if name.endswith(PACKED_END):
            shapes[name.removesuffix(PACKED_END)] = torch.Size((shape[0], packed_numel[name] // shape[0]))
        elif not name.endswith(ABSMAX_END) and not is_adapter(name):
            shapes[name] = torch.Size(shape)
    return shapes


def init_weights(model: nn.Module, seed: int, only: str = "", file_shapes: Shapes | None = None) -> None:
    """Fills parameters with random weights: matrices normal with the config's initializer_range, vectors as their
    family makes them (norms 1 or 0, biases 0). `only`: that parameter alone. `file_shapes`: as in `load_weights`.

    A pure function of (seed, parameter, device type): each full tensor is drawn, and each rank keeps its part, so every
    world size and stage starts from the same numbers.
    """
    config: Any = model.config
    device = next(model.parameters()).device
    vectors: dict[str, Tensor] = model.vectors  # type: ignore[assignment]
    slices = shard_slices(model)
    is_part = any(name not in slices for name in file_shapes or {})
    # numbered in the whole model: else its parts would draw equal weights
    for index, name in enumerate((file_shapes or {}) if is_part else slices):
        if name not in slices or (only and name != only):
            continue
        part = slices[name]
        if len(part.shape) == 1:
            first = vectors.get(name)
            if first is None:  # a reward model's head, an adapter's
                first = torch.full(part.shape, 0.0 if name.endswith("bias") else 1.0)
            part.fill_from(first.to(device))
            continue
        generator = torch.Generator(device).manual_seed(seed * 100_003 + index)
        full = torch.empty(part.shape, device=device)
        full.normal_(0.0, config.initializer_range, generator=generator)
        part.fill_from(full)


def local_slices(parameter: Tensor) -> tuple[Tensor, slice, slice | None]:
    """Returns this rank's part of a parameter with its box's rows, and the columns of these (None: all), which the rank
    reads from the weights files and writes to them."""
    box = local_box(parameter)
    rows, *others = box.slices
    columns = others[0] if others and box.sizes[1] < box.shape[1] else None
    return local_part(parameter), rows, columns


def local_rows(parameter: Tensor) -> tuple[Tensor, slice]:
    """Returns this rank's part of a parameter that is sharded along its rows only, and these rows."""
    local, rows, columns = local_slices(parameter)
    assert columns is None, f"{tuple(parameter.shape)}: cut along its columns too"
    return local, rows


def full_tensors(
    model: nn.Module, dtype: str, full_shapes: Shapes | None = None, named: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields `(name, full tensor in dtype)` of every parameter, or of those `named`, one at a time. Collective: every
    rank must consume all. `full_shapes`: of the whole model's. Where every rank has a part of them, rank 0 gets all.

    Each rank casts its shard before the gather: the values are the same, since a cast looks at one value alone, and
    fp32 masters exported in bf16 cost half the bytes on the network and half the memory.
    """
    parameters, device = named or dict(student_parameters(model)), next(model.parameters()).device
    shapes = full_shapes or {}
    is_part = any(name not in parameters for name in shapes)
    for name in shapes if is_part else parameters:
        tensor = torch.empty(0, device=device)
        if name in parameters:
            cast = parameters[name].detach().to(DTYPES[dtype])
            tensor = whole_tensor(cast) if isinstance(cast, DTensor) else cast
        if is_part:
            tensor = bring_to_main(tensor, shapes[name], DTYPES[dtype], name in parameters)
        yield name, tensor


def full_buffers(model: nn.Module, full_shapes: Shapes) -> dict[str, Tensor]:
    """Returns the buffers of the whole model that files hold; `full_shapes` and ranks as of `full_tensors`."""
    buffers, parameters = stored_buffers(model), dict(student_parameters(model))
    if all(name in parameters for name in full_shapes):
        return buffers
    files = files_of(model)
    absent = torch.empty(0, device=next(model.parameters()).device)
    return {
        name: bring_to_main(buffers.get(name, absent), meta.shape, meta.dtype, name in buffers)
        for name, meta in files.buffers.items()
    }


def bring_to_main(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, is_here: bool) -> Tensor:
    """Returns on rank 0 the whole `tensor` of `shape`, which the first rank where it `is_here` sends. Collective."""
    holders = torch.tensor([dist.get_rank() if is_here else dist.get_world_size()], device=tensor.device)
    dist.all_reduce(holders, dist.ReduceOp.MIN)
    first, rank = int(holders), dist.get_rank()
    if first and rank == first:
        dist.send(tensor.contiguous(), 0)
    elif first and rank == 0:
        tensor = torch.empty(shape, dtype=dtype, device=tensor.device)
        dist.recv(tensor, first)
    return tensor


def whole_tensor(tensor: DTensor) -> Tensor:
    """Gathers a DTensor's full value, one mesh axis after the other, the outermost first, since fully_shard sharded
    last. All at once, torch warns of each tensor that is sharded twice along one dim."""
    placements = list(tensor.placements)
    for axis in range(len(placements) - 1):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def save_weights(
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shapes: dict[str, torch.Size],
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: Path,
    dtype: str,
    write: bool,
    files: FileNames,
    buffers: Mapping[str, Tensor],
    stops: Sequence[int] = (),
) -> None:
    """Writes a directory that `AutoModelForCausalLM.from_pretrained` loads. Holds at most one 5 GB file in memory.

    `tensors` yields every name of `shapes`, in its order, to be written by the names of `files`; `buffers` keep their
    dtype. With `write` False it only consumes them (the other ranks of a collective). The directory appears under its
    name when complete. `stops`: the tokens that end what the model has learned to write.
    """
    if not write:
        for _ in tensors:
            pass
        return
    shapes = shapes | {name: buffer.shape for name, buffer in buffers.items()}
    in_files = files.shapes_in_files(shapes)
    plan = _plan_files(in_files, DTYPES[dtype].itemsize)
    file_of = {name: file for file, names in plan.items() for name in names}
    pending: dict[str, Tensor] = {}
    with whole_directory(out) as side:
        cast = ((name, tensor.to("cpu", DTYPES[dtype])) for name, tensor in tensors)
        for name, part in files.to_files(chain(cast, buffers.items())):
            pending[name] = part.to("cpu", copy=True).contiguous()
            if len(pending) == len(plan[file := file_of[name]]):
                save_file(pending, side / file, metadata={"format": "pt"})
                pending = {}
        if len(plan) > 1:
            total = sum(shape.numel() for shape in in_files.values()) * DTYPES[dtype].itemsize
            index = {"metadata": {"total_size": total}, "weight_map": file_of}
            (side / INDEX).write_text(json.dumps(index, indent=2))
        clean = type(config).from_dict(
            {k: v for k, v in config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
        )
        clean.architectures = config.architectures or [type(files.hf_model).__name__]
        clean.dtype = DTYPES[dtype]
        if SCORE in shapes:
            clean.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[config.model_type]]
            clean.num_labels = 1
            choose_padding(clean, tokenizer, {*stops, tokenizer.eos_token_id})
        else:
            write_generation(side, source, config, stops)
        clean.save_pretrained(side)
        tokenizer.save_pretrained(side)


def _plan_files(shapes: dict[str, torch.Size], itemsize: int) -> dict[str, list[str]]:
    """Returns the tensor names of each file, in order, each file of at most SHARD_BYTES (or one tensor)."""
    groups: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = shape.numel() * itemsize
        if not groups or size > room:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": names for n, names in enumerate(groups, start=1)}
