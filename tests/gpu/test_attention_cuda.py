"""Attention's kernels on CUDA: the numbers of documents run apart, shapes that never change, memory linear in a row."""

import random
from itertools import pairwise

import pytest
import torch
from documents import many_documents
from test_cuda import TOLERANCE_BF16, cuda, exact  # noqa: F401  (fixtures)
from tiny import config
from torch._inductor.compile_fx import compile_fx
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function
from world import losses, run_train

from shardbook.model import attention, masks
from shardbook.model.attention import KERNELS, choose_attention
from shardbook.model.causal_lm import build_model, materialize

DEVICE = torch.device("cuda", 0)
HEADS, KEY_HEADS, SIZE = 8, 2, 64
# bf16 keeps 8 bits: queries, keys, values and results are rounded to 2**-8 of their size, probabilities too
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
# tokens of a document that a token sees, beside all before it: those of a window, those of its chunk
SEEN = {"causal": None, "window": 48, "chunk": 64}


def rule_of(name):
    """What transformers' own masks say of it."""
    if name == "window":
        return sliding_window_causal_mask_function(SEEN[name])
    return chunked_causal_mask_function(SEEN[name], torch.zeros(2, dtype=torch.int32, device=DEVICE))


def by_kernel(name, batch, tensors, rule="causal"):
    """Result and gradients of the real kernel, by transformers' interface; rows [B, heads, L, size]."""
    made = config(num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, head_dim=SIZE)
    attention.use_attention(made, KERNELS[name])
    facts = batch.cu_seqlens.to(DEVICE), batch.input_ids.shape, True, tensors[0].dtype, batch.max_seqlen
    seen = (rule_of(rule), SEEN[rule]) if SEEN[rule] else ()
    told = masks.attention_mask(name, *facts, *seen)
    function = attention.ALL_ATTENTION_FUNCTIONS[made._attn_implementation]
    given = [tensor.detach().requires_grad_() for tensor in tensors]
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = HEADS // KEY_HEADS, True
    out, _ = function(module, *given, told, scaling=SIZE**-0.5, dropout=0.0)
    return [out, *torch.autograd.grad(out.square().sum(), given)]


def sees(rule, tokens):
    """Which tokens of a document of `tokens` a token attends to: [tokens, tokens]."""
    places = torch.arange(tokens)
    earlier, size = places[:, None] - places[None, :], SEEN[rule] or tokens
    near = earlier < size if rule != "chunk" else places[:, None] // size == places[None, :] // size
    return (earlier >= 0) & near


def apart(batch, tensors, rule="causal"):
    """The same in fp64 on the CPU, each document by itself."""
    given = [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]
    rows, length = batch.input_ids.shape
    out = torch.zeros(rows, length, HEADS, SIZE, dtype=torch.float64)
    ends = batch.cu_seqlens.tolist()
    for start, end in pairwise(ends):
        if end > start:
            row, here = start // length, slice(start % length, start % length + end - start)
            q, k, v = (tensor[row : row + 1, :, here] for tensor in given)
            seen = sees(rule, end - start)
            found = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
            out = out.index_put((torch.tensor(row), torch.arange(here.start, here.stop)), found[0].transpose(0, 1))
    return [out, *torch.autograd.grad(out.square().sum(), given)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("varlen", torch.bfloat16),
        ("flex", torch.bfloat16),
        ("flex", torch.float32),
        ("sdpa", torch.bfloat16),
        ("sdpa", torch.float32),
    ],
)
@pytest.mark.parametrize("length", [1000, 4032])  # padded to 1,024 and 4,096: at 4,032 cuDNN's gradients were NaN
def test_a_kernel_computes_what_documents_apart_do(name, dtype, length):
    compare(name, dtype, length, "causal")


@pytest.mark.parametrize("rule", ["window", "chunk"])
@pytest.mark.parametrize("name", ["varlen", "flex", "sdpa"])
def test_windows_and_chunks_are_those_of_documents_apart(name, rule):
    compare(name, torch.bfloat16, 1000, rule)


def compare(name, dtype, length, rule):
    batch = many_documents(random.Random(length), rows=2, length=length)
    torch.manual_seed(0)
    rows, padded = batch.input_ids.shape
    shapes = [(rows, heads, padded, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    tensors = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    wanted, found = apart(batch, tensors, rule), by_kernel(name, batch, tensors, rule)
    for what, got, want in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        error = ((got.detach().cpu().double() - want).norm() / want.norm()).item()
        assert error < TOLERANCE[dtype], f"{what}: {error:.1e}"


def test_auto_is_varlen_in_bf16_and_flex_in_fp32():
    made = config(head_dim=64)
    assert choose_attention("auto", made, DEVICE, torch.bfloat16).name == "varlen"
    assert choose_attention("auto", made, DEVICE, torch.float32).name == "flex"


@pytest.mark.parametrize("kernel", ["varlen", "flex"])
def test_one_graph_for_all_packed_micro_batches(kernel):
    made = config(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    model = build_model(made, "bf16", attention=KERNELS[kernel])
    materialize(model, DEVICE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    graphs, dice = [], random.Random(0)

    def count(graph, inputs):
        graphs.append(graph)
        return compile_fx(graph, inputs)

    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend=count)
    for _ in range(4):
        micro = many_documents(dice, rows=1, length=1024).to(DEVICE)
        model(micro).sum().backward()
    assert len(graphs) == 1


def test_a_long_row_takes_memory_in_proportion():
    """Twice the row, twice the memory: a dense mask of 32,768 tokens alone would be 3 GB."""
    peaks = []
    for length in (16_384, 32_768):
        batch = many_documents(random.Random(0), rows=1, length=length, most=400)
        tensors = [
            torch.randn(1, heads, length, SIZE, device=DEVICE, dtype=torch.bfloat16)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        ]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        by_kernel("varlen", batch, tensors)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 2.2 * peaks[0] < 10**9, peaks


@pytest.mark.parametrize("kernel", ["varlen", "sdpa"])
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_training_stays_near_the_cpu(recipe, exact, kernel, checkpointing):  # noqa: F811
    """Packed rows through the whole of train() (the tiny model's heads of 8 are too small for flex)."""
    words = (f"model.attention={kernel}", f"activation.checkpointing={checkpointing}", "train.compile=true")
    run = run_train(1, recipe, f"{kernel}-{checkpointing}", *words)
    assert losses(run) == pytest.approx(losses(exact), rel=TOLERANCE_BF16)
