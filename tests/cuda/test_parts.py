"""What a step moves between streams, threads and ranks, once under a CUDA that remembers: no rule is broken, and the
numbers are those of one plain process. What was wrong once is planted again, and found."""

import dataclasses

import pytest
import torch
from cases import Case, assert_exact_bytes, assert_parity, outcomes_of, reference_of, run_cases
from cuda_stand_in import on_cuda
from pipeline_cases import deep
from tensor_cases import write_models
from world import losses, run_world, train_rank

# as tests/gpu: here only the order is a GPU's, and rows are padded to what its kernels take
TOLERANCE = 1e-5
FP32 = ("precision.params=fp32", "precision.reduce=fp32")
LONG = ("data.max_length=256",)
CASES = [
    Case("zero3", 1, 1, 3, True, checkpointing="full"),
    Case("ddp", 2, 1, 3, True),
    Case("zero1", 1, 2, 3, True),
    Case("zero2", 1, 2, 3, True, False, "selective"),
    Case("zero3", 1, 2, 3, True, checkpointing="full", extra=("parallel.forward_prefetch=1",)),
    Case("hsdp", 2, 2, 3, True, False),
    Case("zero3", 1, 1, 3, True, tp=2),
    Case("zero3", 1, 1, 3, True, checkpointing="full", extra=LONG, cp=2),
    Case("ddp", 1, 1, 1, pp=2),
    Case("zero2", 1, 1, 3, pp=2, schedule="gpipe"),
    Case("zero3", 1, 1, 3, True, checkpointing="full", pp=2),
    deep("zero1", 1, 1, 4, True, pp=2, chunks=2, schedule="interleaved", clips=True),
]


@pytest.fixture(scope="module")
def models(tiny):
    write_models(tiny)
    return tiny


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_stage_and_axis(case, recipe, models, tmp_path):
    case = dataclasses.replace(case, extra=(*FP32, *case.extra))
    assert run_world(case.world, on_cuda, run_cases, recipe, models, [case], tmp_path) == [[]] * case.world
    outcomes = outcomes_of(case, tmp_path)
    assert_parity(outcomes[0].result, reference_of(recipe, models)(case), TOLERANCE)
    assert_exact_bytes(outcomes)


RUNS = {
    "bf16": ("precision.params=bf16", "parallel.stage=ddp", "model.attention=eager"),
    "zeropp": ("parallel.stage=zeropp", "parallel.quantize_weights=8", "parallel.quantize_gradients=[8,4]"),
    "error-feedback": (
        "parallel.stage=zeropp",
        "parallel.quantize_gradients=[8,4]",
        "parallel.quantize_error_feedback=true",
    ),
    "hpZ": ("parallel.stage=zeropp", "parallel.secondary_shard=2"),
    "inputs-away": ("activation.checkpointing=full", "offload.activations=cpu"),
    "adamw_bf16": ("optim.name=adamw_bf16",),
    "lion": ("optim.name=lion",),
    "muon": ("optim.name=muon",),
    "samples": ("generate.steps=2", "generate.samples=2", "generate.max_new_tokens=4", "generate.temperature=0.7"),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_else_a_step_may_do(name, recipe):
    words = [str(recipe), f"run.name={name}", "train.steps=3", *FP32, *RUNS[name]]
    found = run_world(2, on_cuda, train_rank, words)
    assert [code for code, *_ in found] == [0, 0], found


def test_a_checkpoint_goes_on_bitwise(recipe):
    words = ("train.save_steps=2", "train.gradient_accumulation_steps=2", *FP32)
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        words_of = [str(recipe), f"run.name={name}", f"train.steps={steps}", *words]
        assert [code for code, *_ in run_world(2, on_cuda, train_rank, words_of)] == [0, 0]
    assert losses(recipe.parent / "parts") == losses(recipe.parent / "whole")


# ---- what was wrong, planted again


def asks_before():
    """A receive is asked for before the work is launched that its message waits for."""
    import streams

    from shardbook.parallel.pipeline import PipelineLinks

    streams.CONNECT_SECONDS = 3.0
    make_room, ask = PipelineLinks.make_room, PipelineLinks.ask
    PipelineLinks.make_room = lambda self, *given: ask(self, make_room(self, *given))
    PipelineLinks.ask = lambda self, asked: asked


def connects_late():
    """And no message passes a link before a step."""
    asks_before()
    import streams

    from shardbook.parallel import pipeline

    streams.CONNECT_SECONDS = 3.0
    real = pipeline.build_pipeline_links

    class Silent:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def isend(self, *_):
            return self

        irecv, send, recv = isend, isend, isend

        def wait(self):
            return None

    def build(layout, mesh):
        pipeline.dist = Silent()
        try:
            return real(layout, mesh)
        finally:
            pipeline.dist = torch.distributed

    from shardbook.parallel import sharding

    sharding.build_pipeline_links = build


def gradients_are_not_held():
    """What the host reads of the device goes back to its allocator when the hook returns."""
    import time

    from shardbook.memory.host_adamw import HostAdamW, Staging

    Staging.source = property(lambda self: None, lambda self, value: None)
    real = HostAdamW._land

    def land(self, *given):
        time.sleep(1.0)  # PCIe is slow
        real(self, *given)

    HostAdamW._land = land


def a_thread_without_a_device():
    from shardbook.memory.homes import Pager

    Pager._begin = lambda self: None


def rates_of_pageable_memory():
    torch.Tensor.pin_memory = lambda self: self


OFFLOAD = ("offload.optimizer=cpu", "train.gradient_accumulation_steps=2")
PLANTED = {
    asks_before: (2, "a launch waits for a receive", ("parallel.pp_size=2", "parallel.pipeline_schedule=gpipe")),
    connects_late: (2, "waits in its first", ("parallel.pp_size=2", "parallel.pipeline_schedule=gpipe")),
    gradients_are_not_held: (2, "takes memory on", OFFLOAD),
    a_thread_without_a_device: (1, "set no device", (*OFFLOAD, "offload.params=cpu")),
    rates_of_pageable_memory: (1, "not pinned", ("optim.name=adamw_bf16",)),
}


def train_with(plant, words):
    plant()
    return train_rank(words)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant, recipe, tmp_path):
    world, said, words = PLANTED[plant]
    words = [str(recipe), f"run.name={plant.__name__}", "train.steps=3", "train.eval_steps=0", *FP32, *words]
    try:
        found = run_world(world, on_cuda, train_with, plant, words)
    except AssertionError as error:
        assert said in str(error)
    else:
        assert any(code == 1 and said in err for code, _, err in found), found
