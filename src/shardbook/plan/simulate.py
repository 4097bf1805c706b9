"""A simulated step at full cluster size on one CPU, without allocation: the run's own model and stage on fake tensors,
in a fake process group, with every storage counted from its allocation to its release.

Invariant: the bytes are those of the code itself, not of a formula; tests hold the formulas to them. A GPU's kernels
are taken to keep the tensors that their fake versions keep, and its allocator to waste nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardbook.comm.torch_private import bytes_there, fake_store, fake_tensors
from shardbook.data.loader import MicroBatch, count_totals
from shardbook.data.tokenized import Totals
from shardbook.memory.activation import apply_checkpointing
from shardbook.model.causal_lm import CausalLM, materialize
from shardbook.model.experts import matrices_of
from shardbook.optim.table import OPTIMIZERS
from shardbook.parallel.mesh import build_mesh
from shardbook.parallel.pass_monitor import tensors_in
from shardbook.parallel.placement import PlacedModel
from shardbook.parallel.sharding import ShardedModel, apply_stage
from shardbook.plan.measure_blocks import kinds_of
from shardbook.plan.memory_trace import LiveBytes, full_rows
from shardbook.recipe import Recipe, RecipeError

LAYERS = (4, 5)  # blocks of one kind take the same bytes: from these two numbers of layers any other follows
# Micro-batch, forward or backward, and the place in the order of running: a block, or before or after all of them.
Moment = tuple[int, str, int | str]
# the result's first element is the loss, as in objectives/
LossTerms = Callable[[Any, MicroBatch, Totals], torch.Tensor]


@dataclass(frozen=True)
class Simulated:
    """The fullest moment of forward and backward on the first rank, optimizer state included."""

    peak_bytes: int
    moment: str  # forward or backward
    kept_bytes: int  # between two steps: parameters and optimizer state


class PeakTracker(LiveBytes):
    """Notes the most bytes at each moment of a step, and the blocks in the order in which they ran."""

    def __init__(self) -> None:
        super().__init__()
        self.moment: Moment = (0, "forward", "before")
        self.most: dict[Moment, int] = {}
        self.order: list[int] = []
        self.bound = self.known_count = 0  # no fewer bytes than there are now, the storages among them

    def ran(self, function: Any, args: Any, kwargs: Any, result: Any, is_larger: bool) -> None:
        """Counts where there can be more than before, since a count asks each storage. What was resized is filled by a
        copy."""
        fresh = islice(reversed(self.storages.values()), len(self.storages) - self.known_count)
        self.bound += sum(bytes_there(reference) or 0 for reference in fresh)
        self.known_count = len(self.storages)
        if self.bound > self.most.get(self.moment, -1) or "copy" in function.overloadpacket.__name__:
            self.note()

    def sizes(self) -> dict[int, int]:
        sizes = super().sizes()
        self.bound, self.known_count = sum(sizes.values()), len(sizes)
        return sizes

    def note(self) -> None:
        """Takes the bytes that are there now into account for the moment."""
        self.most[self.moment] = max(self.most.get(self.moment, 0), self.count())

    def begin_step(self) -> None:
        self.most, self.order = {}, []

    def begin(self, micro: int, phase: str, place: int | str = "before") -> None:
        self.moment = (micro, phase, place)

    def end_backward(self) -> None:
        """Is called when the backward of a micro-batch is over."""

    def enter(self, place: int | str) -> None:
        self.begin(*self.moment[:2], place)

    def follow(self, blocks: Sequence[nn.Module]) -> None:
        """Makes the moment change with each of `blocks`, in forward and in backward."""

        def begin(number: int, block: nn.Module, args: Any, named: Any) -> None:
            if self.moment[1] == "forward":
                self.order.append(number)
            self.enter(number)
            if number == 0 and (given := first_trained((args, named))) is not None:
                given.register_hook(lambda gradient: self.enter("after"))  # backward of all blocks is over

        def end(number: int, block: nn.Module, args: Any, output: Any) -> None:
            if (trained := first_trained(output)) is not None:
                trained.register_hook(lambda gradient: self.enter(number))  # its backward begins
            if self.moment[1] == "forward" and number == len(blocks) - 1:
                self.enter("after")

        for number, block in enumerate(blocks):
            # before fully_shard's hook, so that the gather is the block's
            block.register_forward_pre_hook(partial(begin, number), prepend=True, with_kwargs=True)
            block.register_forward_hook(partial(end, number))


def first_trained(values: Any) -> Tensor | None:
    """Returns the first tensor in `values` that backward gives a gradient: what passes from block to block."""
    return next((tensor for tensor in tensors_in(values) if tensor.requires_grad), None)


def find_unsimulated(recipe: Recipe) -> dict[str, str]:
    """Returns the keys of `recipe` with which no step is simulated, with the reason, and the way out, of each."""
    reasons = dict[str, str]()
    if recipe.offload.optimizer != "none":
        reasons["offload.optimizer"] = (
            f"= {recipe.offload.optimizer!r}: a host's memory is not simulated; leave --simulate out, or set it to none"
        )
    if recipe.parallel.pp_size > 1:
        way_out = "leave --simulate out, or set parallel.pp_size=1"
        reasons["parallel.pp_size"] = f"= {recipe.parallel.pp_size}: no pipeline is simulated; {way_out}"
    return reasons


def simulate_step(placed: PlacedModel, terms: LossTerms) -> Simulated:
    """Runs a step of `placed`, whose model is used up, after a shorter one, and returns its bytes: rows are full, every
    token but the first is trained, and a teacher runs with all its layers. Raises RecipeError for pp and offload."""
    for key, reason in find_unsimulated(placed.recipe).items():
        raise RecipeError(f"--simulate: {key} {reason}")
    times = placed.config.num_hidden_layers - LAYERS[1]
    if times <= 0 or len({*kinds_of(placed.config)}) > 1:
        most, kept = _simulate(placed, terms)
    else:
        (few, few_kept), (more, more_kept) = (_simulate(placed.with_layers(count), terms) for count in LAYERS)
        few, more = (from_ends(each, count) for each, count in zip((few, more), LAYERS, strict=True))
        # each moment grows by the same bytes with each layer; blocks between the ends have bytes between theirs
        most = {moment: size + times * (size - few.get(moment, size)) for moment, size in more.items()}
        kept = more_kept + times * (more_kept - few_kept)
    fullest = max(most, key=lambda moment: most[moment])
    return Simulated(most[fullest], fullest[1], kept)


def from_ends(most: dict[Moment, int], blocks: int) -> dict[Moment, int]:
    """Returns the most bytes at moments whose blocks are counted from the nearer end."""
    folded: dict[Moment, int] = {}
    for (micro, phase, place), size in most.items():
        near = place if isinstance(place, str) or place < 2 else max(place - blocks, -3)
        folded[micro, phase, near] = max(size, folded.get((micro, phase, near), 0))
    return folded


def run_steps(
    live: PeakTracker, sharded: ShardedModel, micros: int, batch_of: Callable[[], Any], loss_of: Callable[[Any], Tensor]
) -> None:
    """Runs a step of one micro-batch, which makes what is there from then on, and one of `micros` under `live`, which
    keeps the bytes of that."""
    for count in (1, micros):
        live.begin_step()
        for micro in range(count):
            batch = batch_of()
            with sharded.micro_batch(is_last=micro == count - 1):
                live.begin(micro, "forward")
                loss = loss_of(batch)
                live.begin(micro, "backward")
                loss.backward()
            live.end_backward()
        sharded.model.zero_grad()
        del loss, batch


def _simulate(placed: PlacedModel, terms: LossTerms) -> tuple[dict[Moment, int], int]:
    """Returns the most bytes at each moment of a step, and the bytes kept between steps."""
    recipe, model, layout = placed.recipe, placed.model, placed.layout
    # this process is rank 0 of a fake group, whose collectives send nothing; there must be no group already
    dist.init_process_group("fake", rank=0, world_size=placed.world.size, store=fake_store())
    try:
        apply_checkpointing(model.blocks, recipe.activation, recipe.lora.lora_dropout > 0)
        sharded = apply_stage(model, layout, build_mesh(layout.sizes, "cpu"))
        micros, live = recipe.train.gradient_accumulation_steps, PeakTracker()
        with fake_tensors(), live:
            materialize(model, torch.device("cpu"))
            state = _optimizer_state(model, recipe.optim.name)
            live.follow(model.blocks)
            kept = live.count()

            def loss_of(batch: MicroBatch) -> Tensor:
                return terms(model, batch, Totals(*count_totals([batch], recipe.sequences)))[0]

            run_steps(live, sharded, micros, lambda: full_rows(recipe, layout.cp_size), loss_of)
            del state
        return live.most, kept
    finally:
        dist.destroy_process_group()


def _optimizer_state(model: CausalLM, name: str) -> list[torch.Tensor]:
    """Returns tensors of as many bytes as the optimizer keeps: not every optimizer can step on fake tensors. The step
    itself needs fewer bytes than backward, whose activations are freed by then."""
    matrices = matrices_of(model.blocks)
    sizes = []
    for parameter in (p for p in model.parameters() if p.requires_grad):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        sizes.append(OPTIMIZERS[name].state_bytes(local.numel(), local.element_size(), parameter in matrices))
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]
