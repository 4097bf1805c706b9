"""Items: moves tensors to and from the files of a checkpoint, by the storage interfaces of torch's distributed
checkpoint (DCP).

DCP plans who writes and reads which rows, and an error on one rank is raised on every rank. Invariant: a load that
returns has verified each byte, and a number that is not finite reaches no published checkpoint. A load that raises
leaves behind what it had read until then: who goes on loads all of it again, or begins it anew.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardbook.comm.torch_private import norms_of
from shardbook.optim.elementwise import parts_of
from shardbook.ranks.exits import RunFailed
from shardbook.run.stored_items import Facts, Item, damaged, open_data, read_item, write_items

NORMED = (torch.float32, torch.bfloat16, torch.float16)  # their norms are added up in fp32


class _AsPlanned:
    """Passes plans on unchanged, where DCP lets a storage change them."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class ItemWriter(_AsPlanned, StorageWriter):
    """Writes rank `rank`'s items of one checkpoint. On rank 0 `begin` makes the directory for it, and `publish` takes
    that and what all ranks wrote."""

    def __init__(
        self, path: Path, rank: int, begin: Callable[[], Path], publish: Callable[[Path, dict[str, Facts]], None]
    ):
        self.path, self.rank, self.begin, self.publish = path, rank, begin, publish
        self.side: Path | None = None  # the directory, on rank 0

    def set_up_storage_writer(self, is_coordinator: bool, *positional: Any, **named: Any) -> None: ...

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.side = self.begin()
        return [replace(plan, storage_data=self.side) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = list(items_of(plan, planner))
        self.check_finite(items)
        written = write_items(
            plan.storage_data, self.rank, ((facts, [*map(bytes_of, parts)]) for facts, parts in items)
        )
        return done([WriteResult(dcp.MetadataIndex(f"rank-{self.rank}"), 0, written)])

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        assert self.side
        self.publish(self.side, {name: facts for each in results for name, facts in each[0].storage_data.items()})

    def check_finite(self, items: list[tuple[Facts, list[Tensor]]]) -> None:
        """Raises RunFailed where a number of this rank's is not finite, so that no rank's is published."""
        tensors = [(facts[0], part) for facts, parts in items for part in parts]
        floats = [(name, part) for name, part in tensors if part.is_floating_point() and part.numel()]
        for name in _not_finite(floats):
            raise RunFailed(
                f"checkpoint {self.path}: {name} is not finite on rank {self.rank}, so it is not published; go on from "
                "the newest one with a lower optim.learning_rate or other data"
            )


class ItemReader(_AsPlanned, StorageReader):
    """Reads and verifies the items of a checkpoint that a plan asks for: one that is a whole tensor on the host goes
    straight into it, each other through a buffer."""

    def __init__(self, path: Path, items: dict[str, list[Item]]):
        self.path, self.buffer = path, memoryview(bytearray())
        self.places, known = dict[dcp.MetadataIndex, tuple[str, Item]](), dict[str, dcp.TensorStorageMetadata]()
        for file, item in ((file, item) for file, rows in items.items() for item in rows):
            offsets, sizes, shape = map(torch.Size, (item.offsets, item.sizes, item.shape))
            self.places[dcp.MetadataIndex(item.name, offsets)] = file, item
            properties = dcp.TensorProperties(dtype=getattr(torch, item.dtype))
            whole = known.setdefault(item.name, dcp.TensorStorageMetadata(properties, shape, []))
            whole.chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
        self.metadata = dcp.Metadata(dict(known))

    def read_metadata(self, *positional: Any, **named: Any) -> dcp.Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *more: Any, **named: Any) -> None: ...

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def place(asked: ReadItem) -> tuple[str, int, str]:
            file, item = self.places[asked.storage_index]
            return file, item.begin, item.name  # items without bytes begin where the next one does

        with ExitStack() as stack:
            for file, of_file in groupby(sorted(plan.items, key=place), lambda each: place(each)[0]):
                opened = stack.enter_context(open_data(self.path, file))
                for _, parts in groupby(of_file, place):
                    self._read(file, opened, list(parts), planner)
        return done(None)

    def _read(self, file: str, opened: Any, parts: list[ReadItem], planner: LoadPlanner) -> None:
        """Reads one item, and copies each of the `parts` of it that were asked for."""
        _, item = self.places[parts[0].storage_index]
        targets = [planner.resolve_tensor(part).detach() for part in parts]
        if len(parts) == 1 and _has_layout(targets[0], item):
            read_item(self.path, file, opened, item, bytes_of(targets[0]))
            planner.commit_tensor(parts[0], targets[0])
            return
        if len(self.buffer) < item.length:
            self.buffer = memoryview(bytearray(item.length))
        stored = read_item(self.path, file, opened, item, self.buffer)
        for part, target in zip(parts, targets, strict=True):
            if hasattr(target, "__tensor_flatten__"):
                if list(part.lengths) != item.sizes:
                    raise damaged(self.path, file, f"{item.name}: a part of a quantised tensor was asked for")
                at = 0
                for inner in parts_of(target):
                    inner.copy_(_view(stored[at : at + inner.nbytes], inner.dtype, list(inner.shape)))
                    at += inner.nbytes
            else:
                whole = _view(stored, getattr(torch, item.dtype), item.sizes)
                for dim, (start, length) in enumerate(zip(part.storage_offsets, part.lengths, strict=True)):
                    whole = whole.narrow(dim, start, length)
                target.copy_(whole)
            planner.commit_tensor(part, target)


def done(result: Any) -> Future[Any]:
    """Returns a future that has its `result`."""
    future = Future[Any]()
    future.set_result(result)
    return future


def items_of(plan: SavePlan, planner: SavePlanner) -> Iterator[tuple[Facts, list[Tensor]]]:
    """Yields name, offsets, sizes, shape and dtype of each item of a plan, and the parts of its tensor."""
    for item in plan.items:
        tensor, data = planner.resolve_data(item), item.tensor_data
        assert data and isinstance(tensor, Tensor), f"{item.index.fqn} is no tensor"
        dtype = str(data.properties.dtype).removeprefix("torch.")
        facts = [item.index.fqn, *map(list, (data.chunk.offsets, data.chunk.sizes, data.size)), dtype]
        yield facts, parts_of(tensor.detach())


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns a tensor's bytes, on the host."""
    array: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _has_layout(tensor: Tensor, item: Item) -> bool:
    """Returns whether an item's bytes are those of `tensor` in host memory, in order."""
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not hasattr(tensor, "__tensor_flatten__")
    return is_plain and [*tensor.shape] == item.sizes and tensor.dtype == getattr(torch, item.dtype)


def _view(data: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _not_finite(named: list[tuple[str, Tensor]]) -> Iterator[str]:
    """Yields the names of tensors with a number that is not finite. Norms are a tenth of isfinite's price, and infinite
    for large finite numbers too: only those are looked at again."""
    groups = dict[Any, list[tuple[str, Tensor]]]()
    for name, tensor in named:
        groups.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
    for (_, dtype), group in groups.items():
        suspected = group
        if dtype in NORMED:
            finite = torch.stack(norms_of([tensor for _, tensor in group], torch.float32)).isfinite().tolist()
            suspected = [each for each, good in zip(group, finite, strict=True) if not good]
        yield from (name for name, tensor in suspected if not tensor.isfinite().all())
