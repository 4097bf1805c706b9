"""The same recipes and the same parity matrix on CUDA: one rank over NCCL, two ranks on one GPU over gloo; bf16,
compile, and the allocator's peak against the table."""

import os

import pytest
import torch
import torch.distributed as dist
from cases import Case, assert_exact_bytes, assert_parity, layouts, outcomes_of, reference_of, run_cases
from pipeline_cases import deep
from quantized import assert_alike_but_for_ties
from tensor_cases import write_models
from toys import Scenario, Toy, train_toy
from world import STREAMS, losses, metrics, run_train, run_world

from shardbook.comm.quantize import dequantize, quantize

# fp32 kernels of the GPU add in another order than the CPU's and round each matmul's sum of some hundred products once
# more: 2**-24 * sqrt(100) = 6e-7 a matmul, a dozen of them in a row, five steps
TOLERANCE = 1e-5
# bf16 keeps 8 bits: 2**-8 relative a rounding; a loss averages some 90 tokens of three blocks each, a gradient norm
# adds thousands of elements with independent roundings, so both stay within two roundings
TOLERANCE_BF16 = 2**-7


@pytest.fixture(scope="module", autouse=True)
def cuda():
    if (
        not torch.cuda.is_available() and STREAMS not in os.environ
    ):  # not a skip: all of them skipped would look like a pass
        pytest.exit("the GPU tests need a CUDA device; there is none here", returncode=2)


def over_gloo(function, *args):
    """`function(*args)` on a rank that shares its GPU: NCCL refuses two ranks on one, gloo copies through the host."""
    real = dist.init_process_group
    dist.init_process_group = lambda backend, **options: real("cpu:gloo,cuda:gloo", **options)
    dist.isend, dist.irecv, dist.send, dist.recv = ByHost.isend, ByHost.irecv, ByHost.send, ByHost.recv
    gather_for_dtensors()
    os.environ["LOCAL_RANK"] = "0"
    return function(*args)


def gather_for_dtensors():
    """Has the all-gather of DTensors go through torch.distributed's own: the one that they call hands gloo a list of
    tensors to gather at once, for which it has no form on a GPU, and reads their addresses on the host."""

    def gather(part, size, group_name):
        out = part.new_empty(size * part.shape[0], *part.shape[1:])
        return gather_out(part, size, group_name, out=out)

    def gather_out(part, size, group_name, *, out):
        dist.all_gather_into_tensor(out, part.contiguous(), group=resolve(group_name))
        return out

    resolve = torch.distributed.distributed_c10d._resolve_process_group
    OVERRIDES.append(torch.library.Library("_c10d_functional", "IMPL"))  # it holds while this object lives
    OVERRIDES[-1].impl("all_gather_into_tensor", gather, "CUDA")
    OVERRIDES[-1].impl("all_gather_into_tensor_out", gather_out, "CUDA")


OVERRIDES: list[torch.library.Library] = []


class ByHost:
    """What one rank sends another by way of the host's memory: gloo reduces what lies on a GPU, but sends none."""

    isend_of_torch, irecv_of_torch = dist.isend, dist.irecv

    def __init__(self, pass_on, tensor, other, group, arrives):
        self.staged, self.target = tensor.to("cpu", copy=True), tensor if arrives else None
        self.work = pass_on(self.staged, other, group)

    @classmethod
    def isend(cls, tensor, dst=None, group=None):
        return cls(cls.isend_of_torch, tensor, dst, group, arrives=False)

    @classmethod
    def irecv(cls, tensor, src=None, group=None):
        return cls(cls.irecv_of_torch, tensor, src, group, arrives=True)

    @classmethod
    def send(cls, tensor, dst=None, group=None):
        cls.isend(tensor, dst, group).wait()

    @classmethod
    def recv(cls, tensor, src=None, group=None):
        cls.irecv(tensor, src, group).wait()

    def is_completed(self):
        return self.work.is_completed()

    def wait(self):
        self.work.wait()
        if self.target is not None:
            self.target.copy_(self.staged)


def matrix(world, precision):
    extra = (f"precision.params={precision}", "precision.reduce=fp32")
    options = [(1, False, True, "none"), (3, True, False, "full")]
    return [Case(*layout, *picked, extra=extra) for layout in layouts(world) for picked in options]


def run_matrix(world, precision, recipe, tiny, folder):
    cases = matrix(world, precision)
    words = (recipe, tiny, cases, folder)
    found = run_world(1, run_cases, *words) if world == 1 else run_world(world, over_gloo, run_cases, *words)
    assert found == [[]] * world
    return {case: outcomes_of(case, folder) for case in cases}


@pytest.mark.parametrize("world", [1, 2])
def test_parity_in_fp32_and_exact_bytes(world, recipe, tiny, tmp_path, wanted):
    for case, outcomes in run_matrix(world, "fp32", recipe, tiny, tmp_path).items():
        assert_parity(outcomes[0].result, wanted(case), TOLERANCE)
        assert_exact_bytes(outcomes)


@pytest.mark.parametrize("compiles", ["false", "true"])
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_matrices_or_rows_shared_by_two_ranks(axis, compiles, recipe, tiny, tmp_path, wanted):
    extra = ("precision.params=fp32", "precision.reduce=fp32", f"train.compile={compiles}")
    kinds = [("zero3", 1, 1, 3, True, True, "none"), ("zero1", 1, 1, 1, False, False, "full")]
    cases = [Case(*kind, extra=extra, **{axis: 2}) for kind in kinds]
    assert run_world(2, over_gloo, run_cases, recipe, tiny, cases, tmp_path) == [[], []]
    for case in cases:
        assert_parity(outcomes_of(case, tmp_path)[0].result, wanted(case), TOLERANCE)
        assert_exact_bytes(outcomes_of(case, tmp_path))


@pytest.fixture(scope="module")
def models(tiny):
    write_models(tiny)
    return tiny


PIPELINES = {
    "one micro-batch": deep("zero1", 1, 1, 1, pp=2, extra=("precision.params=fp32", "train.eval_steps=0")),
    "1f1b": deep("zero1", 1, 1, 4, clips=True, pp=2, extra=("precision.params=fp32",)),
    "gpipe": deep("zero3", 1, 1, 4, pp=2, schedule="gpipe", extra=("precision.params=fp32",)),
    "interleaved": deep(
        "zero2", 1, 1, 4, tied=False, pp=2, chunks=2, schedule="interleaved", extra=("precision.params=fp32",)
    ),
    "compiled": deep(
        "zero1", 1, 1, 3, checkpointing="full", pp=2, extra=("precision.params=fp32", "train.compile=true")
    ),
}


@pytest.mark.parametrize("schedule", PIPELINES)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_layers_on_one_rank_after_another(backend, schedule, recipe, models, tmp_path):
    """Over NCCL: that ranks which send and receive in the order of a table do not wait for each other for ever."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL refuses two ranks on one GPU")
    case, words = PIPELINES[schedule], (run_cases, recipe, models, [PIPELINES[schedule]], tmp_path)
    assert run_world(2, *(words if backend == "nccl" else (over_gloo, *words))) == [[], []]
    outcomes = outcomes_of(case, tmp_path)
    assert_parity(outcomes[0].result, reference_of(recipe, models)(case), TOLERANCE)
    assert_exact_bytes(outcomes)


@pytest.mark.parametrize("kernel", ["varlen", "sdpa"])
def test_split_rows_of_several_documents_in_bf16(kernel, recipe, tiny, tmp_path, wanted):
    """Between two exchanges a kernel is told of the documents of whole rows, by which slices are not cut."""
    extra = ("precision.params=bf16", f"model.attention={kernel}", "data.max_length=256")
    case = Case("zero3", 1, 1, 3, True, True, "full", extra=extra, cp=2)
    assert run_world(2, over_gloo, run_cases, recipe, tiny, [case], tmp_path) == [[], []]
    outcomes = outcomes_of(case, tmp_path)
    assert outcomes[0].result.losses == pytest.approx(wanted(case).losses, rel=TOLERANCE_BF16)
    assert_exact_bytes(outcomes)


@pytest.mark.parametrize("world", [1, 2])
def test_bf16_with_fp32_reduction_stays_near(world, recipe, tiny, tmp_path, wanted):
    for case, outcomes in run_matrix(world, "bf16", recipe, tiny, tmp_path).items():
        assert outcomes[0].result.losses == pytest.approx(wanted(case).losses, rel=TOLERANCE_BF16)
        assert outcomes[0].result.norms == pytest.approx(wanted(case).norms, rel=4 * TOLERANCE_BF16)
        assert_exact_bytes(outcomes)


class Large(Toy):
    """Some 30 MB of parameters, so that the allocator's rounding to 512 bytes is nothing beside them."""

    def __init__(self):
        super().__init__(vocab=257, width=512)
        self.layers = torch.nn.ModuleList(LargeBlock() for _ in range(6))


class LargeBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512)

    def forward(self, hidden, gated):
        return hidden + self.down(torch.tanh(self.up(hidden)))


def peak(stage):
    """Allocator bytes: the peak of the second step's micro-batches, what lay there before, the formula's gathered."""
    import contextlib

    from shardbook.plan.formulas import predict_gathered_peak
    from shardbook.ranks.distributed import start_distributed

    start_distributed()
    seen = {}

    @contextlib.contextmanager
    def watch(layout):
        seen.update(layout=layout, before=torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        yield
        seen["peak"] = torch.cuda.max_memory_allocated()

    train_toy(Scenario(build=Large, micros=3), stage, 1, 2, 2, 0.0, watch, device="cuda")
    return seen["peak"], seen["before"], predict_gathered_peak(seen["layout"])


def test_the_allocators_peak_follows_the_table():
    peaks = {stage: run_world(2, over_gloo, peak, stage)[0] for stage in ("zero1", "zero2", "zero3")}
    assert peaks["zero3"][0] < peaks["zero2"][0] < peaks["zero1"][0], peaks
    for most, before, gathered in peaks.values():
        assert most - before >= gathered


@pytest.fixture(scope="module")
def exact(recipe):
    """Five steps in fp32 on the CPU, in this process's own code path but for the device (CUDA is hidden from it)."""
    return run_train(1, recipe, "cpu", environment={"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective", "every:2", "budget:0.5"])
def test_compiled_bf16_stays_near(recipe, exact, checkpointing):
    words = ("train.compile=true", f"activation.checkpointing={checkpointing}")
    run = run_train(1, recipe, f"compiled-{checkpointing.replace(':', '-')}", *words)
    assert losses(run) == pytest.approx(losses(exact), rel=TOLERANCE_BF16)
    assert all(row["memory/peak_bytes"] > row["memory/params_bytes"] for row in metrics(run) if "train/loss" in row)


def test_resume_is_bitwise(recipe):
    words = ("train.steps=4", "train.save_steps=2", "train.deterministic=true")
    straight = run_train(1, recipe, "straight", *words)
    source = straight / "checkpoints" / "step-000002"
    again = run_train(1, recipe, "again", *words, f"train.resume_from_checkpoint={source}")
    assert losses(again) == losses(straight)[2:]


def first_block():
    from shardbook.ranks.distributed import start_distributed

    start_distributed()
    torch.zeros(1, device="cuda")
    return torch.cuda.memory_snapshot()[0]["is_expandable"]


def test_the_allocator_grows_its_blocks():
    assert run_world(1, first_block) == [True]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_quantised_by_the_gpu_are_the_cpus(bits, dtype):
    """Scales to the bit, steps but for ties, which are not rare in bf16: one element in some hundreds is half of its
    block's largest, 63.5 or 3.5 steps."""
    rows = torch.randn(3, 2, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    sent = {device: quantize(rows.to(device), bits) for device in ("cpu", "cuda")}
    assert_alike_but_for_ties(sent["cpu"], sent["cuda"].cpu(), rows, bits, 128)
    back = {device: torch.empty(2, 5000, device=device) for device in sent}
    for device, out in back.items():
        dequantize(sent["cpu"].to(device), out, bits)
    # the same bytes: one product and two sums, which a fused kernel may round once in place of twice
    assert torch.allclose(back["cpu"], back["cuda"].cpu(), rtol=0, atol=2**-22 * rows.abs().max().item())


def test_zeropp_near_numbers_and_exact_bytes(recipe, tiny, tmp_path, wanted):
    """Two ranks as two nodes: qwZ and qgZ."""
    switches = ("parallel.quantize_weights=8", "parallel.quantize_gradients=[8,4]", "precision.params=fp32")
    case, nodes = Case("zeropp", 1, 2, 3, clips=True, extra=switches), {"LOCAL_WORLD_SIZE": "1"}
    run_world(2, over_gloo, run_cases, recipe, tiny, [case], tmp_path, environment=nodes)
    outcomes = outcomes_of(case, tmp_path)
    assert_exact_bytes(outcomes)
    assert outcomes[0].result.losses == pytest.approx(wanted(case).losses, rel=0.02)
    assert outcomes[0].result.norms == pytest.approx(wanted(case).norms, rel=0.1)
