"""The bytes that are allocated at each moment of a forward and a backward, counted from the code itself.

Invariant: a byte counts from the operation that allocates its storage until no tensor refers to it. Tensors may be fake
or on the meta device: only their sizes are asked for.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers.utils.import_utils as transformers_utils
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from shardbook.comm.torch_private import TorchDispatchMode, bytes_there, storages_in
from shardbook.data.loader import MicroBatch
from shardbook.recipe import Recipe

DOCUMENTS = 8  # cu_seqlens of a row, which attention gets


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate, as long as any tensor refers to them."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}  # storages_in's references
        self.known: set[int] = set()  # storages that do not count

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch's form of experts' products for tensors without values takes bf16 alone
        dtype = args[0].dtype if function.overloadpacket.__name__ == "_grouped_mm" else None
        if dtype:
            args = (*(each.to(torch.bfloat16) for each in args[:2]), *args[2:])
        result = function(*args, **(kwargs or {}))
        if dtype:
            result = torch.empty_like(result, dtype=dtype)
        before = len(self.storages)
        for key, reference in storages_in(result):
            if key not in self.known:
                self.storages.setdefault(key, reference)
        self.ran(function, args, kwargs or {}, result, is_larger=len(self.storages) > before)
        return result

    def ran(self, function: Any, args: Any, kwargs: Any, result: Any, is_larger: bool) -> None:
        """Is called after every operation. `is_larger`: it allocated a storage; else there are no more than before."""
        raise NotImplementedError

    def sizes(self) -> dict[int, int]:
        """Returns the bytes of each storage that is there now."""
        sizes = {}
        for key, reference in list(self.storages.items()):
            if (size := bytes_there(reference)) is None:
                del self.storages[key]
            else:
                sizes[key] = size
        return sizes

    def count(self, without: Container[int] = (), only: Container[int] | None = None) -> int:
        """Returns the bytes that are allocated now, but for the storages `without`; of `only` these."""
        sizes = self.sizes().items()
        return sum(size for key, size in sizes if key not in without and (only is None or key in only))


@dataclass
class Moment:
    """The bytes after one operation."""

    place: tuple[str, int]  # forward or backward, and the block; outside, and the number of blocks so far
    bytes: int  # of all tensors but gradients of parameters
    grads: dict[int, int]  # gradients of the parameters of each block; -1: of none


class MemoryTrace(LiveBytes):
    """Records the bytes after every operation of a forward and a backward of a model, and where in its blocks it is."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], outside: Iterable[Tensor], head: nn.Module):
        super().__init__()
        self.place: tuple[str, int] = ("outside", 0)
        self.moments: list[Moment] = []
        self.flops: dict[tuple[str, int], int] = {}
        self.queries: dict[int, int] = {}
        self.grads: dict[int, dict[int, int]] = {}  # storage and bytes of gradients of parameters, by block
        self.streams: dict[int, tuple[int, int]] = {}  # the bytes of a block's input and output
        self.around: dict[int, tuple[int, int]] = {}  # the bytes before a block's forward, and after it
        self.inputs: dict[int, Any] = {}
        self.first: set[int] = set()  # storages that are there before all blocks
        self.gone = 0  # bytes of these that are not there when forward is over: a mask of which blocks have their own
        self.kept_inputs: dict[int, bool] = {}
        self.known = {key for tensor in [*model.parameters(), *outside] for key, _ in storages_in(tensor)}
        owner = {id(p): number for number, block in enumerate(blocks) for p in block.parameters()}
        self.hooks = [head.register_forward_pre_hook(self.reach)]
        for parameter in model.parameters():
            if parameter.requires_grad:
                arrived = partial(self.take_gradient, owner.get(id(parameter), -1))
                self.hooks.append(parameter.register_post_accumulate_grad_hook(arrived))
        for number, block in enumerate(blocks):
            self.hooks.append(block.register_forward_pre_hook(partial(self.enter, number), with_kwargs=True))
            self.hooks.append(block.register_forward_hook(partial(self.leave, number)))

    def ran(self, function: Any, args: Any, kwargs: Any, result: Any, is_larger: bool) -> None:
        if is_larger:
            self.note()
        name = function.overloadpacket.__name__
        if "mm" in name and (count := flop_registry.get(function.overloadpacket)):
            self.flops[self.place] = self.flops.get(self.place, 0) + count(*args, **kwargs, out_val=result)
        elif self.place[0] == "forward" and ("attn" in name or "attention" in name):
            self.queries[self.place[1]] = args[0].numel()

    def note(self) -> None:
        grads = {number: sum(held.values()) for number, held in self.grads.items()}
        apart = {key for held in self.grads.values() for key in held}
        self.moments.append(Moment(self.place, self.count(apart), grads))

    def take_gradient(self, owner: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        sizes = self.grads.setdefault(owner, {})
        sizes |= {key: size_of(parameter.grad) for key, _ in storages_in(parameter.grad)}

    def enter(self, number: int, block: nn.Module, args: Any, named: Any) -> None:
        given = first_tensor([*args, *named.values()])
        if not given.requires_grad:  # of a frozen embedding: other blocks are asked for the gradient of their input
            nothing = torch.zeros((), dtype=given.dtype, device=given.device, requires_grad=True)
            self.storages.popitem()
            given.add_(nothing)
        self.streams[number] = (size_of(given), 0)
        self.inputs[number] = next(storages_in(given))[1]
        self.around[number] = (self.count(), 0)
        self.first = self.first or self.storages.keys() - {key for key, _ in storages_in(given)}
        self.place = ("forward", number)
        given.register_hook(lambda gradient: self.end(number))

    def leave(self, number: int, block: nn.Module, args: Any, output: Any) -> None:
        first = first_tensor(output if isinstance(output, tuple | list) else [output])
        self.streams[number] = (self.streams[number][0], size_of(first))
        self.around[number] = (self.around[number][0], self.count())
        self.place = ("outside", number + 1)
        first.register_hook(lambda gradient: self.begin(number))

    def reach(self, head: nn.Module, args: Any) -> None:
        """Notes, when forward is over, what is still there."""
        # nobody but autograd holds a block's input by now
        self.kept_inputs = {number: bytes_there(given) is not None for number, given in self.inputs.items()}
        self.before_blocks = self.count(only=self.first)
        self.gone = self.floor(0) - self.before_blocks
        last = max(self.around)
        self.held = self.floor(last) + self.kept(last) - self.gone
        given = first_tensor(args)
        self.after_blocks = self.count() - size_of(given) - self.held
        given.register_hook(lambda gradient: self.begin(last + 1))  # of the last norm

    def in_norm(self) -> int:
        """Returns the most bytes in the backward of the last norm, above what blocks hold."""
        place = "backward", len(self.around)
        return max((moment.bytes for moment in self.moments if moment.place == place), default=self.held) - self.held

    def begin(self, number: int) -> None:
        self.place = ("backward", number)

    def end(self, number: int) -> None:
        if self.place == ("backward", number):  # the gradient of its input is the one with which another block begins
            self.place = ("outside", number)

    def floor(self, number: int) -> int:
        """Returns the bytes of what is there before a block's forward, but for its input."""
        return self.around[number][0] - self.streams[number][0]

    def kept(self, number: int) -> int:
        """Returns the bytes that a block keeps for its backward."""
        given, output = self.streams[number]
        return self.around[number][1] - output - given * (not self.kept_inputs[number]) - self.floor(number)

    def inside(self, phase: str, number: int, with_grads: bool) -> list[int]:
        """Returns the bytes after each operation of a block's forward or backward, above what was there before it."""
        moments = [moment for moment in self.moments if moment.place == (phase, number)]
        floor = self.floor(number) - self.gone * (phase == "backward")
        return [moment.bytes - floor + with_grads * moment.grads.get(number, 0) for moment in moments]


def size_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def first_tensor(values: Iterable[Any]) -> Tensor:
    """Returns the first tensor of floats among what a block takes or returns: what passes from block to block."""
    return next(value for value in values if isinstance(value, Tensor) and value.is_floating_point())


def full_rows(recipe: Recipe, slices: int) -> MicroBatch:
    """Returns a micro-batch of full rows: along cp the first of `slices` slices of each row."""
    rows, of_row, length = recipe.train.per_device_train_batch_size, recipe.sequences, recipe.data.max_length
    ids = torch.zeros(rows, of_row * length // slices, dtype=torch.int64)
    cu_seqlens = torch.zeros(rows * (DOCUMENTS + 1) + 1, dtype=torch.int32)
    trained = (length // slices - (slices == 1),) * (rows * of_row)
    positions = torch.zeros(sum(trained), dtype=torch.int64)
    ends = torch.zeros(len(trained), dtype=torch.int64)
    known = torch.zeros(len(trained)) if of_row > 1 and recipe.preference.precompute_ref_log_probs else None
    counts = torch.zeros(len(trained)) if of_row > 1 else None
    facts = recipe.data.packing, length, 0, trained, counts, ends, known, slices
    is_token = torch.ones_like(ids, dtype=torch.bool) if recipe.train.router_aux_loss_coef else None
    return MicroBatch(ids, ids.clone(), cu_seqlens, positions, positions.clone(), *facts, is_token)


@contextmanager
def meta_tensors() -> Iterator[None]:
    """Has transformers take a tensor on the meta device for a fake one, of whose numbers it asks nothing. An operation
    on it has the same sizes, and takes a fifth of the time. Raises NotImplementedError inside, where
    scaled_dot_product_attention is called: no kernel of it is for that device, so torch would take it apart."""
    asked: Any = transformers_utils
    is_fake = asked.is_fake_tensor
    asked.is_fake_tensor = lambda x: is_fake(x) or getattr(x, "is_meta", False)
    try:
        with _WithoutSdpa():
            yield
    finally:
        asked.is_fake_tensor = is_fake


class _WithoutSdpa(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            raise NotImplementedError("scaled_dot_product_attention looks at the device")
        return function(*args, **(kwargs or {}))
