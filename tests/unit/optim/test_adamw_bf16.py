"""AdamW with bf16 moments: every bit of it written out with Python's integers and numpy's fp32; what rounding keeps,
and what rounding to the nearest would lose."""

import hashlib
import importlib.util
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from eight_bit import FOLDER, add_torchao
from torch._dynamo.utils import counters
from world import run_world

from shardbook.optim import adamw_bf16 as ours
from shardbook.optim import build_optimizer
from shardbook.optim.adamw_bf16 import AdamWBf16, rounded
from shardbook.optim.table import OPTIMIZERS
from shardbook.recipe import Optim
from shardbook.run.log.memory import kept_bytes

FP32 = np.float32
SEED = 5


def noise_of(step: int, number: int, sizes: tuple[int, ...], draws: int, shard: int = 0) -> list[list[int]]:
    """The 16 bits that are added to each element of a parameter: of the first moment, the second and the weights.
    `sizes`: of its pieces."""
    facts = repr((SEED, step, number, shard)).encode()
    dice = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(facts).digest()[:8], "little"))
    drawn = [[torch.empty(size, dtype=torch.int16) for _ in range(draws)] for size in sizes]
    for piece in drawn:
        for one in piece:
            one.random_(-(2**15), 2**15, generator=dice)
    return [[int(bits) % 2**16 for piece in drawn for bits in piece[which]] for which in range(draws)]


def rounded_once(value: FP32, noise: int) -> FP32:
    bits = int(value.view(np.uint32)) + noise
    return np.uint32(bits // 2**16 * 2**16).view(np.float32)


def written_out(weights, gradients, rate, decay, eps, number, bf16_weights, sizes):
    """The weights and both moments after a step on each of `gradients`, an element at a time."""
    weights = [FP32(w) for w in weights]
    first, second = [[FP32(0)] * len(weights) for _ in range(2)]
    for step, gradient in enumerate(gradients, start=1):
        corrected = (1 - 0.999**step) ** 0.5
        scaled, factor = FP32(eps * corrected), FP32(rate * corrected / (1 - 0.9**step))
        noise = noise_of(step, number, sizes, 2 + bf16_weights)
        for i, g in enumerate(map(FP32, gradient)):
            m = first[i] * FP32(0.9) + g * FP32(1 - 0.9)
            v = second[i] * FP32(0.999) + g * g * FP32(1 - 0.999)
            # this processor's root: MKL's, which torch takes, is off by the last bit on some
            root = torch.tensor(v).sqrt().numpy()
            w = weights[i] * FP32(1 - rate * decay) - m / (root + scaled) * factor
            first[i], second[i] = rounded_once(m, noise[0][i]), rounded_once(v, noise[1][i])
            weights[i] = rounded_once(w, noise[2][i]) if bf16_weights else w
    return weights, first, second


def drawn(step, number, count=2**16, shard=0, draws=1):
    """The code's own noise."""
    dice = torch.Generator().manual_seed(ours.noise_seed(SEED, step, number, shard))
    return [ours.draw_noise(count, torch.device("cpu"), dice) for _ in range(draws)]


def gradients_of(steps, *shape, seed=1):
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=dice) * 1e-2 for _ in range(steps)]


@pytest.mark.parametrize("piece", [None, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_is_that_of_one_rounding(dtype, piece, monkeypatch):
    """A second rounding of a moment, noise that another step or parameter has too, a fused product: other bits."""
    if piece:  # as a parameter of which the noise is not held at once
        monkeypatch.setattr(ours, "PIECE", piece)
    torch.manual_seed(0)
    model = torch.nn.Linear(13, 11).to(dtype)  # the matrix decays and comes first, the vector does not
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = build_optimizer(model, Optim(name="adamw_bf16", learning_rate=1e-2, weight_decay=0.1), SEED)
    drawn = [gradients_of(4, *p.shape, seed=seed) for seed, p in enumerate(model.parameters())]
    for step in range(4):
        for p, gradients in zip(model.parameters(), drawn, strict=True):
            p.grad = gradients[step].to(dtype)
        optimizer.step()
    for number, (p, begun, decay) in enumerate(zip(model.parameters(), start, (0.1, 0.0), strict=True)):
        gradients = [g.to(dtype).float().flatten().tolist() for g in drawn[number]]
        begun = begun.float().flatten().tolist()
        sizes = (50, 50, 43) if piece and number == 0 else (p.numel(),)
        wanted = written_out(begun, gradients, 1e-2, decay, 1e-8, number, dtype is torch.bfloat16, sizes)
        state = optimizer.state[p]
        for got, want in zip((p, state["exp_avg"], state["exp_avg_sq"]), wanted, strict=True):
            assert got.dtype == (dtype if got is p else torch.bfloat16)
            assert torch.equal(got.detach().float().flatten(), torch.from_numpy(np.array(want)))
        assert state["step"] == 4 and state["step"].dtype == torch.float32


def test_noise_is_uniform_and_of_its_own_everywhere():
    """Means of 2^16 signs, and of products of two: five deviations of independent ones."""
    draws = {facts: drawn(*facts[:2], shard=facts[2])[0] for facts in itertools.product((1, 2), (0, 1), (0, 1))}
    draws |= dict(zip(("second", "weights"), drawn(1, 0, draws=3)[1:], strict=True))
    five = 5 / (2**16) ** 0.5
    signs = [one.sign().double() for one in draws.values()]
    for one in signs:
        assert abs(one.mean()) < five and abs((one[1:] * one[:-1]).mean()) < five
    for one, other in itertools.combinations(signs, 2):
        assert abs((one * other).mean()) < five
    every = torch.cat([one.int().bitwise_and(0xFFFF) for one in draws.values()])
    counts = torch.bincount(every // 2**12, minlength=16).double()  # the upper four bits: of each value 1 of 16
    assert (counts - len(every) / 16).abs().max() < 5 * (len(every) / 16) ** 0.5


def test_other_noise_is_another_neighbour():
    """Of another layout: each moment is rounded by less than one ulp a step, below 2^-7 of it. Where all gradients are
    positive nothing cancels, so before step t a moment is off by a factor of at most (1 + 2^-7)^(t - 1), the second's
    root by the root of such a factor, and what a step adds by both."""
    rate, steps, off = 1e-2, 6, 2.0**-7
    dice = torch.Generator().manual_seed(0)
    gradients = [0.5 + torch.rand(2**12, generator=dice) for _ in range(steps)]
    exact, way, bound = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2**12).double())], lr=rate), 0.0, 0.0
    (reference,) = exact.param_groups[0]["params"]
    exact.param_groups[0]["weight_decay"] = 0.0
    for step, gradient in enumerate(gradients):
        reference.grad = gradient.double()
        exact.step()
        added, way = way - reference.detach(), reference.detach().clone()
        bound = bound + added * ((1 + off) ** step / (1 - off) ** (step / 2) - 1 + 1e-5)
    ends = []
    for seed in (1, 2):
        parameter = torch.nn.Parameter(torch.zeros(2**12))
        optimizer = AdamWBf16([{"params": [parameter]}], {"lr": rate, "betas": (0.9, 0.999), "eps": 1e-8}, seed)
        for gradient in gradients:
            parameter.grad = gradient
            optimizer.step()
        ends.append(parameter.detach())
        assert ((ends[-1] - reference.detach()).abs() <= bound).all()
    assert not torch.equal(*ends) and bound.max() < 0.06 * steps * rate


@pytest.mark.parametrize("part", [1, 0x0CCC, 0x8000, 0xF000])
def test_rounding_has_the_right_expectation(part):
    value = torch.tensor(0x3F810000 + part, dtype=torch.int32).view(torch.float32)
    for sign in (1, -1):
        ups = torch.zeros((), dtype=torch.float64)
        for step in range(16):
            got = rounded((sign * value).repeat(2**16), *drawn(step, 0))
            assert set(got.abs().view(torch.int32).unique().tolist()) <= {0x3F810000, 0x3F820000}
            ups += (got.abs() > value).sum()
        share, draws = part / 2**16, 16 * 2**16
        assert abs(ups / draws - share) < 5 * (share * (1 - share) / draws) ** 0.5


def test_what_bf16_has_stays_and_so_does_what_is_no_number():
    bits = [0x7FFFFFFF, 0x7FC00000, -0x400000, 0x7F800000, -0x800000, 0, -(2**31), 0x3F810000, 1 << 16, 0x7F7F0000]
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for step in range(50):
        got = rounded(values.clone(), *drawn(step, 0, len(bits))).bfloat16()
        assert got[:3].isnan().all() and torch.equal(got[3:], values[3:].bfloat16())
        assert torch.equal(got[3:].signbit(), values[3:].signbit())
    largest = torch.tensor([0x7F7FFFFF], dtype=torch.int32).view(torch.float32)
    assert rounded(largest, torch.tensor([-1], dtype=torch.int16)).isinf()


def decayed(steps=700, count=2**14):
    """The mean of a second moment that begins at 1 and gets no gradient."""
    parameter = torch.nn.Parameter(torch.zeros(count))
    optimizer = AdamWBf16([{"params": [parameter]}], {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8})
    parameter.grad = torch.zeros(count)
    optimizer.step()
    optimizer.state[parameter]["exp_avg_sq"].fill_(1)
    for _ in range(steps):
        optimizer.step()
    return optimizer.state[parameter]["exp_avg_sq"].double().mean().item()


def test_a_second_moment_decays():
    """To 0.999^700 = 0.496. A step rounds by at most 2^-8 (below 1), with a variance of f (1 - f) of its square, f at
    most 0.001 * 2^8: 700 of them have a deviation below 0.045, and the mean of 2^14 below 0.00036; five of those."""
    assert decayed() == pytest.approx(0.999**700, abs=0.0018)


def test_to_the_nearest_it_never_would(monkeypatch):
    """Planted bug: a moment rounded twice, to the nearest and then stochastically, which changes nothing any more."""
    real = ours.rounded
    monkeypatch.setattr(ours, "rounded", lambda values, noise: real(values.bfloat16().float(), noise))
    assert decayed(steps=20) == 1.0
    with pytest.raises(AssertionError):
        test_every_bit_is_that_of_one_rounding(torch.float32, None, monkeypatch)


def test_stochastically_twice_is_seen_too(monkeypatch):
    """Planted bug: right in expectation, of twice the variance. What is stored decays, is rounded, and once more."""
    real = ours.update

    def update(weights, gradients, first, second, coefficients, *noise):
        second.copy_(rounded(second.float() * coefficients[2], noise[1]))
        others = torch.cat([coefficients[:2], torch.ones(1), coefficients[3:]])
        real(weights, gradients, first, second, others, *noise)

    monkeypatch.setattr(ours, "fused", lambda *how, **_: update)
    with pytest.raises(AssertionError):
        test_every_bit_is_that_of_one_rounding(torch.float32, None, monkeypatch)


def test_noise_of_every_step_alike_is_seen(monkeypatch):
    """Planted bug: rounding that does not depend on the step is no rounding at random: some values never move."""
    real = ours.noise_seed
    monkeypatch.setattr(ours, "noise_seed", lambda seed, step, *place: real(seed, 1, *place))
    assert abs(decayed() - 0.999**700) > 0.01
    with pytest.raises(AssertionError):
        test_every_bit_is_that_of_one_rounding(torch.float32, None, monkeypatch)


def test_weights_in_bf16_move_as_far_as_they_should():
    """At a rate of 2e-5, weights of deviation 0.02: to the nearest two thirds of them never move; stochastically all go
    100 times 2e-5 on average. Neighbours are at most 2^-11 apart (below 0.125), so a step's deviation is below
    (2e-5 * 2^-11)^(1/2), and that of the mean of 2^14 elements' 100 steps below 7.8e-6; five of those."""
    start = (torch.randn(2**14, generator=torch.Generator().manual_seed(0)) * 0.02).clamp(-0.12, 0.12).bfloat16()
    moved = {}
    settings = {"lr": 2e-5, "betas": (0.9, 0.999), "eps": 1e-8}
    ours = partial(AdamWBf16, settings=settings)
    for name, kind in (("nearest", partial(torch.optim.AdamW, **settings)), ("ours", ours)):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind([{"params": [parameter], "weight_decay": 0.0}])
        for _ in range(100):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        moved[name] = start.double() - parameter.detach().double()
    assert (moved["nearest"] == 0).double().mean() > 0.65
    assert moved["ours"].mean().item() == pytest.approx(100 * 2e-5, abs=4e-5)


def test_moments_in_bf16_follow_those_in_fp32():
    """A stored moment is off by 2^-7 of itself at most, a root by half of that; what is left of earlier ones adds up
    to a random sum. So a step is off by a few hundredths of itself, and the weights by a hundredth of their way."""
    ways, start = {}, torch.randn(2**14, generator=torch.Generator().manual_seed(0))
    for name in ("adamw", "adamw_bf16"):
        model = torch.nn.Linear(2**7, 2**7, bias=False)
        model.weight.data.copy_(start.view_as(model.weight))
        optimizer = build_optimizer(model, Optim(name=name, learning_rate=1e-3))
        for gradient in gradients_of(100, *model.weight.shape):
            model.weight.grad = gradient + 3e-3
            optimizer.step()
        ways[name] = model.weight.detach().flatten() - start
    off = (ways["adamw_bf16"] - ways["adamw"]).norm() / ways["adamw"].norm()
    assert 1e-4 < off < 1e-2


def test_a_state_dict_keeps_the_moments_dtype():
    optimizers = []
    for _ in range(2):
        parameter = torch.nn.Parameter(torch.ones(10))
        optimizers.append(
            (parameter, AdamWBf16([{"params": [parameter]}], {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}))
        )
    (parameter, optimizer), (other, loaded) = optimizers
    parameter.grad = torch.full((10,), 0.3)
    optimizer.step()
    loaded.load_state_dict(optimizer.state_dict())
    for name, value in optimizer.state[parameter].items():
        assert torch.equal(loaded.state[other][name], value) and loaded.state[other][name].dtype == value.dtype


SHAPES = [(64, 64), (65, 64), (63, 64), (4, 8), (5,), (4096,), (4097,), (0, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_state_are_those_that_are_kept(name, dtype):
    if name != "adamw_8bit":
        count_bytes_of_state(name, dtype)
    elif FOLDER.is_dir() or importlib.util.find_spec("torchao"):
        run_world(1, count_bytes_of_state, name, dtype)
    else:
        pytest.skip("the extra `8bit` is not installed")


def count_bytes_of_state(name, dtype):
    if name == "adamw_8bit":
        add_torchao()
    torch.compiler.set_stance("force_eager")
    try:
        model = torch.nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in SHAPES)
        model.blocks = [model]
        optimizer = build_optimizer(model, Optim(name=name))
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    finally:
        torch.compiler.set_stance("default")
    for parameter in model:
        kept = kept_bytes(optimizer.state[parameter].values())
        wanted = OPTIMIZERS[name].state_bytes(parameter.numel(), dtype.itemsize, parameter.ndim == 2)
        assert kept == wanted, parameter.shape


def test_a_kernel_knows_the_width_of_its_rows(monkeypatch):
    """A graph in which every size is a symbol reads bf16 one number at a time: 1.9 times as slow on an H200."""
    shapes, asked = [], []

    def fused(function, device_type, **how):
        asked.append(how)
        return lambda *given: shapes.append({tuple(each.shape) for each in given if len(each) != 7})

    monkeypatch.setattr(ours, "PIECE", 2**12)
    monkeypatch.setattr(ours, "fused", fused)
    ours.step_shard([torch.randn(2**12 + 2**10 + 77) for _ in range(4)], torch.ones(7), 0)
    assert shapes == [{(4, 2**10)}, {(1, 2**10)}, {(77,)}] and asked == [{"static_widths": True}] * 3


@pytest.mark.slow
def test_compiled_it_has_the_same_bits(monkeypatch):
    """What a GPU runs, as far as a CPU can tell: the same function through the compiler, in few graphs."""
    compiled, found = torch.compile(ours.update, dynamic=True, fullgraph=True), []
    coefficients = ours.coefficients_of({"betas": (0.9, 0.999), "lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}, 3)
    monkeypatch.setattr(ours, "PIECE", 2**12)
    torch._dynamo.reset()
    counters["stats"].clear()
    for function in (ours.update, compiled):
        monkeypatch.setattr(ours, "fused", lambda update, device_type, function=function, **_: function)
        for count in (999, 3 * 2**12 + 77, 2**12):
            dice = torch.Generator().manual_seed(0)
            tensors = [torch.randn(count, generator=dice) for _ in range(2)]
            tensors += [torch.rand(count, generator=dice).bfloat16() for _ in range(2)]
            ours.step_shard(tensors, coefficients, 7)
            found.append(tensors)
    for got, want in zip(found[3:], found[:3], strict=True):
        # a CPU's compiler may fuse a product and a sum: one rounding less, the last bit of a weight
        assert torch.allclose(got[0], want[0], rtol=2**-23, atol=2**-24)
        assert all(torch.equal(*pair) for pair in zip(got[1:], want[1:], strict=True))
    assert counters["stats"]["unique_graphs"] <= 3  # rows of WIDTH, a first piece that is less, and what rows leave
