"""The model computes what transformers computes, packed or not, whole or in chunks."""

import dataclasses

import pytest
import torch
from model_numbers import FAMILIES, assert_close, gradients, load, micro, rows
from tiny import config, write_model
from transformers import AutoModelForCausalLM

from shardbook.data.loader import Batching, build_micro_batch
from shardbook.model.attention import KERNELS
from shardbook.model.causal_lm import build_model, materialize
from shardbook.model.flops import count_flops


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_are_those_of_transformers(tmp_path, family, tied):
    write_model(tmp_path, family, tied)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    total = torch.zeros(())
    for row in rows():
        labels = torch.where(torch.tensor(row["mask"]), torch.tensor(row["input_ids"]), -100)
        logits = theirs(input_ids=torch.tensor(row["input_ids"])[None]).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
    total.backward()
    expected = total, {name: p.grad for name, p in theirs.named_parameters()}
    assert_close(gradients(load(tmp_path), micro(packed=False)), expected)
    assert_close(gradients(load(tmp_path), micro(packed=True)), expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_packing_computes_the_same(folder):
    assert_close(gradients(load(folder), micro(packed=True)), gradients(load(folder), micro(packed=False)))


def test_packing_without_its_mask_would_not(folder):
    """The bug that the two tests above must see: attention that crosses documents."""
    batch = micro(packed=True)
    rows_alone = torch.tensor([0, 64, 128], dtype=torch.int32)
    crossing = dataclasses.replace(batch, cu_seqlens=rows_alone)
    with pytest.raises(AssertionError):
        assert_close(gradients(load(folder), crossing), gradients(load(folder), micro(packed=False)))


def test_eager_attention_computes_the_same(folder):
    for packed in (True, False):
        eager = gradients(load(folder, attention="eager"), micro(packed))
        assert_close(eager, gradients(load(folder), micro(packed)))


def test_the_loss_in_chunks_is_the_same(folder):
    whole, chunks = gradients(load(folder), micro(True)), gradients(load(folder, chunk=7), micro(True))
    assert_close(chunks, whole)


def test_no_rows_give_no_loss_and_zero_gradients(folder):
    empty = build_micro_batch([], [], Batching(64, 1, 0, 1))
    loss, found = gradients(load(folder), empty)
    assert loss.item() == 0 and all(not gradient.any() for gradient in found.values())


def test_flops_of_a_token():
    """Against torch's own counter, which counts whole scores: so without the half that the mask saves."""
    from torch.utils.flop_counter import FlopCounterMode

    model = build_model(config("llama"), "fp32", attention=KERNELS["eager"])
    materialize(model, torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    length = 64
    every = [{"input_ids": list(range(length)), "mask": [True] * length}, {"input_ids": [1], "mask": [True]}]
    batch = build_micro_batch(every, [(0,)], Batching(None, 1, 0, 1))
    with FlopCounterMode(display=False) as counter:
        gradients(model, batch)
    masked = 6 * 3 * 4 * 8 * length**2  # the half that is counted nowhere: 6 * layers * heads * head_dim * length ** 2
    head = 6 * 32 * 259  # of the last position, which has no target
    expected = count_flops(model).of(length, length**2) + masked - head
    # transformers 5.17 and 5.18 make the rotary angles by a product, [head_dim / 2, 1] x [1, length]
    with FlopCounterMode(display=False) as rotary:
        model.model.rotary_emb(torch.zeros(1, length, 32), position_ids=batch.position_ids)
    assert rotary.get_total_flops() in (0, 2 * 8 // 2 * length)
    assert counter.get_total_flops() - rotary.get_total_flops() == expected
