"""AdamW whose moments are bf16, and whose weights may be: computed in fp32, written back with stochastic rounding.

Rounded to the nearest, a second moment would only grow: neighbours in bf16 are 2^-8 to 2^-7 of a value apart, and with
beta2 = 0.999 it may shrink by 2^-10 a step, less than half of that. A value that is rounded up with the probability of
its dropped fraction has the right expectation (Gupta et al., arXiv 1502.02551, section 3.1).

Invariant: a value is rounded once a step, by noise of a generator that the run's seed, the step, the parameter and the
shard seed. So rounding has no state, replicas round alike, and a resumed run in the same layout has the same bits; in
another layout a moment is rounded to its other neighbour.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.boxes import shard_number
from shardbook.comm.compile_on_cuda import fused
from shardbook.local_tensors import local_values
from shardbook.optim.elementwise import send_numbers

PIECE = 2**24  # elements that are stepped at once: the noise of no more than these is held
WIDTH = 2**10  # of the rows that they are stepped as: a constant of a kernel's graph, as their number is not
MOMENTS = ("exp_avg", "exp_avg_sq")
NAN = 0x7FC00000  # a CUDA device's own NaN has all lower bits set: added noise would make -0.0 of it


class AdamWBf16(torch.optim.Optimizer):
    """AdamW (decoupled weight decay, arXiv 1711.05101) with both moments in bf16. Parameters are tensors or DTensors,
    in fp32, or in bf16 and then rounded stochastically too. State of a parameter, by AdamW's names: `step` (fp32, on
    the host), `exp_avg` and `exp_avg_sq` (bf16, placed as the parameter).

    `settings`: lr, betas, eps. `seed`: of the noise, with `numbers`: for each parameter, in the order of `groups`, its
    number among all parameters of the model, so that copies of a tied one round alike; None: `groups` has them all."""

    def __init__(
        self, groups: list[dict[str, Any]], settings: dict[str, Any], seed: int = 0, numbers: list[int] | None = None
    ):
        super().__init__(groups, settings | {"weight_decay": 0.0})
        self.seed = seed
        self.numbers = numbers or range(sum(len(group["params"]) for group in self.param_groups))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no gradient is made anew here
        """Steps the parameters that have gradients. No collective, no host sync."""
        coefficients: dict[tuple[int, int], Tensor] = {}  # by group and step, sent once
        numbers = iter(self.numbers)
        for which, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                number = next(numbers)
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
                state["step"] += 1
                step = int(state["step"])
                if (which, step) not in coefficients:
                    coefficients[which, step] = send_numbers(coefficients_of(group, step), parameter.device)
                tensors = [parameter, parameter.grad, *(state[name] for name in MOMENTS)]
                key = noise_seed(self.seed, step, number, shard_number(parameter))
                step_shard([local_values(tensor).view(-1) for tensor in tensors], coefficients[which, step], key)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads moments as bf16: torch's own casts them to the parameter's dtype, and back loses nothing."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state |= {name: state[name].bfloat16() for name in MOMENTS}


def numbers_in_whole(model: nn.Module, full_shapes: Mapping[str, torch.Size] | None) -> list[int] | None:
    """Returns the number of each parameter of `parameter_groups` in those of the whole model, which trains
    `full_shapes`; None where `model` is all of it."""
    names = dict(model.named_parameters())
    if not full_shapes or all(name in names for name in full_shapes):
        return None
    order = sorted(full_shapes, key=lambda name: len(full_shapes[name]) < 2)
    return [number for number, name in enumerate(order) if name in names]


def coefficients_of(group: dict[str, Any], step: int) -> Tensor:
    """Returns the coefficients of `update` at `step`, fp32 on the host. Bias correction is in the rate and in epsilon
    (Adam, arXiv 1412.6980, the end of section 2)."""
    (first, second), rate = group["betas"], float(group["lr"])
    corrected = math.sqrt(1 - second**step)
    factor = rate * corrected / (1 - first**step)
    decay = 1 - rate * group["weight_decay"]
    return torch.tensor([first, 1 - first, second, 1 - second, group["eps"] * corrected, factor, decay])


def noise_seed(*facts: int) -> int:
    """Returns 64 bits that depend on all of `facts`: of a CPU's generator the lower 32 count, so they are hashed."""
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "little")


def step_shard(flat: list[Tensor], coefficients: Tensor, seed: int) -> None:
    """Runs `update` on a shard's flat weights, gradients and moments, PIECE elements at a time, in order: on rows of
    WIDTH, and on what is left."""
    weights = flat[0]
    if not weights.numel():
        return
    generator = torch.Generator(weights.device).manual_seed(seed)
    draws = len(MOMENTS) + (weights.dtype == torch.bfloat16)
    for piece in zip(*(tensor.split(PIECE) for tensor in flat), strict=True):
        # tensors of their own: a kernel gets a copy of what does not begin at a multiple of 16 bytes
        noise = [draw_noise(len(piece[0]), weights.device, generator) for _ in range(draws)]
        in_rows = len(piece[0]) // WIDTH * WIDTH
        for part, shape in ((slice(in_rows), (-1, WIDTH)), (slice(in_rows, None), (-1,))):
            if piece[0][part].numel():
                tensors, noise_of_part = ([each[part].view(shape) for each in of] for of in (piece, noise))
                step = fused(update, weights.device.type, static_widths=True)
                step(*tensors, coefficients, *noise_of_part)


def draw_noise(count: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Returns `count` times 16 random bits, int16."""
    return torch.empty(count, dtype=torch.int16, device=device).random_(-(2**15), 2**15, generator=generator)


def update(
    weights: Tensor, gradients: Tensor, first: Tensor, second: Tensor, coefficients: Tensor, *noise: Tensor
) -> None:
    """Runs AdamW in place; `noise`: of both moments, and of weights in bf16. Single additions, products, quotients and
    roots, whose bits every processor has."""
    keep_first, add_first, keep_second, add_second, eps, rate, decay = coefficients.unbind()
    gradient = gradients.float()
    m = first.float().mul_(keep_first).add_(gradient * add_first)
    v = second.float().mul_(keep_second).add_(gradient.square().mul_(add_second))
    change = (m / v.sqrt().add_(eps)).mul_(rate)
    weight = weights.float().mul_(decay).sub_(change)  # fp32 weights are updated in place here: float() is no copy
    first.copy_(rounded(m, noise[0]))
    second.copy_(rounded(v, noise[1]))
    if weights.dtype == torch.bfloat16:
        weights.copy_(rounded(weight, noise[2]))


def rounded(values: Tensor, noise: Tensor) -> Tensor:
    """Returns `values` (fp32, overwritten) as fp32 numbers that bf16 has: away from zero with a probability that is the
    fraction in the 16 dropped bits, else towards zero. Numbers of bf16, infinities and NaN stay."""
    bits = values.view(torch.int32).clamp_(max=NAN).add_(noise.int().bitwise_and_(0xFFFF)).bitwise_and_(-(2**16))
    return bits.view(torch.float32)
