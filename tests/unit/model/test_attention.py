"""Attention without dense masks: which kernel, what it is told, and the same numbers as documents run apart."""

import dataclasses
import inspect
import random

import pytest
import torch
from documents import many_documents
from model_numbers import FAMILIES, assert_close, gradients, load, micro, rows
from tiny import config, write_model
from torch.utils._python_dispatch import TorchDispatchMode
from varlen import plain_varlen_attn

from shardbook.data.loader import ROUND_TO, Batching, build_micro_batch
from shardbook.memory.activation import SAVED_OPS, choice_contexts
from shardbook.model import attention, masks
from shardbook.model.attention import KERNELS, choose_attention
from shardbook.model.batch import Batch
from shardbook.model.causal_lm import build_model, materialize
from shardbook.model.masks import BLOCK
from shardbook.recipe import RecipeError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def no_kernel_stays(monkeypatch):
    """transformers' table of kernels is the process's: each test fills its own."""
    monkeypatch.setattr(attention, "ALL_ATTENTION_FUNCTIONS", type(attention.ALL_ATTENTION_FUNCTIONS)())
    yield
    for name in ("varlen", "flex"):
        type(attention.ALL_ATTENTION_FUNCTIONS)._global_mapping.pop(name, None)


@pytest.fixture
def plain_varlen(monkeypatch):
    stand_in = dataclasses.replace(KERNELS["varlen"], make=lambda: attention.make_varlen(plain_varlen_attn))
    monkeypatch.setitem(KERNELS, "varlen", stand_in)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


# ---- the numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_varlen_computes_what_documents_apart_do(tmp_path, plain_varlen, family):
    write_model(tmp_path, family)
    apart = gradients(load(tmp_path), micro(packed=False))
    for packed in (True, False):
        assert_close(gradients(load(tmp_path, attention="varlen"), micro(packed)), apart)


def test_the_stand_in_has_the_kernels_signature():
    from torch.nn.attention.varlen import varlen_attn

    real, ours = inspect.signature(varlen_attn).parameters, inspect.signature(plain_varlen_attn).parameters
    assert [(name, p.kind, p.default) for name, p in real.items() if name in ours] == [
        (name, p.kind, p.default) for name, p in ours.items() if name in real
    ]
    assert real.keys() <= ours.keys()


def test_a_kernel_without_groups_gets_whole_heads(folder, monkeypatch):
    """torch 2.11 has no enable_gqa: keys and values are repeated there."""

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        assert query.shape == key.shape == value.shape
        return plain_varlen_attn(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
        )

    stand_in = dataclasses.replace(KERNELS["varlen"], make=lambda: attention.make_varlen(older))
    monkeypatch.setitem(KERNELS, "varlen", stand_in)
    assert_close(gradients(load(folder, attention="varlen"), micro(True)), gradients(load(folder), micro(True)))


def shifted(batch, by):
    """`batch` with every boundary but the first moved by `by`."""
    moved = (batch.cu_seqlens + by).clamp(max=batch.input_ids.numel())
    moved[0], moved[-1] = 0, batch.input_ids.numel()
    return dataclasses.replace(batch, cu_seqlens=moved)


@pytest.mark.parametrize("kernel", ["varlen", "sdpa", "eager"])
@pytest.mark.parametrize("bug", ["an offset of one", "across documents"])
def test_wrong_boundaries_would_be_seen(folder, plain_varlen, kernel, bug):
    batch = micro(packed=True)
    wrong = shifted(batch, 1)
    if bug == "across documents":
        wrong = dataclasses.replace(batch, cu_seqlens=torch.tensor([0, 64, 128], dtype=torch.int32))
    with pytest.raises(AssertionError):
        assert_close(gradients(load(folder, attention=kernel), wrong), gradients(load(folder), micro(packed=False)))


@pytest.mark.parametrize("seed", range(4))
def test_flex_forward_is_sdpas(seed):
    """Forward alone: torch has no backward of it on a CPU. The mask pair by pair, and the outputs."""
    from torch.nn.attention.flex_attention import flex_attention

    dice = random.Random(seed)
    batch = many_documents(dice, rows=2, length=4 * BLOCK)
    shape = batch.input_ids.shape
    dense = masks.attention_mask("sdpa", batch.cu_seqlens, shape, True, torch.float32, batch.max_seqlen)
    mask = masks.attention_mask("flex", batch.cu_seqlens, shape, True, torch.float32, batch.max_seqlen)
    query, (key, value) = torch.randn(2, 4, shape[1], 16), torch.randn(2, 2, 2, shape[1], 16)
    with torch.no_grad():
        found = flex_attention(query, key, value, block_mask=mask, scale=0.25, enable_gqa=True)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, dense, scale=0.25, enable_gqa=True)
    assert torch.allclose(found, wanted, atol=1e-5)
    # blocks that it computes: those that hold an allowed pair, no other
    touched = dense[:, 0].unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK)).any(4).any(2)
    assert torch.equal(mask.to_dense()[:, 0].bool(), touched)
    whole = dense[:, 0].unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK)).all(4).all(2)
    assert int(mask.full_kv_num_blocks.sum()) == int(whole.sum())


@pytest.mark.parametrize(
    "around",
    [lambda: torch.compiler.set_stance("force_eager"), lambda: choice_contexts(None)[0]],
    ids=["ledger", "router"],
)
def test_flex_stays_compiled_in_blocks_that_are_not(around, monkeypatch):
    """Uncompiled it makes all scores. An open ledger keeps the blocks of tensor and context parallel from the compiler;
    the mode that notes what a router chooses must let it through."""
    compiled, real = [], torch.compile
    made = lambda graph, inputs: compiled.append(graph) or graph.forward  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda function: real(function, backend=made))
    attend = attention.make_flex()
    batch = many_documents(random.Random(1), rows=2, length=2 * BLOCK)
    facts = batch.cu_seqlens, batch.input_ids.shape, True, torch.float32, batch.max_seqlen
    query, (key, value) = torch.randn(2, 4, 2 * BLOCK, 16), torch.randn(2, 2, 2, 2 * BLOCK, 16)
    torch._dynamo.reset()
    with torch.no_grad(), around():
        found, _ = attend(torch.nn.Identity(), query, key, value, masks.attention_mask("flex", *facts), 0.25)
    dense = masks.attention_mask("sdpa", *facts)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, dense, scale=0.25, enable_gqa=True)
    assert len(compiled) == 1 and torch.allclose(found.transpose(1, 2), wanted, atol=1e-5)


# ---- shapes, memory


@pytest.mark.parametrize("kernel", ["varlen", "flex"])
def test_shapes_never_change_over_50_packed_micro_batches(kernel):
    dice, seen = random.Random(0), set()
    for _ in range(50):
        batch = many_documents(dice, rows=2, length=1000)
        facts = batch.cu_seqlens, batch.input_ids.shape, True, torch.bfloat16, batch.max_seqlen
        told = masks.attention_mask(kernel, *facts)
        tensors = [told[0]] if kernel == "varlen" else [told.kv_indices, told.kv_num_blocks, told.full_kv_indices]
        seen.add((tuple(batch.input_ids.shape), *(tuple(tensor.shape) for tensor in tensors)))
    assert len(seen) == 1 and next(iter(seen))[0] == (2, 1024)


def test_varlen_is_told_the_longest_document_of_the_micro_batch():
    """A power of two, so that compiled code meets few; never less than the true one, a row's padding too, and never
    more than the row."""
    dice = random.Random(0)
    for packed in (True, False):
        for most in (1, 3, 40):
            batch = many_documents(dice, rows=2, length=1000, most=most) if packed else micro(False)
            shape, told = batch.input_ids.shape, []

            def kernel(q, k, v, cu_q, cu_k, *limits, told=told, **_):
                told.append(limits)
                return q

            facts = masks.attention_mask("varlen", batch.cu_seqlens, shape, packed, torch.bfloat16, batch.max_seqlen)
            attend = attention.make_varlen(kernel)
            attend(torch.nn.Module(), *[torch.zeros(shape[0], 1, shape[1], 8)] * 3, facts, 1.0)
            ((limit, same),) = told
            max_seqlen = batch.cu_seqlens.diff().max().item()
            assert limit == same and max_seqlen <= limit <= shape[1]
            assert limit in (128, 256, 512, shape[1])
            assert limit < 2 * max(max_seqlen, 64) or limit == 128
            if packed and most == 40:
                assert limit == 256 < shape[1] == 1024


def test_the_bench_makes_the_models_call(monkeypatch):
    """The kernel is told the same of a micro-batch as in a model, padded boundaries and all."""
    import attention_kernels as bench

    told = []

    def kernel(*given, **named):
        told.append((given[3].tolist(), *given[5:]))
        return plain_varlen_attn(*given, **named)

    monkeypatch.setattr(bench, "make_varlen", lambda: attention.make_varlen(kernel))
    row = bench.PackedRow(512, 2, 16, 100, "cpu")
    call, _, heads_first = bench.varlen(row)
    wanted = bench.dense(row)[0]()
    assert not heads_first and torch.allclose(call().transpose(0, 1)[None], wanted, atol=1e-5)
    assert told == [([0, 100, 200, 300, 400, 500, 512, 512], 128, 128)]


@torch.library.custom_op("shardbook_tests::varlen", mutates_args=())
def opaque_varlen(query: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    LONGEST.append(max_seqlen)
    return query.clone()


opaque_varlen.register_fake(lambda query, cu_seqlens, max_seqlen: torch.empty_like(query))
LONGEST: list[int] = []


def test_compiled_blocks_meet_two_graphs_whatever_the_longest_document(monkeypatch):
    """An operator that takes the number as torch's own does: a graph for the first, one for all others."""

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, enable_gqa=False, **_):
        return opaque_varlen(q, cu_q, max_q)

    monkeypatch.setitem(
        KERNELS, "varlen", dataclasses.replace(KERNELS["varlen"], make=lambda: attention.make_varlen(kernel))
    )
    model = build_model(config(num_hidden_layers=2), "fp32", attention=KERNELS["varlen"])
    materialize(model, torch.device("cpu"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.blocks:
        block.compile(backend="eager")
    batch = many_documents(random.Random(0), rows=1, length=1000)
    LONGEST.clear()
    with torch.no_grad():
        for max_seqlen in (256, 128, 512, 1024, 128, 256):
            model(dataclasses.replace(batch, max_seqlen=max_seqlen))
    assert LONGEST[::2] == LONGEST[1::2] == [256, 128, 512, 1024, 128, 256]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("row_length", [None, 1000, 4032])
def test_rows_are_padded_to_128_on_a_gpu(row_length):
    """At an odd multiple of 64 cuDNN's backward gave NaN for a dense mask (pytorch #196678)."""
    batch = build_micro_batch(rows(), [(0,), (1,)], Batching(row_length, 2, 0, 1, multiple=ROUND_TO["cuda"]))
    assert batch.input_ids.shape[1] % 128 == 0
    # the bug that this must see: the CPU's multiple
    bug = build_micro_batch(rows(), [(0,), (1,)], Batching(row_length, 2, 0, 1, multiple=ROUND_TO["cpu"]))
    assert bug.input_ids.shape[1] % 128 == (0 if row_length == 1000 else 64)
    assert batch.cu_seqlens.tolist()[-1] == batch.input_ids.numel()


class Sizes(TorchDispatchMode):
    """The operators that ran, and the largest tensor that one of them made."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        self.names.append(str(op))
        made = [
            value for value in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(value, torch.Tensor)
        ]
        self.largest = max([self.largest, *(value.numel() for value in made)])
        return out


def run_without_memory(kernel, length, documents=64):
    """Forward and backward of one block and the loss in bf16, on tensors with shapes and no memory. (Not as CUDA's:
    a torch built without it aborts in their backward.)"""
    from torch._subclasses.fake_tensor import FakeTensorMode

    made = config(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, head_dim=16)
    model = build_model(made, "bf16", attention=KERNELS[kernel])
    with FakeTensorMode(allow_non_fake_inputs=True), Sizes() as seen:
        model.to_empty(device="cpu")
        model.tie()
        row = torch.zeros(1, length, dtype=torch.int64)
        few = torch.zeros(8, dtype=torch.int64)
        cu_seqlens = torch.zeros(documents + 1, dtype=torch.int32)
        model(Batch(row, row, cu_seqlens, few, few, True, length)).sum().backward()
    return seen


def test_no_dense_mask_where_a_kernel_exists():
    """The real kernel's own operator, forward and backward, and nothing of the size of a row squared."""
    for length in (4096, 131_072):
        seen = run_without_memory("varlen", length)
        assert [name for name in seen.names if "varlen" in name] == [
            "torch_attn._varlen_attn.default",
            "torch_attn._varlen_attn_backward.default",
        ]
        assert seen.largest == length * 96  # the MLP's
    assert run_without_memory("sdpa", 4096).largest >= 4096**2


def test_the_block_mask_is_small():
    """A row of 131,072 tokens: 1,024 blocks squared, not tokens squared."""
    with Sizes() as seen:
        cu_seqlens = torch.arange(0, 131_073, 1024, dtype=torch.int32)
        mask = masks.attention_mask("flex", cu_seqlens, torch.Size([1, 131_072]), True, torch.bfloat16, 1024)
    assert seen.largest <= 1025**2
    assert int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()) == 128 * (8 * 9 // 2)


# ---- the choice


def place(monkeypatch, capability=(9, 0), triton=True):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    real = attention.importlib.util.find_spec
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: triton if name == "triton" else real(name))


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "capability", "triton", "wanted"),
    [
        (GPU, torch.bfloat16, 128, (9, 0), True, "varlen"),
        (GPU, torch.bfloat16, 64, (8, 0), True, "varlen"),
        (GPU, torch.bfloat16, 20, (9, 0), True, "flex"),  # heads that FlashAttention does not take
        (GPU, torch.float32, 64, (9, 0), True, "flex"),
        (GPU, torch.float32, 8, (9, 0), True, "sdpa"),
        (GPU, torch.float32, 64, (9, 0), None, "sdpa"),
        (GPU, torch.float32, 128, (7, 5), True, "sdpa"),
        (CPU, torch.float32, 64, (9, 0), True, "sdpa"),
    ],
)
def test_auto_takes_the_first_that_can_run(monkeypatch, device, dtype, head_dim, capability, triton, wanted):
    place(monkeypatch, capability, triton)
    assert choose_attention("auto", config(head_dim=head_dim), device, dtype).name == wanted


@pytest.mark.parametrize(
    ("asked", "device", "dtype", "head_dim", "message"),
    [
        (
            "varlen",
            CPU,
            torch.float32,
            64,
            "'varlen': needs a CUDA device of compute capability 8.0 or later, and this ",
        ),
        ("varlen", GPU, torch.float32, 64, "needs precision.params=bf16, and this is float32 with heads of 64 on cuda"),
        ("varlen", GPU, torch.bfloat16, 20, "needs heads of a multiple of 8, at most 256, .* set .* auto, or to flex"),
        (
            "flex",
            CPU,
            torch.float32,
            64,
            "'flex': needs a CUDA device .* set model.attention to auto, or to sdpa or eager",
        ),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_by_name(monkeypatch, asked, device, dtype, head_dim, message):
    place(monkeypatch)
    with pytest.raises(RecipeError, match=message):
        choose_attention(asked, config(head_dim=head_dim), device, dtype)


def test_a_gpu_without_bf16_is_refused(monkeypatch):
    place(monkeypatch, capability=(7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    with pytest.raises(
        RecipeError, match=r"precision.params = 'bf16': Tesla T4 computes no bf16; set precision.params=f"
    ):
        choose_attention("auto", config(), GPU, torch.bfloat16)


def test_one_graph_a_block_over_micro_batches(folder, plain_varlen):
    """Blocks compiled once and never again, though documents differ in every micro-batch."""
    model = build_model(config(), "fp32", attention=KERNELS["sdpa"])
    materialize(model, CPU)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    graphs, dice = [], random.Random(1)

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend=count)
    for _ in range(4):
        gradients(model, many_documents(dice, rows=1, length=256, most=12))
    assert len(graphs) == 1, f"{len(graphs)} graphs for {len(model.blocks)} blocks alike"


def test_selective_keeps_the_outputs_of_both_kernels():
    import torch.nn.attention.flex_attention
    import torch.nn.attention.varlen

    assert {str(torch.ops.torch_attn._varlen_attn.default), str(torch.ops.higher_order.flex_attention)} <= SAVED_OPS
