"""Lion and AdEMAMix: elementwise optimizers, so that a rank steps its shard by itself.

Invariant: a step is a function of gradients, state and the step count, with no collective and no host sync; its bits
are the same however rows are sharded.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shardbook.comm.fused import fused
from shardbook.parallel.tensor import local_part
from shardbook.recipe import Optim


def local_values(tensor: Tensor) -> Tensor:
    """Returns this rank's part of `tensor`, detached from autograd."""
    return local_part(tensor).detach()


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors in this rank's part of `tensor`: of one of eight bits its codes, scales and table."""
    tensor = local_part(tensor)
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    return [part for name in names for part in parts_of(getattr(tensor, name))] or [tensor]


def step_adamw(tensors: Sequence[list[Tensor]], steps: list[Tensor], betas: Sequence[float], **rates: Any) -> None:
    """Runs torch's fused AdamW over plain tensors, in place. `tensors`: weights, both moments, gradients; `rates`: lr,
    eps, weight_decay. Adds one to each of `steps`."""
    weights, first, second, gradients = tensors
    how: dict[str, Any] = {"beta1": betas[0], "beta2": betas[1], "amsgrad": False, "maximize": False}
    adamw(weights, gradients, first, second, [], steps, fused=True, **how, **rates)


class Elementwise(torch.optim.Optimizer, ABC):
    """An optimizer with decoupled weight decay and an elementwise `update`. State of a parameter: `step` (fp32, on the
    host) and `moments`, with the placement and dtype of the parameter."""

    moments: ClassVar[tuple[str, ...]]
    update: ClassVar[Callable[..., None]]  # (weights, gradients, moments, `numbers`), in place; fp32, of one shape

    def __init__(self, groups: list[dict[str, Any]], optim: Optim):
        super().__init__(groups, {"lr": optim.learning_rate, "weight_decay": 0.0})
        self.optim = optim

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no gradient is made anew here
        for group in self.param_groups:
            numbers: dict[int, Sequence[float] | Tensor] = {}  # step -> coefficients, made once
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state |= {name: torch.zeros_like(parameter) for name in self.moments}
                state["step"] += 1
                tensors = [local_values(each) for each in (parameter, parameter.grad, *map(state.get, self.moments))]
                if (step := int(state["step"])) not in numbers:
                    both = 1 - group["lr"] * group["weight_decay"], -group["lr"]
                    numbers[step] = place_numbers([*both, *self.numbers(step)], tensors[0].device)
                fused(self.update, tensors[0].device.type)(*tensors, numbers[step])

    @abstractmethod
    def numbers(self, step: int) -> Sequence[float]:
        """Returns the coefficients that `update` takes at `step` after the weights' factor and the negative rate."""


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


def update_ademamix(weight: Tensor, gradient: Tensor, fast: Tensor, square: Tensor, slow: Tensor, numbers: Any) -> None:
    decay, rate, first, second, add_second, third, fast_size, square_size, alpha, eps = numbers
    fast.lerp_(gradient, first)
    if isinstance(add_second, Tensor):
        square.mul_(second).add_(gradient * gradient * add_second)
    else:
        square.mul_(second).addcmul_(gradient, gradient, value=add_second)
    slow.lerp_(gradient, third)
    size = (square / square_size).sqrt_().add_(eps)
    add_share(weight.mul_(decay), add_share(fast / fast_size, slow, alpha).div_(size), rate)


class Lion(Elementwise):
    """Lion: a step by the sign of a momentum (Chen et al., arXiv 2302.06675, program 1), with one moment. The paper's
    betas are 0.9 and 0.99, its rate a third to a tenth of AdamW's and its decay larger by the same factor."""

    moments, update = ("exp_avg",), staticmethod(update_lion)

    def numbers(self, step: int) -> Sequence[float]:
        first, second = self.optim.betas
        return 1 - first, 1 - second


class AdEMAMix(Elementwise):
    """AdamW with a second, slow average of gradients (Pagliardini et al., arXiv 2409.03137, algorithm 1), so with three
    moments. The slow average's share `alpha` and its beta rise over `alpha_warmup_steps`."""

    moments, update = ("exp_avg", "exp_avg_sq", "exp_avg_slow"), staticmethod(update_ademamix)

    def numbers(self, step: int) -> Sequence[float]:
        first, second, _ = self.optim.betas
        alpha, third = slow_average(self.optim, step)
        return 1 - first, second, 1 - second, 1 - third, 1 - first**step, 1 - second**step, alpha, self.optim.eps


def slow_average(optim: Optim, step: int) -> tuple[float, float]:
    """Returns the share and the beta of the slow average at `step`: the paper's section 3, equations 2 and 3. The
    half-life rises linearly from the half-life of the first beta."""
    (start, _, beta), share = optim.betas, step / max(1, optim.alpha_warmup_steps)
    if share >= 1:
        return optim.alpha, beta
    low, high = math.log(start), math.log(beta)
    return optim.alpha * share, min(beta, math.exp(low * high / ((1 - share) * high + share * low)))
