"""AdamW whose moments are bf16, and whose weights may be: computed in fp32, written back with stochastic rounding.

Rounded to the nearest, a second moment would only grow: neighbours in bf16 are 2^-8 to 2^-7 of a value apart, and with
beta2 = 0.999 it may shrink by 2^-10 a step, less than half of that. A value that is rounded up with the probability of
what would be cut off has the right expectation (Gupta et al., arXiv 1502.02551, section 3.1).

Invariant: a value is rounded once a step, and how is a function of the step, the parameter and the element's place in
the whole tensor. So it has no state, a resumed run gets the same bits, and so do replicas and, from the same gradients,
all layouts.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardbook.arithmetic import ceil_div
from shardbook.comm.fused import fused
from shardbook.optim.elementwise import local_values, send_numbers
from shardbook.parallel.units import WHOLE

PIECE = 2**16  # elements that share keys: of the whole tensor, so that shards are cut where they like
RUN = {"cpu": 2, "cuda": 2**10}  # most pieces at once; a CPU's temporaries must stay below a MiB, else malloc is slow
MOMENTS = ("exp_avg", "exp_avg_sq")
KEYS = 6  # of a piece: two for each moment, two for the weights
ROW = 8  # a piece's keys and two more, so that each begins at 32 bytes: a kernel gets a copy of what begins elsewhere
GOLDEN = 0x9E3779B97F4A7C15
NAN = 0x7FC00000  # a CUDA device's own NaN has all lower bits set: what is added would make it -0.0
ALL = 2**64 - 1


class AdamWBf16(torch.optim.Optimizer):
    """AdamW (decoupled weight decay, arXiv 1711.05101) with both moments in bf16, over tensors and DTensors of
    `Shard(0)`: in fp32, or in bf16, which are rounded stochastically too. State of a parameter, by AdamW's names:
    `step` (fp32, on the host), `exp_avg` and `exp_avg_sq` (bf16, placed as the parameter).

    `settings`: lr, betas, eps. `numbers`: of each parameter, in the order of `groups`, its place among all of the
    model; None: these are all."""

    def __init__(self, groups: list[dict[str, Any]], settings: dict[str, Any], numbers: list[int] | None = None):
        super().__init__(groups, settings | {"weight_decay": 0.0})
        self.numbers = numbers or range(sum(len(group["params"]) for group in self.param_groups))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no gradient is made anew here
        """One step on the gradients that are there. No collective, no host sync."""
        numbers: dict[Any, Tensor] = {}  # of a group and a step, made once
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
        """torch's own gives moments the dtype of their parameter; from bf16 and back is exact."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state |= {name: state[name].bfloat16() for name in MOMENTS}


def numbers_in_whole(model: nn.Module) -> list[int] | None:
    """Returns the place of each parameter of `parameter_groups` in those of the whole model; None where it is all."""
    whole: dict[str, torch.Size] | None = getattr(model, WHOLE, None)
    if whole is None:
        return None
    own = dict(model.named_parameters())
    order = sorted(whole, key=lambda name: len(whole[name]) < 2)
    return [number for number, name in enumerate(order) if name in own]


def numbers_of(group: dict[str, Any], step: int) -> Tensor:
    """What `update` multiplies and adds at `step`, fp32 on the host. Bias correction is in the rate and in epsilon
    (Adam, arXiv 1412.6980, the end of section 2)."""
    (first, second), rate = group["betas"], float(group["lr"])
    corrected = math.sqrt(1 - second**step)
    factor = rate * corrected / (1 - first**step)
    decay = 1 - rate * group["weight_decay"]
    return torch.tensor([first, 1 - first, second, 1 - second, group["eps"] * corrected, factor, decay])


def first_element(parameter: Tensor) -> int:
    """The place, in the whole tensor, of the first element of this rank's shard."""
    first = 0
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dim, placement in enumerate(parameter.placements):
            if placement.is_shard():
                rows = ceil_div(parameter.shape[0], mesh.size(dim)) * mesh.get_local_rank(dim)
                first += min(rows, parameter.shape[0]) * parameter.shape[1:].numel()
    return first


def pieces_of(first: int, length: int) -> tuple[int, int]:
    """The first piece, and how many, of a shard of `length` elements that begins at element `first`."""
    return first // PIECE, ceil_div(first + length, PIECE) - first // PIECE


def update_shard(flat: list[Tensor], numbers: Tensor, keys: Tensor, first: int) -> None:
    """`update` on a shard that begins at element `first` and whose pieces have `keys`: weights, gradients and the two
    moments, each flat, in runs of pieces. A piece that belongs to two ranks is cut, and each has the keys of the
    whole."""
    device, length = flat[0].device, flat[0].numel()
    places = places_on(device)
    for begin, count, width in runs(first, length, RUN.get(device.type, 1)):
        piece, place = (first + begin) // PIECE - first // PIECE, (first + begin) % PIECE
        views = (tensor[begin : begin + count * width].view(count, width) for tensor in flat)
        update_on(device.type)(*views, keys[piece : piece + count], places[place : place + width], numbers)


def runs(first: int, length: int, most: int) -> Iterator[tuple[int, int, int]]:
    """`(begin, pieces, elements of each)` of the parts of a shard: what is left of a piece, then up to `most` whole
    ones at a time, then what begins another."""
    begin = 0
    while begin < length:
        width = min(PIECE - (first + begin) % PIECE, length - begin)
        count = min(most, (length - begin) // PIECE) if width == PIECE else 1
        yield begin, count, width
        begin += count * width


def update(
    weights: Tensor, gradients: Tensor, first: Tensor, second: Tensor, keys: Tensor, places: Tensor, numbers: Tensor
) -> None:
    """AdamW in place on `(pieces, width)` elements; `keys` as `draw_keys` gives, `places` of `places_on`.

    Only single additions, products, quotients and roots: a CPU may fuse two of them in the middle of a tensor and not
    at its end, and then a shard's bits would depend on where it was cut.
    """
    keep_first, add_first, keep_second, add_second, eps, rate, decay = numbers.unbind()
    gradient = gradients.float()
    m = first.float().mul_(keep_first).add_(gradient * add_first)
    v = second.float().mul_(keep_second).add_(gradient.square().mul_(add_second))
    change = (m / v.sqrt().add_(eps)).mul_(rate)
    weight = weights.float().mul_(decay).sub_(change)  # of fp32 weights: themselves
    first.copy_(rounded(m, keys[:, 0:2], places))
    second.copy_(rounded(v, keys[:, 2:4], places))
    if weights.dtype == torch.bfloat16:
        weights.copy_(rounded(weight, keys[:, 4:6], places))


def update_on(device_type: str) -> Callable[..., None]:
    """`update` in one kernel on a GPU, where Triton is there; else as it is written."""
    return fused(update, device_type)


def rounded(values: Tensor, keys: Tensor, places: Tensor) -> Tensor:
    """`values` (fp32, overwritten) as fp32 numbers that bf16 has: away from zero with the probability of the 16 bits
    that are cut off, else towards it. What bf16 has stays, and so do infinities and NaN.

    The 16 bits added are the upper half of a * place + b: uniform, and those of any two places of a piece independent,
    over random 32-bit a and b, so sums have the variance of independent ones (Dietzfelbinger, STACS 1996; Thorup,
    arXiv 1504.06804, section 3.3).
    """
    noise = (places * keys[:, :1]).add_(keys[:, 1:]).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    bits = values.view(torch.int32).clamp_(max=NAN).add_(noise).bitwise_and_(-(2**16))
    return bits.view(torch.float32)


@functools.cache
def places_on(device: torch.device) -> Tensor:
    """The places of a piece's elements, int32: numbers from 0 shuffled, else noise would run evenly from one element to
    the next. Each step is a bijection of 16 bits."""
    places = torch.arange(PIECE, dtype=torch.int32, device=device)
    for shift, factor in ((8, 0x88B5), (7, 0xDB2D), (9, 1)):
        places = ((places ^ places >> shift) * factor).bitwise_and_(PIECE - 1)
    return places


def draw_keys(shards: Sequence[tuple[int, int, int, int]], device: torch.device) -> list[Tensor]:
    """Keys of the pieces of each of `shards`, which are steps, numbers of parameters, first pieces and counts: int32 of
    shape (count, ROW), of which KEYS count, the lower halves of splitmix64 (Steele et al., OOPSLA 2014) begun at a hash
    of step and parameter. All are made together: for each by itself they were some sixteen launches."""
    begun, counts = [], [count for *_, count in shards]
    for (step, number, first, _), before in zip(shards, accumulate(counts, initial=0), strict=False):
        begun.append(_signed(mix((mix(step) + number) & ALL) + ((first - before) * KEYS + 1) * GOLDEN & ALL))
    total = sum(counts)
    begins, repeats = send_numbers(torch.tensor([begun, counts]), device)
    state = torch.arange(total, device=device)[:, None] * KEYS + torch.arange(ROW, device=device)
    # output_size: else the host waits for the sum of what it has itself
    state.mul_(_signed(GOLDEN)).add_(begins.repeat_interleave(repeats, output_size=total)[:, None])
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        state = (state ^ (state >> shift & 2 ** (64 - shift) - 1)).mul_(_signed(factor))  # >> copies the sign
    return list(state.to(torch.int32).split(counts))


def mix(value: int) -> int:
    """splitmix64's output for the state `value`, of 64 bits."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        value = (value ^ value >> shift) * factor & ALL
    return value


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value
