"""plan_module: its peak is that of a step of `shard_model` on fake tensors, for any module; and what it refuses."""

import contextlib
import io
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from plans import MIXED, SIZES
from tiny import said_by
from torch import nn
from transformers import AutoModelForCausalLM

from shardbook import Parallel, Precision, plan_module, shard_model

PAGE = Path(__file__).parents[3] / "docs" / "library.md"
BF16 = Precision(params="bf16")


class Mixer(nn.Module):
    """A block of an MLP-Mixer (arXiv 2105.01601): it mixes patches, then channels."""

    def __init__(self, patches, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.patches = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


class Residual(nn.Module):
    def __init__(self, given, made, stride):
        super().__init__()
        first, second = nn.Conv2d(given, made, 3, stride, 1), nn.Conv2d(made, made, 3, 1, 1)
        self.way = nn.Sequential(first, nn.BatchNorm2d(made), nn.ReLU(), second, nn.BatchNorm2d(made))
        self.beside = nn.Conv2d(given, made, 1, stride)

    def forward(self, x):
        return torch.relu(self.way(x) + self.beside(x))


def build_mixer():
    stem = nn.Sequential(nn.Conv2d(3, 128, 16, 16), nn.Flatten(2))
    blocks = [Mixer(128, 49) for _ in range(4)]
    model = nn.Sequential(stem, *blocks, Mean(), nn.Linear(49, 1000))
    return model, blocks, torch.empty(32, 3, 112, 112)


def build_conv():
    """The first block takes the batch, which has no gradient: fully_shard reduces it at the end of backward."""
    widths = ((3, 64, 1), (64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
    blocks = [Residual(*each) for each in widths]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    return model, blocks, torch.empty(16, 3, 64, 64)


class Pixels(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        return x + self.mix(x.movedim(1, -1)).movedim(-1, 1)


def build_dense(has_matrix):
    """Its loss is the fullest moment; all blocks but the first have no matrix, that of which may have one."""
    blocks = [nn.Sequential(nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU()) for _ in range(8)]
    blocks = [Pixels(64), *blocks] if has_matrix else blocks
    head = nn.Sequential(nn.Conv2d(64, 2000, 1), nn.LogSoftmax(1))
    return nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), *blocks, head), blocks, torch.empty(4, 3, 16, 16)


def build_wide():
    """Its parameters are all of its bytes."""
    blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(6)]
    return nn.Sequential(nn.Linear(64, 1024), *blocks, nn.Linear(1024, 100)), blocks, torch.empty(64, 64)


def build_family(name, length=128):
    family, more = MIXED[name]
    model = AutoModelForCausalLM.from_config(family(**SIZES, **more, pad_token_id=0))
    ids = torch.zeros(2, length, dtype=torch.int64)
    return model, list(model.model.layers), {"input_ids": ids, "labels": ids}


def build_parts(name):
    """Attention and MLP of each block are units; norms are in none."""
    model, blocks, batch = build_family(name)
    return model, [part for block in blocks for part in (block.self_attn, block.mlp)], batch


def build(name):
    with torch.device("meta"):
        made = {"mixer": build_mixer, "conv": build_conv, "wide": build_wide}
        made |= {"dense": partial(build_dense, False), "dense, a matrix first": partial(build_dense, True)}
        made |= {"gemma3_text, parts": partial(build_parts, "gemma3_text")}
        return made.get(name, partial(build_family, name))()


def simulated(model, blocks, batch, stage, micros, precision):
    """The most bytes of the second of two steps on the first of 8 ranks, counted from the code itself."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from shardbook.comm.torch_private import fake_store, fake_tensors
    from shardbook.optim.table import OPTIMIZERS
    from shardbook.parallel.replicated import map_tensors
    from shardbook.plan.module import call_model
    from shardbook.plan.simulate import PeakTracker

    dist.init_process_group("fake", rank=0, world_size=8, store=fake_store())
    try:
        sharded = shard_model(model, blocks=blocks, stage=stage, precision=precision)
        with fake_tensors(), PeakTracker() as live:
            model.to_empty(device="cpu")
            if hasattr(model, "tie_weights"):  # to_empty makes two of a tied one
                model.tie_weights()
            given = map_tensors(batch, lambda tensor: torch.empty_like(tensor, device="cpu"))
            local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
            state = [torch.empty(OPTIMIZERS["adamw"].state_bytes(p.numel(), 4), dtype=torch.uint8) for p in local]
            for _ in range(2):
                live.most = {}
                for micro in range(micros):
                    with sharded.micro_batch(is_last=micro == micros - 1):
                        loss = call_model(model, given)  # held until the next, as in any loop
                        loss.backward()
                model.zero_grad()
                del loss
            del state
        return max(live.most.values())
    finally:
        dist.destroy_process_group()


def both(name, stage, micros, params="bf16"):
    (model, blocks, batch), precision = build(name), Precision(params=params)
    plan = plan_module(model, blocks=blocks, batch=batch, stage=stage, gpus=8, micros=micros, precision=precision)
    return plan.peak.total, simulated(model, blocks, batch, stage, micros, precision)


HSDP = Parallel(stage="hsdp", dp_shard_size=2)
FAST = [("mixer", "zero3", 2), ("conv", "ddp", 1), ("conv", "zero2", 2), ("gemma3_text", "ddp", 2)]
FAST += [("gpt_oss", "zero1", 2), ("qwen3_next", "zero3", 1), ("gemma3_text, parts", "zero3", 2)]
DENSE = ("dense", "dense, a matrix first")
FAST += [(name, stage, 1) for name in DENSE for stage in ("zero2", "zero3")]
MODELS, STAGES = ("mixer", "conv", *DENSE, *MIXED, "gemma3_text, parts"), ("ddp", "zero1", "zero2", "zero3", HSDP)
EVERY = [(name, stage, micros) for name in MODELS for stage in STAGES for micros in (1, 2)]


@pytest.mark.parametrize(
    ("name", "stage", "micros"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in FAST)],
)
def test_the_peak_is_that_of_a_step(apart, name, stage, micros):
    """To the byte: nothing of these modules is known but what they do."""
    planned, counted = apart(both, name, stage, micros)
    assert planned == counted


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("name", ["mixer", "conv"])
def test_the_peak_in_fp32(apart, name, stage):
    planned, counted = apart(both, name, stage, 2, "fp32")
    assert planned == counted


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_the_buffer_of_a_gather_stays_until_the_next_one_is_copied(apart, stage):
    planned, counted = apart(both, "wide", stage, 1, "fp32")
    assert planned == counted


def parts_of_chains():
    """The peak of a chain of products under zero3 on 8 ranks, by unit: whole blocks, or each of their two products."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)) for _ in range(4)]
        model, batch = nn.Sequential(*blocks), torch.empty(1, 1024)
    found = {}
    for name, units in (("blocks", blocks), ("parts", [part for block in blocks for part in block])):
        found[name] = plan_module(model, blocks=units, batch=batch, gpus=8, precision=Precision(params="fp32"))
    return found


def test_a_unit_may_be_a_part_of_a_block():
    """By hand: fullest is the reduction of the second unit, beside it the gather of the first. A part is half a block;
    what is on top are 4 bytes of the loss, and a few rows of activations."""
    found, matrix = parts_of_chains(), 1024 * 4096 * 4
    for name, size, count in (("blocks", 2 * matrix, 4), ("parts", matrix, 8)):
        peak = found[name].peak
        assert (peak.params, peak.optimizer) == (8 * matrix // 8, 2 * 8 * matrix // 8 + 8 * 4)  # a step count each
        assert (peak.gathered, peak.buffers, peak.grads) == (size, 2 * size, (count - 2) * size // 8 + 4)
        assert 0 <= peak.working - size < 2**15 and peak.activations < 2**15
    assert found["parts"].fullest == "micro-batch 1, block 0.1, backward"


def example():
    text = PAGE.read_text().partition("## What a step will take")[2]
    code, printed = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", text, re.S).groups()
    return code, printed


def test_the_example_of_the_page_prints_what_stands_below_it():
    code, printed = example()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, str(PAGE), "exec"), {})
    assert out.getvalue() == printed


def chain(count=3, more=None):
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(64, 64), more or nn.Tanh()) for _ in range(count)]
        return nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 1)), blocks, torch.empty(4, 8)


def test_what_a_plan_has():
    """By hand: 64 x 64 + 64 of each of three blocks, and 8 x 64 + 64 + 64 + 1 in none, on 4 ranks; the 1 is padded."""
    model, blocks, batch = chain()
    plan = plan_module(model, blocks=blocks, batch=batch, gpus=4, micros=2, precision=BF16)
    padded = 3 * (64 * 64 + 64) + 64 * 8 + 64 + (4 * 64 + 4)
    assert plan.resident.params_bytes == padded // 4 * 4 and plan.resident.grads_bytes == padded // 4 * 4
    assert list(plan.units) == ["1", "2", "3", ""] and plan.unmeasured == ""
    gathers = plan.traffic["all_gather", "dp_shard"]
    assert (gathers.calls, gathers.payload_bytes) == (2 * (2 * 3 + 1), 2 * 2 * (padded + 3 * (64 * 64 + 64)))
    assert plan.moments[plan.fullest] == plan.peak and plan.peak.params == plan.resident.params_bytes
    assert "zero3 on 4 ranks" in str(plan) and f"peak in {plan.fullest}" in str(plan)


def test_a_real_model_is_left_as_it_is():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.LSTM(64, 64), nn.BatchNorm1d(64))
    model.forward = lambda x: model[1](model[0](x))[0]
    before, state = torch.get_rng_state(), dict([*model.named_parameters(), *model.named_buffers()])
    copies = {name: tensor.clone() for name, tensor in state.items()}
    plan = plan_module(model, blocks=[model[1]], batch=torch.ones(4, 8), gpus=8)
    assert plan.peak.total > 0 and torch.equal(before, torch.get_rng_state())
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(after[name] is tensor and torch.equal(tensor, copies[name]) for name, tensor in state.items())
    assert all(p.grad is None for p in model.parameters()) and not model[1]._forward_hooks
    assert model[1]._flat_weights[0] is model[1].weight_ih_l0
    assert type(model) is nn.Sequential and type(model[1]) is nn.LSTM
    again = plan_module(model, blocks=[model[1]], batch=torch.ones(4, 8), gpus=8)
    assert again.peak == plan.peak  # fully_shard takes a module once


class NeedsValues(nn.Module):
    def forward(self, x):
        return x * x.sum().item()


def test_a_block_that_needs_values_is_named():
    """Experts of gpt-oss too, where they ask which rows each of them has. All else is still planned."""
    model, blocks, batch = chain(more=NeedsValues())
    plan = plan_module(model, blocks=blocks, batch=batch, gpus=8)
    assert plan.unmeasured.startswith("block 1, a Sequential, cannot run without memory (")
    assert plan.unmeasured.endswith("), so the plan has no peak") and plan.unmeasured in str(plan)
    assert plan.resident.total_bytes and plan.traffic and not plan.moments
    assert said_by(lambda: plan.peak) == plan.unmeasured
    with torch.device("meta"):
        model, blocks, batch = build_family("gpt_oss")
    model.config._experts_implementation = "eager"
    plan = plan_module(model, blocks=blocks, batch=batch, gpus=8)
    assert "block model.layers.0, a GptOssDecoderLayer, cannot run" in plan.unmeasured and "nonzero" in plan.unmeasured


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 0}, "plan_module: gpus = 0: must be a whole number of at least 1"),
        ({"gpus": 12}, "plan_module: gpus = 12: must be whole nodes of 8; a multiple of it, or set node"),
        ({"micros": 1.5}, "plan_module: micros = 1.5: must be a whole number of at least 1"),
        ({"optimizer": "adam"}, "plan_module: optimizer = 'adam': must be one of adamw, "),
        ({"loss": 3}, "plan_module: loss = 3: must be a function of the model and a batch"),
        ({"stage": "zero4"}, "zero4"),
        ({"stage": Parallel(stage="hsdp", dp_shard_size=3)}, "3 does not divide the world of 8 ranks"),
        ({"blocks": [nn.Linear(2, 2)]}, "shard_model: blocks[0], a Linear, is not inside the model"),
    ],
)
def test_what_does_not_fit_is_one_line(changes, words):
    model, blocks, batch = chain()
    said = said_by(lambda: plan_module(model, **{"blocks": blocks, "batch": batch, "gpus": 8} | changes))
    assert words in said and "\n" not in said


def test_blocks_run_once_and_in_their_order():
    model, blocks, batch = chain()
    late = said_by(lambda: plan_module(model, blocks=blocks[::-1], batch=batch, gpus=8))
    assert late.startswith("plan_module: block 1 runs before block 2; name them in the order")
    model.forward = lambda x: blocks[0](blocks[0](model[0](x)))
    twice = said_by(lambda: plan_module(model, blocks=blocks[:1], batch=batch, gpus=8))
    assert twice == "plan_module: block 1 runs 2 times in a micro-batch; it must run once"


def test_beside_a_process_group_there_is_no_peak(apart):
    planned = apart(planned_beside_a_group)
    assert planned.startswith("there is a process group already, so the plan has no peak: plan before init_process_gr")


def planned_beside_a_group():
    import torch.distributed as dist

    from shardbook.comm.torch_private import fake_store

    model, blocks, batch = chain()
    dist.init_process_group("fake", rank=0, world_size=8, store=fake_store())
    try:
        plan = plan_module(model, blocks=blocks, batch=batch, gpus=8)
        assert plan.traffic and plan.resident.total_bytes
        return plan.unmeasured
    finally:
        dist.destroy_process_group()
