"""Learning rates by hand-computed values; which parameters decay."""

import math
import shutil
from typing import get_args

import pytest
import torch
from launches import Launches
from torch._dynamo.utils import counters
from torch._inductor import metrics

from shardbook.comm.compile_on_cuda import fused
from shardbook.optim import build_optimizer, elementwise, learning_rate
from shardbook.optim.table import OPTIMIZERS
from shardbook.recipe import Optim, learning


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


def test_recipe_and_table_have_the_same_optimizers():
    assert list(OPTIMIZERS) == list(get_args(Optim.model_fields["name"].annotation))
    assert {*learning.WHOLE_MATRICES, *learning.HOST_OPTIMIZERS} <= OPTIMIZERS.keys()


LION = Optim(name="lion", learning_rate=0.01, weight_decay=0.1, betas=[0.9, 0.99])


def stepped(steps: int = 4) -> list[torch.nn.Parameter]:
    """Parameters of many shapes after steps at rates of their own."""
    dice = torch.Generator().manual_seed(0)
    model = torch.nn.ParameterList(torch.randn(shape, generator=dice) for shape in ((9, 40), (37, 8), (9,), (1001, 3)))
    optimizer = build_optimizer(model, LION)
    for step in range(steps):
        for parameter in model:
            parameter.grad = torch.randn(parameter.shape, generator=dice)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        optimizer.step()
    return list(model)


def test_a_step_is_one_call_for_each_parameter(monkeypatch):
    """Which a GPU compiles; what changes from step to step comes in a tensor."""
    calls = []
    monkeypatch.setattr(elementwise, "fused", lambda function, device_type, **_: lambda *given: calls.append(function))
    model = torch.nn.ParameterList(torch.ones(5, 3) for _ in range(7))
    optimizer = build_optimizer(model, LION)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    calls.clear()
    with Launches() as launches:
        optimizer.step()
    assert calls == [elementwise.update_lion] * 7 and launches.count == 0
    assert elementwise.place_numbers([1.0, 2.0], torch.device("meta")).shape == (2,)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.slow
def test_compiled_as_on_cuda_a_step_is_one_kernel_and_no_step_is_compiled_anew(monkeypatch):
    want = stepped()
    monkeypatch.setattr("shardbook.comm.compile_on_cuda.has_triton", lambda: True)
    monkeypatch.setattr(elementwise, "fused", lambda function, device_type, **how: fused(function, "cuda", **how))
    monkeypatch.setattr(elementwise, "place_numbers", lambda numbers, device: torch.tensor(numbers))
    torch._dynamo.reset()
    counters["stats"].clear()
    metrics.reset()
    for got, parameter in zip(stepped(), want, strict=True):
        assert torch.allclose(got, parameter, rtol=1e-5, atol=1e-6)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= 3 and metrics.generated_kernel_count == graphs
