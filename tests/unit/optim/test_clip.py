"""Clipping: the norm of any gradients is exact, in few launches, and what is no number stays visible in it."""

import math

import pytest
import torch
from launches import Launches

from shardbook.optim import clip
from shardbook.optim.clip import clip_gradients, gradient_norm, squares_of


def test_the_norm_of_a_large_gradient_is_exact_and_clipping_uses_it():
    parameter = torch.nn.Parameter(torch.zeros(30_000_001))
    parameter.grad = torch.full_like(parameter, 1e-3)
    expected = (30_000_001 * float(torch.tensor(1e-3)) ** 2) ** 0.5
    norm = clip_gradients([parameter], max_norm=0.5)
    assert norm.item() == pytest.approx(expected, rel=1e-7)  # in fp32 the sum of squares is off by some 1e-5
    assert parameter.grad[0].item() == pytest.approx(1e-3 * 0.5 / expected, rel=1e-6)


SIZES = [1e-44, 1e-40, 1e-30, 1e-22, 1e-17, 1.0, 1e15, 1e19, 3e25, 1e37]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 64), (64,), (0, 64)])
def test_no_gradient_is_too_large_or_too_small_for_its_norm(shape, size):
    dice = torch.Generator().manual_seed(0)
    gradient = torch.rand(shape, generator=dice) * size
    want = gradient.double().norm()
    assert gradient_norm([gradient, torch.zeros(3, 64)]).item() == pytest.approx(want.float().item(), rel=3e-7, abs=0)
    mixed = torch.cat([gradient.flatten()[:64], torch.zeros(64), torch.full((64,), 2.0)]).view(-1, 64)
    assert gradient_norm([mixed]).item() == pytest.approx(mixed.double().norm().item(), rel=3e-7)


def test_norms_of_many_are_few_launches():
    gradients = [torch.ones(5, 3, device="meta") for _ in range(50)]
    with Launches() as launches:
        found = squares_of(gradients)
    assert found.shape == (50,) and found.dtype == torch.float64
    assert launches.count <= 3


def test_a_large_tensor_is_summed_in_chunks(monkeypatch):
    """The norm is that of the whole, wherever it is cut, and a CPU copies no more than a chunk to fp64."""
    monkeypatch.setattr(clip, "CHUNK", 100)
    gradient = torch.randn(37, 29, generator=torch.Generator().manual_seed(0))
    assert len(squares_of([gradient])) == 11
    want = gradient.double().norm().float()
    assert torch.equal(gradient_norm([gradient]), want)
    for row in (1, 5, 20):
        assert torch.equal(gradient_norm([gradient[:row], gradient[row:]]), want)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_stays_visible_in_the_norm(bad):
    for shape in ((6, 64), (64,)):
        gradient = torch.ones(shape)
        gradient.view(-1)[7] = bad
        norm = gradient_norm([gradient, torch.full((4, 64), 1e22)])
        assert norm.isnan() if math.isnan(bad) else norm.isinf()
