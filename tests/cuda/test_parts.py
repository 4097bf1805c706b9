"""What a step moves between streams, threads and ranks, once under a CUDA that remembers: no rule is broken, and the
numbers are those of one plain process. What was wrong once is planted again, and found."""

import dataclasses
from functools import wraps

import pytest
import torch
from cases import Case, assert_exact_bytes, assert_parity, groups_of_reductions, outcomes_of, reference_of, run_cases
from cuda_stand_in import on_cuda
from families import write_family
from pipeline_cases import deep
from tensor_cases import write_models
from torch.distributed.fsdp import FSDPModule
from world import losses, run_world, train_rank

from shardbook.model import nf4

pytestmark = pytest.mark.slow
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
    make, post = PipelineLinks.make_recv_buffer, PipelineLinks.post_recv
    PipelineLinks.make_recv_buffer = lambda self, *given: post(self, make(self, *given))
    PipelineLinks.post_recv = lambda self, asked: asked


def connects_late():
    """And no message passes a link before a step. Alone that hangs in no schedule, since a rank that asks for nothing
    before its own work is launched comes to each first message by itself (test_schedule.py)."""
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

    def build(*given):
        pipeline.dist = Silent()
        try:
            return real(*given)
        finally:
            pipeline.dist = torch.distributed

    from shardbook.parallel import sharding

    sharding.build_pipeline_links = build


def gradients_are_not_held():
    """What the host reads of the device goes back to its allocator when the hook returns."""
    import time

    from shardbook.memory.host_adamw import HostAdamW, Staging

    Staging.source = property(lambda self: None, lambda self, value: None)
    real = HostAdamW._accumulate

    def accumulate(self, *given):
        time.sleep(1.0)  # PCIe is slow
        real(self, *given)

    HostAdamW._accumulate = accumulate


def a_thread_without_a_device():
    from shardbook.memory import tiers

    tiers.own_stream = lambda device: None


def rates_of_pageable_memory():
    torch.Tensor.pin_memory = lambda self: self


def slots_are_read_into_at_once():
    """The disk's next bucket goes into a slot that the device may still be copying masters from."""
    from shardbook.memory.tiers import DiskState

    real = DiskState.__init__

    def init(self, *given):
        real(self, *given)
        self.uploads = False

    DiskState.__init__ = init


def loads_again():
    """No bug: before each step masters are written, with what they are, and uploaded, as by a load."""
    from shardbook.memory.host_adamw import HostAdamW

    begin = HostAdamW.begin_step

    def begin_step(self):
        for master in self.masters().parameters():
            master.data.mul_(1)
        self.upload_shards()
        begin(self)

    HostAdamW.begin_step = begin_step


def a_load_waits_for_the_host_alone():
    """And masters are written that are still under way to the device."""
    loads_again()
    from shardbook.memory.host_adamw import HostAdamW

    HostAdamW.wait = lambda self: [unit.ready.result() for unit in self.units if unit.ready]


def sums_come_back_unawaited():
    """A tied weight's, from pinned memory and back: the host reads them while they are still under way."""
    from shardbook.parallel import pipeline

    def sum_in_place(tensor, group, device_type):
        on_device = tensor.to(device_type)
        torch.distributed.all_reduce(on_device, group=group)
        tensor.copy_(on_device, non_blocking=True)

    pipeline.sum_in_place = sum_in_place


def exchanges_are_not_awaited():
    """Tokens go through experts while they are still under way."""
    from planted import replace

    from shardbook.comm.collectives import all_to_all

    def launch(sent, input_splits, output_splits, ranks):
        received = sent.new_empty(sum(output_splits), *sent.shape[1:])
        given = received, sent.contiguous(), output_splits, input_splits
        torch.distributed.all_to_all_single(*given, group=ranks.process_group, async_op=True)
        return received

    replace(all_to_all, launch)


OFFLOAD = ("offload.optimizer=cpu", "train.gradient_accumulation_steps=2")
EP = "parallel.ep_size=2"
PLANTED = {
    asks_before: (2, "a launch waits for a receive", ("parallel.pp_size=2", "parallel.pipeline_schedule=gpipe")),
    connects_late: (2, "waits in its first", ("parallel.pp_size=2", "parallel.pipeline_schedule=gpipe")),
    gradients_are_not_held: (2, "takes memory on", OFFLOAD),
    sums_come_back_unawaited: (2, "reads (8288,)", (*OFFLOAD, "parallel.pp_size=2")),
    exchanges_are_not_awaited: (2, "wrote, and never waited for it", (EP,)),
    a_thread_without_a_device: (1, "set no device", (*OFFLOAD, "offload.params=cpu")),
    rates_of_pageable_memory: (1, "not pinned", ("optim.name=adamw_bf16",)),
    slots_are_read_into_at_once: (1, "the disk on thread", ("offload.optimizer=nvme",)),
    a_load_waits_for_the_host_alone: (1, "aten::mul_ on thread MainThread", OFFLOAD),
}


def train_with(plant, words):
    plant()
    return train_rank(words)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant, recipe, tmp_path):
    world, said, words = PLANTED[plant]
    words = [str(recipe), f"run.name={plant.__name__}", "train.steps=3", "train.eval_steps=0", *FP32, *words]
    words += [f"offload.path={tmp_path}"] * ("offload.optimizer=nvme" in words)
    words += [f"model.path={write_family(tmp_path / 'model', 'mixtral')}"] if EP in words else []
    try:
        found = run_world(world, on_cuda, train_with, plant, words)
    except AssertionError as error:
        assert said in str(error)
    else:
        assert any(code == 1 and said in err for code, _, err in found), found


def test_a_load_between_steps_changes_nothing(recipe):
    for plant in (int, loads_again):
        words = [str(recipe), f"run.name=load-{plant.__name__}", "train.steps=3", *FP32, *OFFLOAD]
        assert run_world(1, on_cuda, train_with, plant, words)[0][0] == 0
    assert losses(recipe.parent / "load-loads_again") == losses(recipe.parent / "load-int")


# ---- what is slow, where it is left out


def one_communicator():
    from shardbook.parallel import sharding

    sharding.separate_reductions = lambda roots: None


def groups_with(plant, words):
    plant()
    return groups_of_reductions(words)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="torch before 2.13: one communicator for both"
)
def test_reductions_have_a_communicator_of_their_own_on_a_gpu_alone(recipe):
    for around, plant, group in (
        ([on_cuda], int, "fsdp_reduce_scatter"),
        ([on_cuda], one_communicator, "default_pg"),
        ([], int, "default_pg"),
    ):
        words = [str(recipe), f"run.name=groups-{len(around)}-{plant.__name__}", "train.steps=1", *FP32]
        assert run_world(2, *around, groups_with, plant, words) == [(0, {group})] * 2


def compiles_nothing():
    nf4.fused = lambda function, *_, **__: function


def compiles_parts():
    real = nf4._unpack

    def unpack(*given):
        torch.compiler.is_compiling = lambda: False
        real(*given)

    nf4._unpack = unpack


def unpack_with(plant, device):
    """How many compiled kernels unpack a matrix, in how many parts, and its bits."""
    from shardbook.comm import compile_on_cuda as fused

    real, embedding, kernels, parts = torch.compile, nf4.F.embedding, [], []

    @wraps(real)
    def compile(function, **options):
        assert options["fullgraph"]

        def kernel(*given):
            kernels.append(function)
            torch.compiler.is_compiling = lambda: True
            function(*given)

        return kernel

    torch.compile, fused.has_triton, nf4.has_kernel, nf4.AT_ONCE = compile, lambda: True, lambda: False, 1000
    nf4.F.embedding = lambda *given: parts.append(given) or embedding(*given)
    plant()
    if device == "cuda":
        torch.cuda.set_device(0)
    rows = torch.linspace(-1, 1, 40 * 128).view(40, 128)
    packed = [each.to(device) for each in nf4.quantize_rows(rows)]
    weight = nf4.unpack_nf4(*packed, 128, False, torch.bfloat16, False)
    return len(kernels), len(parts), weight.view(torch.int16).tolist()


def test_a_gpu_unpacks_all_rows_in_one_compiled_kernel():
    ((_, _, bits),) = cpu = run_world(1, unpack_with, int, "cpu")
    assert cpu == [(0, 6, bits)]
    assert run_world(1, on_cuda, unpack_with, int, "cuda") == [(1, 0, bits)]  # looked up in codes, not in pairs
    assert run_world(1, on_cuda, unpack_with, compiles_nothing, "cuda") == [(0, 6, bits)]
    assert run_world(1, on_cuda, unpack_with, compiles_parts, "cuda") == [(1, 6, bits)]
