"""Units: groups of modules that are sharded, gathered and reduced together, and the order in which a pass runs them.

Invariant: every parameter is in exactly one unit, a tied one too. Units hold facts of shapes only: the model may lie on
the meta device, and no rank need exist, so a plan's formulas read the same units as a run.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from shardbook.arithmetic import ceil_div, round_up
from shardbook.model.experts import matrices_of
from shardbook.model.marks import FORWARD_ONLY, GATHERED, packed_numel
from shardbook.recipe import Parallel, RecipeError


@dataclass(frozen=True)
class Placement:
    """A parameter's place in the whole model, which is on no rank: its shape there, and what was done to it."""

    shape: torch.Size  # in the whole model
    numel: int  # the elements that it stands for: more than it has where they are packed
    trained: bool  # it gets a gradient
    tp_dim: int | None = None  # the dim that ranks along tp share; None: they have the same
    # each rank along tp has the whole gradient of what is the same on them, not a part of it
    tp_whole_gradient: bool = False
    is_expert: bool = False  # ranks along ep share its rows


def place_whole(model: nn.Module) -> dict[str, Placement]:
    """Returns the placements of the parameters of `model`, which is whole, by name and in order."""
    packed, named = packed_numel(model), model.named_parameters()
    return {name: Placement(p.shape, packed.get(p, p.numel()), p.requires_grad) for name, p in named}


def note_shards(
    placements: dict[str, Placement], model: nn.Module, experts: Container[nn.Parameter] = ()
) -> dict[str, Placement]:
    """Returns `placements` with the dims in which the parameters of `model` are now smaller than in the whole model:
    of its `experts` along ep, of all others along tp."""
    noted = dict(placements)
    for name, parameter in model.named_parameters():
        pairs = zip(placements[name].shape, parameter.shape, strict=True)
        dims = [dim for dim, (full, local) in enumerate(pairs) if full != local]
        is_expert = parameter in experts
        noted[name] = replace(placements[name], tp_dim=dims[0] if dims and not is_expert else None, is_expert=is_expert)
    return noted


@dataclass(frozen=True, eq=False)  # compared by identity: plans look a unit up thousands of times
class Unit:
    """Modules that are sharded, gathered and reduced together, with the facts that are known before any rank exists."""

    modules: tuple[nn.Module, ...]
    shapes: tuple[torch.Size, ...]  # of its own parameters (those in no unit inside it), a tied one once
    trained: tuple[bool, ...]  # of each of these parameters: it gets a gradient
    itemsizes: tuple[int, ...]  # of each: bytes of an element at rest
    is_block_matrix: tuple[bool, ...]  # of each: it is one matrix inside a block
    tp_sharded: tuple[bool, ...]  # of each: it is sharded along tp, not the same on every tensor-parallel rank
    parameters: int  # as the whole model counts them: more than numel where they are packed or sharded along tp
    reshard_after_backward: bool  # freed after each backward; False: kept gathered until the step's last backward
    reshard_after_forward: bool  # freed after forward too; False for the last unit, whose backward comes next
    read_in_backward: bool  # gathered for backward; False for an embedding, whose gradient needs no weight
    in_block: bool  # it is a block, or inside one
    is_root_like: bool  # it runs first and last (the root, or embedding and head in one): not freed inside a pass
    forward_only: bool  # no backward reaches it
    is_experts: bool = False  # the experts inside a block, on a mesh of their own: ranks along ep share their rows

    @cached_property
    def numel(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    @cached_property
    def inside(self) -> frozenset[nn.Module]:
        """The unit's first module and all modules in it: read once, since plans ask for one order after the other."""
        return frozenset(self.modules[0].modules())

    @cached_property
    def _rows(self) -> list[tuple[int, int, bool]]:
        """The rows of each parameter, the elements of a row, and whether the parameter is trained."""
        pairs = zip(self.shapes, self.trained, strict=True)
        return [(shape[0], prod(shape[1:]), trained) for shape, trained in pairs]

    @cached_property
    def _padded(self) -> dict[tuple[int, bool], int]:
        """A cache of the results of `padded_numel`, for which plans ask thousands of times."""
        return {}

    @property
    def trained_matrices(self) -> list[torch.Size]:
        """The shapes of the trained matrices inside a block."""
        each = zip(self.shapes, self.trained, self.is_block_matrix, strict=True)
        return [shape for shape, trained, is_matrix in each if trained and is_matrix]

    def padded_numel(self, shards: int, trained_only: bool = False) -> int:
        """Returns the elements of all `shards` shards together, each tensor's shards padded to its longest."""
        if (key := (shards, trained_only)) not in self._padded:
            counted = (row for row in self._rows if row[2] or not trained_only)
            self._padded[key] = sum(round_up(rows, shards) * width for rows, width, _ in counted)
        return self._padded[key]

    def replicated_numel(self, shards: int) -> int:
        """Returns the elements of one shard, padded, of trained parameters that are the same along tp."""
        each = zip(self.shapes, self.trained, self.tp_sharded, strict=True)
        replicated = (shape for shape, trained, is_sharded in each if trained and not is_sharded)
        return sum(ceil_div(shape[0], shards) * prod(shape[1:]) for shape in replicated)

    def rest_bytes(self, shards: int, master: int) -> int:
        """Returns the bytes of one shard at rest, padded: `master` bytes a trained element, a frozen one's own."""
        each = zip(self._rows, self.itemsizes, strict=True)
        return sum(ceil_div(n, shards) * width * (master if trained else size) for (n, width, trained), size in each)

    def cast_numel(self, compute: int) -> int:
        """Returns the elements of parameters whose dtype at rest is not one of `compute` bytes an element."""
        return sum(prod(shape) for shape, size in zip(self.shapes, self.itemsizes, strict=True) if size != compute)

    @property
    def gathers_again(self) -> bool:
        """Returns whether backward gathers the parameters again that forward had gathered."""
        return self.reshard_after_forward and self.read_in_backward

    def reshards_after_backward(self, is_last: bool) -> bool:
        """Returns whether parameters are freed after a backward; after a step's last one (`is_last`) always: the
        optimizer makes gathered parameters stale."""
        return self.reshard_after_backward or is_last

    @property
    def handle(self) -> FSDPModule:
        """The module on which this unit's fully_shard settings are made, once fully_shard is applied."""
        module = self.modules[0]
        assert isinstance(module, FSDPModule)
        return module


def shard_rows(rows: int, ranks: int, rank: int) -> int:
    """Returns the rows of dim 0 of shard `rank` of `ranks`, without padding: the last ones may be shorter, or empty."""
    padded = ceil_div(rows, ranks)
    return max(0, min(padded, rows - rank * padded))


def choose_units(
    model: nn.Module,
    parts: Sequence[Sequence[nn.Module]],
    blocks: Sequence[nn.Module],
    reshard_after_forward: bool,
    parallel: Parallel,
    placements: Mapping[str, Placement],
) -> tuple[Unit, ...]:
    """Returns the units of `model` in forward order, outer before inner, but the root (with all other parameters) last.

    `reshard_after_forward`: the stage's. `parts`: the groups of modules that are units, in forward order; `blocks`: the
    blocks among them. Raises RecipeError where a knob would change nothing.
    """
    in_blocks = {module for block in blocks for module in block.modules()}
    matrices = matrices_of(blocks)
    placed = {parameter: placements[name] for name, parameter in model.named_parameters()}
    parts = list(_with_experts(parts, {parameter for parameter, each in placed.items() if each.is_expert}))
    outer = [part for part in parts if part[0] not in in_blocks and not hasattr(part[0], FORWARD_ONLY)]
    units, taken = [], set[nn.Parameter]()
    for modules in [*parts[::-1], [model]]:  # inner before outer: an inner unit's parameters are its own
        parameters = [p for p in _parameters(modules) if p not in taken]
        taken |= set(parameters)
        fate = getattr(modules[0], FORWARD_ONLY, "")
        is_resharded = reshard_after_forward and sum(p.numel() for p in parameters) >= parallel.reshard_min_params
        is_lookup = all(isinstance(module, nn.Embedding) for module in modules)
        # Embedding and head in one unit are around all blocks. The one end that a pipeline stage may have is not.
        is_around = outer == [modules] and not is_lookup and modules != parts[-1]
        is_root_like = modules == [model] or is_around or fate == GATHERED
        units.append(
            Unit(
                modules=tuple(modules),
                shapes=tuple(p.shape for p in parameters),
                trained=tuple(p.requires_grad for p in parameters),
                itemsizes=tuple(p.element_size() for p in parameters),
                is_block_matrix=tuple(p in matrices for p in parameters),
                tp_sharded=tuple(placed[p].tp_dim is not None for p in parameters),
                parameters=sum(placed[p].numel for p in parameters),
                reshard_after_backward=is_resharded,
                reshard_after_forward=is_resharded
                and not is_root_like
                and not (modules in outer[-1:] and modules == parts[-1]),
                read_in_backward=not (fate or is_lookup),
                in_block=modules[0] in in_blocks,
                is_root_like=is_root_like,
                forward_only=bool(fate),
                is_experts=any(placed[p].is_expert for p in parameters),
            )
        )
    _check_units(units, blocks, reshard_after_forward, parallel, len(placed) == len(placements))
    return (*units[-2::-1], units[-1])


def _with_experts(
    parts: Sequence[Sequence[nn.Module]], experts: AbstractSet[nn.Parameter]
) -> Iterator[Sequence[nn.Module]]:
    """Yields each of `parts`, and after it the modules inside that have parameters among `experts`."""
    for part in parts:
        yield part
        for module in (module for outer in part for module in outer.modules()) if experts else ():
            if not experts.isdisjoint(module.parameters(recurse=False)):
                yield [module]


def _check_units(
    units: list[Unit], blocks: Sequence[nn.Module], reshards: bool, parallel: Parallel, is_alone: bool
) -> None:
    """Raises RecipeError where a knob would change nothing for these units. Unless `is_alone`, other ranks have other
    parameters, and only blocks count, which are the same on all ranks: else one rank would refuse alone, and the others
    would wait for it."""
    checked = [unit for unit in units if unit.shapes and (is_alone or unit.modules[0] in blocks)]
    if max(parallel.forward_prefetch, parallel.backward_prefetch) > 0 and len(checked) == 1 and is_alone:
        raise RecipeError(
            f"one unit of {checked[0].numel:,} parameters has all, so there is no next one to gather ahead; leave "
            "parallel.forward_prefetch and parallel.backward_prefetch out"
        )
    if reshards and not any(unit.reshard_after_backward for unit in checked):
        largest = max(unit.numel for unit in checked)
        raise RecipeError(
            f"parallel.reshard_min_params = {parallel.reshard_min_params}: nothing would be freed (the largest of "
            f"{len(checked)} units has {largest:,} parameters); set less, or parallel.stage=zero2"
        )


def parameters_of_units(units: Sequence[Unit]) -> dict[Unit, list[nn.Parameter]]:
    """Returns the parameters of each of `units` (outer before inner, the root last) that are in no unit inside it."""
    parameters_of, taken = dict[Unit, list[nn.Parameter]](), set[nn.Parameter]()
    for unit in [*units[-2::-1], units[-1]]:
        parameters_of[unit] = [parameter for parameter in _parameters(unit.modules) if parameter not in taken]
        taken.update(parameters_of[unit])
    return parameters_of


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return list(dict.fromkeys(p for module in modules for p in module.parameters()))


@dataclass(frozen=True)
class PartParameters:
    """The parameters of one part of a model, of which other ranks have the other parts."""

    parameters: list[nn.Parameter]  # all of this rank's
    tied: list[nn.Parameter]  # those of `parameters` that another part has too, which counts them
    group: ProcessGroup  # the ranks with the other parts

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self.parameters)


def backward_order(units: Sequence[Unit]) -> list[Unit]:
    """Returns the order in which backward reaches `units`, which are in forward order, outer before inner: units that
    span the pass first, then from the last one on, and again each outer unit before the units inside it."""
    place = {unit.modules[0]: number for number, unit in enumerate(units)}
    last_inside = [max((place[module] for module in place.keys() & unit.inside), default=0) for unit in units]
    reached = [n for n, unit in enumerate(units) if not unit.forward_only]
    inner = [n for n in reached if not units[n].is_root_like]
    inner.sort(key=lambda n: (last_inside[n], -n), reverse=True)
    return [units[n] for n in [*(n for n in reached if units[n].is_root_like), *inner]]
