"""A simulated step at full cluster size on one CPU, without allocation: the run's own model and stage on fake tensors,
in a fake process group, with every storage counted from its allocation to its release.

Invariant: the bytes are those of the code itself, not of a formula; tests hold the formulas to them. A GPU's kernels
are taken to keep the tensors that their fake versions keep, and its allocator to waste nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardbook.comm.torch_private import fake_store, fake_tensors, probe
from shardbook.data.loader import MicroBatch, count_totals
from shardbook.data.tokenized import Totals
from shardbook.memory.activation import apply_checkpointing
from shardbook.model.causal_lm import CausalLM, materialize
from shardbook.model.laid_out import LaidOut
from shardbook.optim.table import OPTIMIZERS
from shardbook.parallel.mesh import build_mesh
from shardbook.parallel.sharding import apply_stage
from shardbook.parallel.units import matrices_of
from shardbook.plan.blocks import kinds_of
from shardbook.plan.timeline import LiveBytes, full_rows
from shardbook.recipe import RecipeError

LAYERS = (4, 5)  # blocks of one kind take the same bytes: from these two numbers of layers any other follows
# Micro-batch, forward or backward, and the place: a block, counted from the nearer end, or before or after blocks.
Moment = tuple[int, str, int | str]
# the result's first element is the loss, as in objectives/
LossTerms = Callable[[Any, MicroBatch, Totals], torch.Tensor]


@dataclass(frozen=True)
class Simulated:
    """The fullest moment of forward and backward on the first rank, optimizer state included."""

    peak_bytes: int
    moment: str  # forward or backward
    kept_bytes: int  # between two steps: parameters and optimizer state


class Followed(LiveBytes):
    """Notes the most bytes at each moment of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.moment: Moment = (0, "forward", "before")
        self.most: dict[Moment, int] = {}

    def ran(self, function: Any, args: Any, kwargs: Any, result: Any, is_larger: bool) -> None:
        self.most[self.moment] = max(self.most.get(self.moment, 0), self.count())

    def follow(self, blocks: Sequence[nn.Module]) -> None:
        """Makes the moment change with each of `blocks`, in forward and in backward."""
        last = len(blocks) - 1

        def enter(number: int, *_: Any) -> None:
            micro, phase = self.moment[:2]
            self.moment = (micro, phase, number if number < 2 else max(number - last - 1, -3))

        def leave(number: int, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            micro, phase = self.moment[:2]
            if phase == "forward":
                if output.requires_grad:
                    output.register_hook(lambda gradient: enter(number))  # its backward begins
                if number == last:
                    self.moment = (micro, phase, "after")

        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(enter, number))
            block.register_forward_hook(partial(leave, number))


def simulate_step(laid: LaidOut, terms: LossTerms) -> Simulated:
    """Runs two steps of `laid`, whose model is used up, and returns the bytes of the second: rows are full, every token
    but the first is trained, and a teacher runs with all its layers. Raises RecipeError for pp and offload."""
    if laid.recipe.parallel.pp_size > 1:
        asked = f"--simulate: parallel.pp_size = {laid.recipe.parallel.pp_size}"
        raise RecipeError(f"{asked}: no pipeline is simulated; leave --simulate out, or set parallel.pp_size=1")
    if laid.recipe.offload.optimizer != "none":
        asked = f"--simulate: offload.optimizer = {laid.recipe.offload.optimizer!r}"
        raise RecipeError(f"{asked}: a host's memory is not simulated; leave --simulate out, or set it to none")
    probe("stages", "run", "simulate")
    times = laid.config.num_hidden_layers - LAYERS[1]
    if times <= 0 or len({*kinds_of(laid.config)}) > 1:
        most, kept = _simulate(laid, terms)
    else:
        (few, few_kept), (more, more_kept) = (_simulate(laid.with_layers(count), terms) for count in LAYERS)
        # each moment grows by the same bytes with each layer; blocks between the ends have bytes between theirs
        most = {moment: size + times * (size - few.get(moment, size)) for moment, size in more.items()}
        kept = more_kept + times * (more_kept - few_kept)
    fullest = max(most, key=lambda moment: most[moment])
    return Simulated(most[fullest], fullest[1], kept)


def _simulate(laid: LaidOut, terms: LossTerms) -> tuple[dict[Moment, int], int]:
    """Returns the most bytes at each moment of the second step, and the bytes kept between steps."""
    recipe, model, layout = laid.recipe, laid.model, laid.layout
    # this process is rank 0 of a fake group, whose collectives send nothing; there must be no group already
    dist.init_process_group("fake", rank=0, world_size=laid.world.size, store=fake_store())
    try:
        apply_checkpointing(model.blocks, recipe.activation, recipe.lora.lora_dropout > 0)
        sharded = apply_stage(model, layout, build_mesh(layout.sizes, "cpu"))
        micros, live = recipe.train.gradient_accumulation_steps, Followed()
        with fake_tensors(), live:
            materialize(model, torch.device("cpu"))
            state = _optimizer_state(model, recipe.optim.name)
            live.follow(model.blocks)
            kept = live.count()
            for _ in range(2):
                live.most = {}
                for micro in range(micros):
                    batch = full_rows(recipe, layout.cp_size)
                    with sharded.micro_batch(is_last=micro == micros - 1):
                        live.moment = (micro, "forward", "before")
                        loss = terms(model, batch, Totals(*count_totals([batch], recipe.sequences)))[0]
                        live.moment = (micro, "backward", "before")
                        loss.backward()
                model.zero_grad()
                del loss, batch
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
