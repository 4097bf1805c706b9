"""AdamW whose moments are bf16, and whose weights may be: computed in fp32, written back with stochastic rounding.

Rounded to the nearest, a second moment would only grow: neighbours in bf16 are 2^-8 to 2^-7 of a value apart, and with
beta2 = 0.999 it may shrink by 2^-10 a step, less than half of that. A value that is rounded up with the probability of
its dropped fraction has the right expectation (Gupta et al., arXiv 1502.02551, section 3.1).

Invariant: a value is rounded once a step, by a function of the step, the parameter and the element's place in the whole
tensor. So rounding has no state; a resumed run, replicas and, from the same gradients, all layouts get the same bits.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardbook.arithmetic import ceil_div
from shardbook.comm.fused import fused
from shardbook.optim.elementwise import local_values, send_numbers
from shardbook.parallel.units import GLOBAL_SHAPES

PIECE = 2**16  # elements of the whole tensor that share keys: so a shard may begin and end at any element
RUN = {"cpu": 2, "cuda": 2**10}  # most pieces at once; a CPU's temporaries must stay below a MiB, else malloc is slow
MOMENTS = ("exp_avg", "exp_avg_sq")
KEYS = 6  # of a piece: two for each moment, two for the weights
ROW = 8  # a piece's keys and two more: so each row begins at a multiple of 32 bytes, else a kernel gets a copy
GOLDEN = 0x9E3779B97F4A7C15
SPLITMIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # its shifts to the right, and factors
NAN = 0x7FC00000  # a CUDA device's own NaN has all lower bits set: added noise would make -0.0 of it
ALL = 2**64 - 1


class AdamWBf16(torch.optim.Optimizer):
    """AdamW (decoupled weight decay, arXiv 1711.05101) with both moments in bf16. Parameters are tensors or DTensors of
    `Shard(0)`, in fp32, or in bf16 and then rounded stochastically too. State of a parameter, by AdamW's names: `step`
    (fp32, on the host), `exp_avg` and `exp_avg_sq` (bf16, placed as the parameter).

    `settings`: lr, betas, eps. `numbers`: for each parameter, in the order of `groups`, its number among all parameters
    of the model; None: `groups` has them all."""

    def __init__(self, groups: list[dict[str, Any]], settings: dict[str, Any], numbers: list[int] | None = None):
        super().__init__(groups, settings | {"weight_decay": 0.0})
        self.numbers = numbers or range(sum(len(group["params"]) for group in self.param_groups))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no gradient is made anew here
        """Steps the parameters that have gradients. No collective, no host sync."""
        numbers: dict[Any, Tensor] = {}  # (group, step) -> coefficients, made once
        found: list[tuple[list[Tensor], Tensor, int]] = []
        drawn: list[tuple[int, int, int, int]] = []
        places = iter(self.numbers)
        for which, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                number = next(places)
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
                state["step"] += 1
                step = int(state["step"])
                if (which, step) not in numbers:
                    numbers[which, step] = send_numbers(numbers_of(group, step), parameter.device)
                tensors = [parameter, parameter.grad, *(state[name] for name in MOMENTS)]
                flat, first = [local_values(tensor).view(-1) for tensor in tensors], first_element(parameter)
                found.append((flat, numbers[which, step], first))
                drawn.append((step, number, *pieces_of(first, flat[0].numel())))
        if found:
            for (flat, own, first), keys in zip(found, draw_keys(drawn, found[0][0][0].device), strict=True):
                update_shard(flat, own, keys, first)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads moments as bf16: torch's own casts them to the parameter's dtype, and back loses nothing."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state |= {name: state[name].bfloat16() for name in MOMENTS}


def numbers_in_whole(model: nn.Module) -> list[int] | None:
    """Returns the number of each parameter of `parameter_groups` in those of the whole model; None where it is all."""
    whole: dict[str, torch.Size] | None = getattr(model, GLOBAL_SHAPES, None)
    if whole is None:
        return None
    own = dict(model.named_parameters())
    order = sorted(whole, key=lambda name: len(whole[name]) < 2)
    return [number for number, name in enumerate(order) if name in own]


def numbers_of(group: dict[str, Any], step: int) -> Tensor:
    """Returns the coefficients of `update` at `step`, fp32 on the host. Bias correction is in the rate and in epsilon
    (Adam, arXiv 1412.6980, the end of section 2)."""
    (first, second), rate = group["betas"], float(group["lr"])
    corrected = math.sqrt(1 - second**step)
    factor = rate * corrected / (1 - first**step)
    decay = 1 - rate * group["weight_decay"]
    return torch.tensor([first, 1 - first, second, 1 - second, group["eps"] * corrected, factor, decay])


def first_element(parameter: Tensor) -> int:
    """Returns the place, in the whole tensor, of the first element of this rank's shard."""
    first = 0
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dim, placement in enumerate(parameter.placements):
            if placement.is_shard():
                rows = ceil_div(parameter.shape[0], mesh.size(dim)) * mesh.get_local_rank(dim)
                first += min(rows, parameter.shape[0]) * parameter.shape[1:].numel()
    return first


def pieces_of(first: int, length: int) -> tuple[int, int]:
    """Returns the first piece, and the number of pieces, of a shard of `length` elements that begins at `first`."""
    return first // PIECE, ceil_div(first + length, PIECE) - first // PIECE


def update_shard(flat: list[Tensor], numbers: Tensor, keys: Tensor, first: int) -> None:
    """Runs `update` on a shard that begins at element `first` and whose pieces have `keys`, in runs of pieces. `flat`:
    weights, gradients and the two moments. Where two ranks have parts of a piece, both use the keys of the whole
    piece."""
    device, length = flat[0].device, flat[0].numel()
    places = places_on(device)
    for begin, count, width in runs(first, length, RUN.get(device.type, 1)):
        piece, place = (first + begin) // PIECE - first // PIECE, (first + begin) % PIECE
        views = (tensor[begin : begin + count * width].view(count, width) for tensor in flat)
        # whole pieces are nearly all of a shard; each other width would be a graph of its own
        fused(update, device.type, static_widths=width == PIECE)(
            *views, keys[piece : piece + count], places[place : place + width], numbers
        )


def runs(first: int, length: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Yields `(begin, pieces, elements of each)` for the parts of a shard: the rest of a piece that begins before it,
    then up to `most` whole pieces at a time, then the beginning of its last piece."""
    begin = 0
    while begin < length:
        width = min(PIECE - (first + begin) % PIECE, length - begin)
        count = min(most, (length - begin) // PIECE) if width == PIECE else 1
        yield begin, count, width
        begin += count * width


def update(
    weights: Tensor, gradients: Tensor, first: Tensor, second: Tensor, keys: Tensor, places: Tensor, numbers: Tensor
) -> None:
    """Runs AdamW in place on `(pieces, width)` elements; `keys` are draw_keys', `places` those of places_on.

    Only single additions, products, quotients and roots: where two are in one operation, a CPU may fuse them in the
    middle of a tensor and not at its end, and then a shard's bits would depend on where it begins and ends.
    """
    keep_first, add_first, keep_second, add_second, eps, rate, decay = numbers.unbind()
    gradient = gradients.float()
    m = first.float().mul_(keep_first).add_(gradient * add_first)
    v = second.float().mul_(keep_second).add_(gradient.square().mul_(add_second))
    change = (m / v.sqrt().add_(eps)).mul_(rate)
    weight = weights.float().mul_(decay).sub_(change)  # fp32 weights are updated in place here: float() is no copy
    first.copy_(rounded(m, keys[:, 0:2], places))
    second.copy_(rounded(v, keys[:, 2:4], places))
    if weights.dtype == torch.bfloat16:
        weights.copy_(rounded(weight, keys[:, 4:6], places))


def rounded(values: Tensor, keys: Tensor, places: Tensor) -> Tensor:
    """Returns `values` (fp32, overwritten) as fp32 numbers that bf16 has: away from zero with a probability that is the
    fraction in the 16 dropped bits, else towards zero. Numbers of bf16, infinities and NaN stay.

    The 16 bits added are the upper half of a * place + b: uniform, and pairwise independent between places of a piece,
    over random 32-bit a and b, so sums have the variance of independent ones (Dietzfelbinger, STACS 1996; Thorup,
    arXiv 1504.06804, section 3.3).
    """
    noise = (places * keys[:, :1]).add_(keys[:, 1:]).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    bits = values.view(torch.int32).clamp_(max=NAN).add_(noise).bitwise_and_(-(2**16))
    return bits.view(torch.float32)


@functools.cache
def places_on(device: torch.device) -> Tensor:
    """Returns the places of a piece's elements, int32: the numbers from 0, shuffled, else noise would change evenly
    from one element to the next. Each step of the shuffle is a bijection of 16 bits."""
    places = torch.arange(PIECE, dtype=torch.int32, device=device)
    for shift, factor in ((8, 0x88B5), (7, 0xDB2D), (9, 1)):
        places = ((places ^ places >> shift) * factor).bitwise_and_(PIECE - 1)
    return places


def draw_keys(shards: Sequence[tuple[int, int, int, int]], device: torch.device) -> list[Tensor]:
    """Returns the keys of the pieces of each of `shards` (step, parameter's number, first piece, count): int32 of shape
    (count, ROW), of which KEYS are used, the lower halves of splitmix64 (Steele et al., OOPSLA 2014) from a hash of
    step and parameter. All are made at once: one shard by itself took some sixteen launches."""
    begun, counts = [], [count for *_, count in shards]
    for (step, number, first, _), before in zip(shards, accumulate(counts, initial=0), strict=False):
        begun.append(_signed(mix((mix(step) + number) & ALL) + ((first - before) * KEYS + 1) * GOLDEN & ALL))
    total = sum(counts)
    begins, repeats = send_numbers(torch.tensor([begun, counts]), device)
    state = torch.arange(total, device=device)[:, None] * KEYS + torch.arange(ROW, device=device)
    # output_size: else the host waits for the device to compute this sum
    state.mul_(_signed(GOLDEN)).add_(begins.repeat_interleave(repeats, output_size=total)[:, None])
    for shift, factor in SPLITMIX:
        state = (state ^ (state >> shift & 2 ** (64 - shift) - 1)).mul_(_signed(factor))  # >> copies the sign
    return list(state.to(torch.int32).split(counts))


def mix(value: int) -> int:
    """Returns splitmix64's output for the state `value`, of 64 bits."""
    for shift, factor in SPLITMIX:
        value = (value ^ value >> shift) * factor & ALL
    return value


def _signed(value: int) -> int:
    """Returns the int64 with the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value
