"""Learning rates by hand-computed values; which parameters decay."""

import math

import pytest
import torch

from shardbook.optim import build_optimizer, clip_gradients, learning_rate
from shardbook.recipe import Optim


def rates(steps: int, **optim) -> list[float]:
    return [learning_rate(Optim(learning_rate=1.0, **optim), step, steps) for step in range(1, steps + 1)]


def test_schedules():
    assert rates(3, lr_scheduler_type="constant") == [1, 1, 1]
    assert rates(4, lr_scheduler_type="linear") == [1, 0.75, 0.5, 0.25]
    assert rates(6, lr_scheduler_type="linear", warmup_steps=2) == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert rates(4, lr_scheduler_type="cosine") == pytest.approx(
        [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    )


def test_a_fraction_of_warmup_is_a_share_of_the_run():
    assert rates(20, warmup_steps=0.25) == rates(20, warmup_steps=5)
    assert rates(3, lr_scheduler_type="constant", warmup_steps=10) == [0.1, 0.2, 0.3]  # a run shorter than its warm-up


def test_vectors_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    matrix, *vectors = model.parameters()
    matrices, others = build_optimizer(model, Optim(weight_decay=0.1)).param_groups
    assert (matrices["weight_decay"], matrices["params"]) == (0.1, [matrix])
    assert (others["weight_decay"], others["params"]) == (0.0, vectors)


def test_the_norm_of_a_large_gradient_is_exact_and_clipping_uses_it():
    parameter = torch.nn.Parameter(torch.zeros(30_000_001))
    parameter.grad = torch.full_like(parameter, 1e-3)
    expected = (30_000_001 * float(torch.tensor(1e-3)) ** 2) ** 0.5
    norm = clip_gradients([parameter], max_norm=0.5)
    assert norm.item() == pytest.approx(expected, rel=1e-7)  # in fp32 the sum of squares is off by some 1e-5
    assert parameter.grad[0].item() == pytest.approx(1e-3 * 0.5 / expected, rel=1e-6)
