"""Lion and AdEMAMix: optimizers that look at one number at a time, so that a shard steps alone.

Invariant: a step is a function of gradients, state and the step count, with no collective and no host sync; the same
bits however rows are dealt out.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from shardbook.recipe import Optim


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of it, as numbers that nobody differentiates."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def step_adamw(tensors: Sequence[list[Tensor]], steps: list[Tensor], betas: Sequence[float], **rates: Any) -> None:
    """torch's fused AdamW over plain tensors, in place. `tensors`: weights, both moments, gradients; `rates`: lr, eps,
    weight_decay. Counts `steps` up."""
    weights, first, second, gradients = tensors
    how: dict[str, Any] = {"beta1": betas[0], "beta2": betas[1], "amsgrad": False, "maximize": False}
    adamw(weights, gradients, first, second, [], steps, fused=True, **how, **rates)


class Elementwise(torch.optim.Optimizer, ABC):
    """Decoupled weight decay, then `change`. State of a parameter: `step` (fp32, on the host) and `moments`, placed
    and typed as the parameter."""

    moments: ClassVar[tuple[str, ...]]

    def __init__(self, groups: list[dict[str, Any]], optim: Optim):
        super().__init__(groups, {"lr": optim.learning_rate, "weight_decay": 0.0})
        self.optim = optim

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no gradient is made anew here
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state |= {name: torch.zeros_like(parameter) for name in self.moments}
                state["step"] += 1
                weight, gradient = local_part(parameter), local_part(parameter.grad)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                kept = [local_part(state[name]) for name in self.moments]
                weight.add_(self.change(gradient, kept, int(state["step"])), alpha=-group["lr"])

    @abstractmethod
    def change(self, gradient: Tensor, kept: Sequence[Tensor], step: int) -> Tensor:
        """What is subtracted at rate 1; moves the moments on. All fp32 of one shape."""


class Lion(Elementwise):
    """The sign of a momentum (Chen et al., arXiv 2302.06675, program 1): one moment. The paper's betas are 0.9 and
    0.99, its rate a third to a tenth of AdamW's and its decay as much more."""

    moments = ("exp_avg",)

    def change(self, gradient: Tensor, kept: Sequence[Tensor], step: int) -> Tensor:
        (momentum,), (first, second) = kept, self.optim.betas
        update = momentum.lerp(gradient, 1 - first).sign_()
        momentum.lerp_(gradient, 1 - second)
        return update


class AdEMAMix(Elementwise):
    """AdamW with a second, slow average of gradients (Pagliardini et al., arXiv 2409.03137, algorithm 1): three
    moments. Its share `alpha` and its beta rise over `alpha_warmup_steps`."""

    moments = ("exp_avg", "exp_avg_sq", "exp_avg_slow")

    def change(self, gradient: Tensor, kept: Sequence[Tensor], step: int) -> Tensor:
        fast, square, slow = kept
        first, second, _ = self.optim.betas
        alpha, third = slow_average(self.optim, step)
        fast.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        slow.lerp_(gradient, 1 - third)
        size = (square / (1 - second**step)).sqrt_().add_(self.optim.eps)
        return (fast / (1 - first**step)).add_(slow, alpha=alpha).div_(size)


def slow_average(optim: Optim, step: int) -> tuple[float, float]:
    """Share and beta of the slow average at `step`: the paper's section 3, equations 2 and 3 (half-lives rise
    linearly, from that of the first beta)."""
    (start, _, beta), share = optim.betas, step / max(1, optim.alpha_warmup_steps)
    if share >= 1:
        return optim.alpha, beta
    low, high = math.log(start), math.log(beta)
    return optim.alpha * share, min(beta, math.exp(low * high / ((1 - share) * high + share * low)))
