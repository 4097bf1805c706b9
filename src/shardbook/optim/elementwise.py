"""Lion: an elementwise optimizer, so that a rank steps its shard by itself; and what optimizers share.

Invariant: a step is a function of gradients and state, with no collective and no host sync; its bits are the same
however rows are sharded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shardbook.comm.compile_on_cuda import fused
from shardbook.local_tensors import local_values
from shardbook.recipe import Optim


def step_adamw(tensors: Sequence[list[Tensor]], steps: list[Tensor], betas: Sequence[float], **rates: Any) -> None:
    """Runs torch's fused AdamW over plain tensors, in place. `tensors`: weights, both moments, gradients; `rates`: lr,
    eps, weight_decay. Adds one to each of `steps`."""
    weights, first, second, gradients = tensors
    how: dict[str, Any] = {"beta1": betas[0], "beta2": betas[1], "amsgrad": False, "maximize": False}
    adamw(weights, gradients, first, second, [], steps, fused=True, **how, **rates)


def place_numbers(numbers: Sequence[float], device: torch.device) -> Sequence[float] | Tensor:
    """Returns the numbers for a CPU, else one fp32 tensor: Python numbers would be compiled in, at each step anew."""
    return numbers if device.type == "cpu" else send_numbers(torch.tensor(numbers), device)


def send_numbers(numbers: Tensor, device: torch.device) -> Tensor:
    """Copies a few numbers to `device` without a wait. Pinned: else the driver would copy them to a buffer first."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


def add_share(into: Tensor, other: Tensor, share: Any) -> Tensor:
    """Adds `other` times `share` to `into`. A number goes to torch's add, which on a CPU rounds once."""
    return into.add_(other * share) if isinstance(share, Tensor) else into.add_(other, alpha=share)


def update_lion(weight: Tensor, gradient: Tensor, momentum: Tensor, numbers: Any) -> None:
    decay, rate, first, second = numbers
    direction = momentum.lerp(gradient, first).sign_()
    momentum.lerp_(gradient, second)
    add_share(weight.mul_(decay), direction, rate)


class Lion(torch.optim.Optimizer):
    """Lion: a step by the sign of a momentum (Chen et al., arXiv 2302.06675, program 1), with decoupled weight decay.
    The paper's betas are 0.9 and 0.99, its rate a third to a tenth of AdamW's and its decay larger by the same factor.
    State of a parameter: `step` (fp32, on the host) and `exp_avg`, with the parameter's placement and dtype."""

    def __init__(self, groups: list[dict[str, Any]], optim: Optim):
        super().__init__(groups, {"lr": optim.learning_rate, "weight_decay": 0.0})
        self.betas = optim.betas

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no gradient is made anew here
        first, second = self.betas
        for group in self.param_groups:
            coefficients = 1 - group["lr"] * group["weight_decay"], -group["lr"], 1 - first, 1 - second
            placed: Sequence[float] | Tensor | None = None
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not (state := self.state[parameter]):
                    state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter)}
                state["step"] += 1
                tensors = [local_values(each) for each in (parameter, parameter.grad, state["exp_avg"])]
                device = tensors[0].device
                placed = place_numbers(coefficients, device) if placed is None else placed
                fused(update_lion, device.type)(*tensors, placed)
