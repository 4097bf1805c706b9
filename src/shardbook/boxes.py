"""Boxes: the part of a parameter, or of its optimizer state, that a rank has, and which of several ranks writes it.

Invariant: every element of a tensor is in the box of at least one rank and is written by exactly one, in every layout;
all ranks compute that alike, without a message. Weights files, initial weights, optimizers and checkpoints ask here.
Nothing here reads or writes a file.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardbook.arithmetic import ceil_div
from shardbook.axes import PP, rank_along


@dataclass(frozen=True)
class Box:
    """A rectangular part of the tensor `name`, in elements; a tensor without dimensions has empty offsets and sizes."""

    name: str
    offsets: tuple[int, ...]  # of the part in the full tensor
    sizes: tuple[int, ...]
    shape: tuple[int, ...]  # of the full tensor

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part, as an index into the full tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


class Placed(Protocol):
    """A part of a tensor: a Box, or a row of a checkpoint's `.items` file."""

    @property
    def offsets(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Sequence[int]: ...


class Cut(NamedTuple):
    """An overlap of two boxes of one tensor: slices into each of them, and the elements that it has."""

    of_first: tuple[slice, ...]
    of_second: tuple[slice, ...]
    numel: int


def local_box(tensor: Tensor, name: str = "") -> Box:
    """Returns this rank's part of `tensor`: of a DTensor its shard, of a plain tensor all of it.

    Each mesh axis that shards splits as torch.chunk does: ceil(n / N) each, the last ranks fewer or none. The innermost
    axis splits the full tensor, the next one its parts: fully_shard comes after tensor parallel, also along one dim.
    """
    if not isinstance(tensor, DTensor):
        return Box(name, (0,) * tensor.ndim, tuple(tensor.shape), tuple(tensor.shape))
    mesh, held = tensor.device_mesh, [range(size) for size in tensor.shape]
    for axis in reversed(range(mesh.ndim)):
        if (dim := _split_dim(tensor, axis)) is not None:
            each = ceil_div(len(held[dim]), mesh.size(axis))
            start = each * mesh.get_local_rank(axis)
            held[dim] = held[dim][start : start + each]
    box = Box(name, tuple(r.start for r in held), tuple(map(len, held)), tuple(tensor.shape))
    assert box.sizes == tuple(tensor.to_local().shape), f"DTensor split {box.shape} in another way"
    return box


def _split_dim(tensor: DTensor, axis: int) -> int | None:
    """Returns the dim that a mesh axis splits, None where ranks along it have equal parts. Not by is_shard: for a dim
    that two axes split, torch's placement returns False."""
    placement = tensor.placements[axis]
    dim: int | None = None if placement.is_replicate() else placement.dim  # type: ignore[attr-defined]
    return dim


def overlap(first: Placed, second: Placed) -> Cut | None:
    """Returns what two parts of one tensor share; None where they share no element."""
    of_first, of_second, numel = list[slice](), list[slice](), 1
    for a, size_a, b, size_b in zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True):
        start, stop = max(a, b), min(a + size_a, b + size_b)
        if start >= stop:
            return None
        of_first.append(slice(start - a, stop - a))
        of_second.append(slice(start - b, stop - b))
        numel *= stop - start
    return Cut(tuple(of_first), tuple(of_second), numel)


def shard_number(tensor: Tensor) -> int:
    """Returns the number of this rank's shard: the same on ranks that have equal parts."""
    number = 0
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis in range(mesh.ndim):
            if _split_dim(tensor, axis) is not None:
                number = number * mesh.size(axis) + mesh.get_local_rank(axis)
    return number


def copy_axes(tensor: Tensor, sizes: dict[str, int]) -> tuple[str, ...]:
    """Returns the axes of a layout's `sizes` along which ranks have the same part of `tensor`: all that do not split
    it, but for pp, whose ranks have other layers."""
    split = set[str]()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        split = {name for axis, name in enumerate(names) if _split_dim(tensor, axis) is not None}
    return tuple(axis for axis in sizes if axis not in split and axis != PP)


def assign_writes(
    held: Iterable[tuple[str, Tensor, int]],
    meshes: Sequence[dict[str, int]],
    rank: int,
    tied: AbstractSet[str] = frozenset(),
) -> tuple[set[str], int]:
    """Returns the names of the tensors whose part this rank writes, and the bytes of those of which it has the first
    copy: summed over ranks these are the bytes that must be written. (Of replicas one is saved: what a save plan of
    torch's distributed checkpoints calls deduplication.)

    `held`: name, tensor and bytes of its part of each tensor, in an order that is the same on all ranks with that part.
    `meshes`: the sizes of the axes of each mesh over all ranks on which tensors lie. `tied`: names of tensors that the
    first and the last pipeline stage have. Among the tensors of which the same ranks have copies, each is written by
    the rank that has the fewest bytes by then:

                       dp_replicate 0       dp_replicate 1       dp_replicate 2
        w (6 bytes)    writes               has a copy           has a copy
        m (4 bytes)    has a copy           writes               has a copy
        v (4 bytes)    has a copy           has a copy           writes
        b (1 byte)     has a copy           writes               has a copy
    """
    loads, writes, first_bytes = dict[tuple[int, tuple[str, ...], bool], list[int]](), set[str](), 0
    for name, tensor, size in held:
        names = (tensor.device_mesh.mesh_dim_names or ()) if isinstance(tensor, DTensor) else ()
        mesh_number, sizes = next((number, each) for number, each in enumerate(meshes) if {*names} <= each.keys())
        axes, is_tied = copy_axes(tensor, sizes), name in tied
        # the last stage before the first, which has more layers where they do not divide
        number = int(is_tied and rank_along(sizes, PP, rank) == 0)
        for axis in axes:
            number = number * sizes[axis] + rank_along(sizes, axis, rank)
        copies = prod(sizes[axis] for axis in axes) * (1 + is_tied)
        load = loads.setdefault((mesh_number, axes, is_tied), [0] * copies)
        writer = load.index(min(load))
        load[writer] += size
        if writer == number and size:
            writes.add(name)
        first_bytes += size * (number == 0)
    return writes, first_bytes
