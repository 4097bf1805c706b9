"""The optimizer of a run (table.py lists them all) and its learning rate; gradients are clipped in clip.py.

Invariant: the learning rate is a pure function of the step, so a schedule (a warm-up and its lr_scheduler_type) has no
state to save.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.optim.table import OPTIMIZERS, NoiseSource
from shardbook.recipe import Optim


def parameter_groups(model: nn.Module, optim: Optim) -> list[dict[str, Any]]:
    """Returns the trained parameters: matrices with weight decay, vectors without (as the Hugging Face Trainer)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    model: nn.Module, optim: Optim, seed: int = 0, full_shapes: Mapping[str, torch.Size] | None = None
) -> torch.optim.Optimizer:
    """Returns the optimizer optim.name over the sharded parameters. Muon takes the matrices of the model's `blocks`;
    adamw_bf16 rounds by `seed`, the same on every rank, and by the place of a parameter among `full_shapes`, those of
    all that the whole model trains (None: `model` is all of it)."""
    noise = NoiseSource(seed, full_shapes)
    return OPTIMIZERS[optim.name].build(model, parameter_groups(model, optim), optim, noise)


def state_kind(optimizer: torch.optim.Optimizer, shards: int) -> str:
    """Returns the kind of `optimizer`: it can load saved state only of the same kind."""
    name = getattr(optimizer, "kind", type(optimizer).__name__)
    return f"{name} over {shards} shards" if any(name == row.of_shards for row in OPTIMIZERS.values()) else name


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """Returns the rate of optimizer step `step` (1 to `steps`): linear warm-up, then constant, linear or cosine.

    No step runs at rate 0: warm-up ends at the peak, decay would reach 0 one step after the last.
    """
    warmup = round(optim.warmup_steps * steps) if optim.warmup_steps < 1 else int(optim.warmup_steps)
    if step <= warmup:
        return optim.learning_rate * step / warmup
    progress = (step - 1 - warmup) / max(1, steps - warmup)
    match optim.lr_scheduler_type:
        case "constant":
            return optim.learning_rate
        case "linear":
            return optim.learning_rate * (1 - progress)
        case "cosine":
            return optim.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> float:
    """Sets the `rate` of all parameters, and returns it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's: a number would be compiled into its step, at each step anew
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return rate
