"""The peak's formulas: what a block keeps, counted; what to change when it does not fit; the recipes' predictions."""

from inspect import signature

import pytest
import torch
from headers import predict_mfu
from live import allocated
from plans import lay_out, settings, shape
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from shardbook.memory.activation import apply_checkpointing
from shardbook.model.attention import KERNELS
from shardbook.model.causal_lm import build_model
from shardbook.model.flops import count_flops
from shardbook.model.loss_head import LossHead
from shardbook.parallel.layout import build_layout
from shardbook.plan.activation_bytes import loss_bytes
from shardbook.plan.measure_blocks import measure_blocks
from shardbook.plan.peak import predict_peak
from shardbook.plan.smallest_change import _changes, smallest_change
from shardbook.recipe import Activation, Parallel, Precision, Train

ROWS, LENGTH = 2, 128
# torch 2.11's varlen kernel takes as many heads of keys as of queries, so they are repeated as for a dense mask
KERNEL_SHARES = "enable_gqa" in signature(varlen_attn).parameters
RANDOM_STATE = 16  # two numbers of varlen's kernel, whatever the tokens
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "vocab": 128_256,
    "tied": False,
}


def saved_by_a_block(made, checkpointing):
    """Bytes for each token that autograd, and torch's selective checkpoint, hold of a bf16 block after its forward."""
    model = build_model(made, "bf16", attention=KERNELS["varlen"])
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()  # held: its address is not used again
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        apply_checkpointing(model.blocks, Activation(checkpointing=checkpointing))
        hidden = torch.empty(ROWS, LENGTH, made.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        places = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        rotary = model.model.rotary_emb(hidden, position_ids=places)
        told = torch.zeros(9, dtype=torch.int32), LENGTH
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.blocks[0](hidden, attention_mask=told, position_embeddings=rotary, position_ids=places)
    apart = [*model.parameters(), *rotary, told[0]]  # of the model, or of all blocks together
    for tensor in apart:
        kept.pop(tensor.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values() if storage.nbytes() != RANDOM_STATE) / (ROWS * LENGTH)


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "olmo2", "smollm3", "granite", "phi3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["none", "full", "selective"])
def test_what_a_block_keeps_is_measured(family, kind):
    """As autograd's own hooks see it, with a number for each token and nothing else but the kernel's random state."""
    made = shape(family)
    measured = measure_blocks(made, settings(), kind, "bf16").blocks[0].kept
    assert measured.fixed == RANDOM_STATE * (kind != "full") and measured.pair == 0
    if kind != "selective":  # torch's selective checkpoint holds what no hook sees
        assert saved_by_a_block(made, kind) == measured.token


def test_what_selective_keeps_of_an_8b_block():
    """47,104 values for each token: q, k, v, attention's result, o, gate, up, down; the block's input; 32 fp32."""
    made = shape(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    measured = measure_blocks(made, settings(), "selective", "bf16").blocks[0].kept
    assert measured.token == 2 * (47_104 + 4096) + 32 * 4


def test_the_smallest_change_that_fits():
    recipe = settings(parallel={"stage": "zero2"})
    layout, made = lay_out(recipe)
    whole = predict_peak(layout, made, recipe)
    assert whole.total == sum(
        (whole.params, whole.grads, whole.optimizer, whole.gathered, whole.buffers, whole.activations, whole.working)
    )
    found = [smallest_change(layout, made, recipe, share * whole.total) for share in (0.9, 0.3, 0.001)]
    assert found[0] == "train.per_device_train_batch_size=4 train.gradient_accumulation_steps=2"
    assert found[1] == "train.per_device_train_batch_size=2 train.gradient_accumulation_steps=4"
    assert found[2] == ""
    one = settings(parallel={"stage": "zero2"}, train={"steps": 1})
    layout, made = lay_out(one)
    total = predict_peak(layout, made, one).total
    assert smallest_change(layout, made, one, 0.9 * total) == "activation.checkpointing=selective"
    light = settings(parallel={"stage": "zero2"}, train={"steps": 1}, activation={"checkpointing": "full"})
    light = light.model_copy(update={"data": light.data.model_copy(update={"max_length": 2})})
    total = predict_peak(layout, made, light).total
    assert smallest_change(layout, made, light, total - 1) == "parallel.stage=zero3"
    assert smallest_change(layout, made, light, 0.6 * total) == "16 ranks"  # 8 leave 0.61


def test_a_change_of_stage_leaves_what_layers_and_matrices_are_shared_by():
    """Two ranks of four have the same layers: zero3 has two shards, not four."""
    recipe = settings(
        parallel={"stage": "zero2", "pp_size": 2}, train={"steps": 1}, activation={"checkpointing": "full"}
    )
    layout, _ = lay_out(recipe)
    changed = {words: other for words, other, _ in _changes(layout, recipe, has_more=True)}
    assert changed["parallel.stage=zero3"].sizes == {"pp": 2, "dp_replicate": 1, "dp_shard": 2}
    assert changed["8 ranks"].sizes == {"pp": 2, "dp_replicate": 1, "dp_shard": 4}


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero2", "zero3"])
def test_stages_fall_in_the_peak(stage):
    order = ["ddp", "zero1", "zero2", "zero3"]
    peaks = []
    for name in order:
        recipe = settings(parallel={"stage": name}, train={"steps": 1, "gradient_accumulation_steps": 3})
        layout, made = lay_out(recipe)
        peaks.append(predict_peak(layout, made, recipe).total)
    assert sorted(peaks, reverse=True) == peaks


def test_a_dense_mask_shows_in_the_peak():
    recipe = settings()
    layout, made = lay_out(recipe)
    kernel = predict_peak(layout, made, recipe)
    made._attn_implementation = "sdpa"
    dense = predict_peak(layout, made, recipe)
    # of 8 blocks: keys and values, repeated for each head of queries
    by_token = 8 * (8 * 2048 * 2 * (64 - 32) * 2) * KERNEL_SHARES
    # bf16 in each; the bool that it was made from is gone with the forward
    assert dense.activations - kernel.activations == 8 * 2048**2 * 8 * 2 + by_token - 8 * RANDOM_STATE
    full = recipe.model_copy(update={"activation": Activation(checkpointing="full")})
    seen = predict_peak(layout, made, full)
    made._attn_implementation = "varlen"
    # bool alone is held, for the blocks that are run again; what one has in the dtype of compute is its work
    assert seen.activations - predict_peak(layout, made, full).activations == 8 * 2048**2
    assert seen.working - predict_peak(layout, made, full).working >= 8 * 2048**2 * 2 - RANDOM_STATE


def test_rows_of_131072_tokens_fit_where_a_dense_mask_would_not():
    """An 8B on 8 ranks of 141 GB, everything recomputed: with a kernel it fits, with a dense mask it does not."""
    made = shape(**LLAMA_8B)
    model = build_model(made, "fp32", attention=KERNELS["varlen"])
    recipe = settings(
        data={"max_length": 131_072}, train={"steps": 1}, activation={"checkpointing": "full"}, parallel={}
    )
    layout = build_layout(Parallel(), Precision(params="bf16"), model, model.parts, model.blocks, 8, 8)
    peak = predict_peak(layout, made, recipe)
    assert peak.total < 0.92 * 141e9, str(peak)
    made._attn_implementation = "sdpa"
    dense = predict_peak(layout, made, recipe).total
    repeated = 2 * (4096 - 1024) * 2 * KERNEL_SHARES  # keys and values, for each head of queries
    assert dense - peak.total == 131_072**2 * 3 + 131_072 * repeated - RANDOM_STATE and dense > 0.92 * 141e9


def test_mfu_by_arithmetic():
    """Recomputing everything costs a fifth to a quarter; the estimate scales with nothing that it should not."""
    recipe = settings(train={"steps": 1}, data={"max_length": 8192})
    made = shape(**LLAMA_8B)
    model = build_model(made, "fp32", attention=KERNELS["varlen"])
    layout = build_layout(Parallel(), Precision(params="bf16"), model, model.parts, model.blocks, 8, 8)
    flops = count_flops(model)
    plain = predict_mfu(layout, made, recipe, flops, 1200)
    full = recipe.model_copy(update={"activation": Activation(checkpointing="full")})
    assert 0.45 < plain < 0.55
    assert 0.75 < predict_mfu(layout, made, full, flops, 1200) / plain < 0.82


def test_the_loss_needs_no_more_than_it_says():
    """By the CPU allocator, forward and backward in chunks: the gradients, and one chunk's logits above them."""
    tokens, chunk, vocabulary, width = 96, 16, 1000, 24
    for dtype in (torch.float32, torch.bfloat16):
        head = LossHead(width, vocabulary, bias=False).to(dtype)
        head.chunk_tokens = chunk
        hidden = torch.randn(tokens, width, dtype=dtype).requires_grad_()
        targets = torch.zeros(tokens, dtype=torch.int64)
        # of hidden states the gradient alone: they lie there before
        predicted = sum(loss_bytes(tokens, chunk, vocabulary, width, dtype.itemsize)) - tokens * width * dtype.itemsize
        most, _ = allocated(lambda head=head, hidden=hidden, targets=targets: head(hidden, targets, True).backward())
        scratch = (vocabulary * width * 4) * (dtype is torch.bfloat16)  # a CPU's products in bf16 are made in fp32
        assert 0.9 * predicted < most <= predicted + scratch + 1024


def test_logits_of_a_long_batch_take_a_gibibyte_at_most():
    """8 rows of 8,192 tokens and a vocabulary of 128,256, in the chunks that recipes have."""
    chunk = Train(steps=1).loss_chunk_tokens
    assert loss_bytes(8 * 8192, chunk, 128_256, 4096, 2)[0] <= 2**30
    assert loss_bytes(8 * 8192, 8 * 8192, 128_256, 4096, 2)[0] > 60 * 2**30  # without chunks
