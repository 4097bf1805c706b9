"""AdamW with bf16 moments: every bit of it written out with Python's integers and numpy's fp32; what rounding keeps,
and what rounding to the nearest would lose."""

import importlib.util
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from eight_bit import FOLDER, add_torchao
from launches import Launches
from torch.distributed.tensor import DTensor
from world import run_world

from shardbook.optim import adamw_bf16 as ours
from shardbook.optim import build_optimizer
from shardbook.optim.adamw_bf16 import PIECE, AdamWBf16, draw_keys, rounded, runs, update_shard
from shardbook.optim.table import OPTIMIZERS
from shardbook.recipe import Optim
from shardbook.run.metrics import kept_bytes

WORD = 2**64
PLACES = ours.places_on(torch.device("cpu"))
FP32 = np.float32


def splitmix(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % WORD
    return state ^ (state >> 31)


def noise_at(step: int, number: int, element: int, which: int) -> int:
    """The 16 bits that are added to an element of parameter `number`; `which`: first moment, second, weights."""
    piece, place = divmod(element, 2**16)
    for shift, factor in ((8, 0x88B5), (7, 0xDB2D), (9, 1)):
        place = (place ^ place >> shift) * factor % 2**16
    seed = splitmix((splitmix(step) + number) % WORD)
    keys = [splitmix(((6 * piece + key + 1) * 0x9E3779B97F4A7C15 + seed) % WORD) for key in (2 * which, 2 * which + 1)]
    return (keys[0] * place + keys[1]) % 2**32 // 2**16


def rounded_once(value: FP32, noise: int) -> FP32:
    bits = int(value.view(np.uint32)) + noise
    return np.uint32(bits // 2**16 * 2**16).view(np.float32)


def written_out(weights, gradients, rate, decay, eps, number, bf16_weights, begin=0):
    """The weights and both moments after a step on each of `gradients`, an element at a time."""
    weights = [FP32(w) for w in weights]
    first, second = [[FP32(0)] * len(weights) for _ in range(2)]
    for step, gradient in enumerate(gradients, start=1):
        corrected = (1 - 0.999**step) ** 0.5
        scaled, factor = FP32(eps * corrected), FP32(rate * corrected / (1 - 0.9**step))
        for i, g in enumerate(map(FP32, gradient)):
            m = first[i] * FP32(0.9) + g * FP32(1 - 0.9)
            v = second[i] * FP32(0.999) + g * g * FP32(1 - 0.999)
            # this processor's root: MKL's, which torch takes, is off by the last bit on some
            root = torch.tensor(v).sqrt().numpy()
            w = weights[i] * FP32(1 - rate * decay) - m / (root + scaled) * factor
            noise = [noise_at(step, number, begin + i, which) for which in range(3)]
            first[i], second[i] = rounded_once(m, noise[0]), rounded_once(v, noise[1])
            weights[i] = rounded_once(w, noise[2]) if bf16_weights else w
    return weights, first, second


def keys_of(step, number, first, count):
    (keys,) = draw_keys([(step, number, first, count)], torch.device("cpu"))
    return keys


def gradients_of(steps, *shape, seed=1):
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=dice) * 1e-2 for _ in range(steps)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_is_that_of_one_rounding(dtype):
    """A second rounding of a moment, a key that another step or parameter has too, a fused product: other bits."""
    torch.manual_seed(0)
    model = torch.nn.Linear(13, 11).to(dtype)  # the matrix decays and comes first, the vector does not
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = build_optimizer(model, Optim(name="adamw_bf16", learning_rate=1e-2, weight_decay=0.1))
    drawn = [gradients_of(4, *p.shape, seed=seed) for seed, p in enumerate(model.parameters())]
    for step in range(4):
        for p, gradients in zip(model.parameters(), drawn, strict=True):
            p.grad = gradients[step].to(dtype)
        optimizer.step()
    for number, (p, begun, decay) in enumerate(zip(model.parameters(), start, (0.1, 0.0), strict=True)):
        gradients = [g.to(dtype).float().flatten().tolist() for g in drawn[number]]
        begun = begun.float().flatten().tolist()
        wanted = written_out(begun, gradients, 1e-2, decay, 1e-8, number, dtype is torch.bfloat16)
        state = optimizer.state[p]
        for got, want in zip((p, state["exp_avg"], state["exp_avg_sq"]), wanted, strict=True):
            assert got.dtype == (dtype if got is p else torch.bfloat16)
            assert torch.equal(got.detach().float().flatten(), torch.from_numpy(np.array(want)))
        assert state["step"] == 4 and state["step"].dtype == torch.float32


@pytest.mark.parametrize("cut", [5, PIECE, PIECE + 8, 2 * PIECE + 12_345])
def test_a_shard_has_the_bits_of_the_whole(cut):
    """Wherever it is cut, and however many pieces go at once."""
    length = 3 * PIECE + 77
    dice = torch.Generator().manual_seed(0)
    weights, gradients = (torch.randn(length, generator=dice) for _ in range(2))
    numbers = ours.numbers_of({"betas": (0.9, 0.999), "lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}, 3)

    def stepped(*bounds):
        tensors = [weights.clone(), gradients, *(weights.abs().bfloat16() for _ in range(2))]
        for begin, end in itertools.pairwise(bounds):
            keys = keys_of(3, 7, *ours.pieces_of(begin, end - begin))
            update_shard([t[begin:end] for t in tensors], numbers, keys, begin)
        return tensors

    for got, want in zip(stepped(0, cut, length), stepped(0, length), strict=True):
        assert torch.equal(got, want)


def test_keys_of_many_are_those_of_each():
    """Wherever their pieces begin, and where a shard has none."""
    shards = [(3, 7, 0, 5), (3, 8, 2, 1), (4, 9, 1, 0), (4, 10, 3, 4)]
    for shard, keys in zip(shards, draw_keys(shards, torch.device("cpu")), strict=True):
        step, number, first, count = shard
        assert torch.equal(keys, keys_of(*shard)) and keys.shape == (count, ours.ROW)
        seed = splitmix((splitmix(step) + number) % WORD)
        for piece, key in itertools.product(range(first, first + count), range(ours.KEYS)):
            want = splitmix(((6 * piece + key + 1) * 0x9E3779B97F4A7C15 + seed) % WORD)
            assert int(keys[piece - first, key]) % 2**32 == want % 2**32


def launches_of_a_step(parameters: int, monkeypatch) -> int:
    """Operations on what is no scalar, beside the update of each parameter."""
    model = torch.nn.ParameterList(torch.ones(70, 3) for _ in range(parameters))
    optimizer = build_optimizer(model, Optim(name="adamw_bf16"))
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    monkeypatch.setattr(ours, "fused", lambda *how, **_: lambda *given: None)
    with Launches() as launches:
        optimizer.step()
    return launches.count


def test_more_parameters_are_not_more_launches(monkeypatch):
    few, many = (launches_of_a_step(parameters, monkeypatch) for parameters in (2, 40))
    assert few == many < 30


def test_places_are_each_there_once():
    assert sorted(PLACES.tolist()) == list(range(PIECE))


def test_runs_are_whole_pieces_between_what_is_cut():
    assert list(runs(PIECE - 3, 5 * PIECE, 2)) == [
        (0, 1, 3),
        (3, 2, PIECE),
        (3 + 2 * PIECE, 2, PIECE),
        (3 + 4 * PIECE, 1, PIECE - 3),
    ]
    assert list(runs(10, 5, 2)) == [(0, 1, 5)] and list(runs(10, 0, 2)) == []


def test_noise_is_uniform_and_of_its_own_everywhere():
    """Means of 2^18 draws, and of products of two. Independence by pairs gives sums their variance, not their tails, so
    bounds are ten standard deviations."""
    zeros = torch.zeros(4, PIECE).view(torch.int32).add_(0x3F800000)  # 1.0, whose lower bits are 0
    halves = (zeros + 0x8000).view(torch.float32)

    def up(step, number, first, which=0):
        keys = keys_of(step, number, first, 4)[:, 2 * which : 2 * which + 2]
        return (rounded(halves.clone(), keys, PLACES) > 1).double() * 2 - 1

    draws = {(step, number, first): up(step, number, first) for step in (1, 2) for number in (0, 1) for first in (0, 4)}
    draws |= {"second": up(1, 0, 0, 1), "weights": up(1, 0, 0, 2)}
    count, ten = 4 * PIECE, 10 / (4 * PIECE) ** 0.5
    for one in draws.values():
        assert abs(one.mean()) < ten
        assert abs((one[:, 1:] * one[:, :-1]).sum() / count) < ten and abs((one[1:] * one[:-1]).sum() / count) < ten
    for one, other in itertools.combinations(draws.values(), 2):
        assert abs((one * other).mean()) < ten


@pytest.mark.parametrize("part", [1, 0x0CCC, 0x8000, 0xF000])
def test_rounding_has_the_right_expectation(part):
    value = torch.tensor(0x3F810000 + part, dtype=torch.int32).view(torch.float32)
    for sign in (1, -1):
        ups = torch.zeros((), dtype=torch.float64)
        for step in range(16):
            keys = keys_of(step, 0, 0, 1)[:, :2]
            got = rounded((sign * value).repeat(1, PIECE), keys, PLACES)
            assert set(got.abs().view(torch.int32).unique().tolist()) <= {0x3F810000, 0x3F820000}
            ups += (got.abs() > value).sum()
        share, draws = part / 2**16, 16 * PIECE
        assert abs(ups / draws - share) < 5 * (share * (1 - share) / draws) ** 0.5


def test_what_bf16_has_stays_and_so_does_what_is_no_number():
    bits = [0x7FFFFFFF, 0x7FC00000, -0x400000, 0x7F800000, -0x800000, 0, -(2**31), 0x3F810000, 1 << 16, 0x7F7F0000]
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for step in range(50):
        keys = keys_of(step, 0, 0, 1)[:, :2]
        got = rounded(values.repeat(1, 1), keys, PLACES[: len(bits)])[0].bfloat16()
        assert got[:3].isnan().all() and torch.equal(got[3:], values[3:].bfloat16())
        assert torch.equal(got[3:].signbit(), values[3:].signbit())
    largest = torch.tensor([[0x7F7FFFFF]], dtype=torch.int32).view(torch.float32)
    assert rounded(largest, torch.tensor([[0, -1]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)).isinf()


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
    monkeypatch.setattr(ours, "rounded", lambda values, *keys: real(values.bfloat16().float(), *keys))
    assert decayed(steps=20) == 1.0
    with pytest.raises(AssertionError):
        test_every_bit_is_that_of_one_rounding(torch.float32)


def test_stochastically_twice_is_seen_too(monkeypatch):
    """Planted bug: right in expectation, of twice the variance. What is stored decays, is rounded, and once more."""
    real = ours.update

    def update(weights, gradients, first, second, keys, places, numbers):
        second.copy_(rounded(second.float() * numbers[2], keys[:, 2:4], places))
        real(weights, gradients, first, second, keys, places, torch.cat([numbers[:2], torch.ones(1), numbers[3:]]))

    monkeypatch.setattr(ours, "fused", lambda *how, **_: update)
    with pytest.raises(AssertionError):
        test_every_bit_is_that_of_one_rounding(torch.float32)


def test_keys_of_every_step_alike_are_seen(monkeypatch):
    """Planted bug: rounding that does not depend on the step is no rounding at random: some values never move."""
    real = ours.draw_keys
    monkeypatch.setattr(ours, "draw_keys", lambda shards, on: real([(1, *where) for _, *where in shards], on))
    assert abs(decayed() - 0.999**700) > 0.01
    with pytest.raises(AssertionError):
        test_every_bit_is_that_of_one_rounding(torch.float32)


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


@pytest.mark.slow
def test_compiled_it_has_the_same_bits():
    """What a GPU runs, as far as a CPU can tell: the same function through the compiler."""
    compiled, found = torch.compile(ours.update, dynamic=True, fullgraph=True), []
    numbers = ours.numbers_of({"betas": (0.9, 0.999), "lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}, 3)
    for function in (ours.update, compiled):
        for count, width in ((1, 999), (3, PIECE)):
            dice = torch.Generator().manual_seed(0)
            tensors = [torch.randn(count, width, generator=dice) for _ in range(2)]
            tensors += [torch.rand(count, width, generator=dice).bfloat16() for _ in range(2)]
            places = PLACES[:width]
            function(*tensors, keys_of(3, 7, 0, count), places, numbers)
            found.append(tensors)
    for got, want in zip(found[2:], found[:2], strict=True):
        # a CPU's compiler may fuse a product and a sum: one rounding less, the last bit of a weight
        assert torch.allclose(got[0], want[0], rtol=2**-23, atol=2**-24)
        assert all(torch.equal(*pair) for pair in zip(got[1:], want[1:], strict=True))


def test_a_tensor_that_is_no_dtensor_begins_at_its_beginning():
    assert not isinstance(torch.zeros(3), DTensor) and ours.first_element(torch.zeros(3, 4)) == 0
