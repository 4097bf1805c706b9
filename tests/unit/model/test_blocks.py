"""Transformers' own base model runs the blocks; what is ours around each of them is called once, in order."""

import itertools

import pytest
import torch
from model_numbers import assert_close, gradients, load, micro
from tiny import config, write_model

from shardbook.model import attention, blocks
from shardbook.model.attention import KERNELS
from shardbook.model.blocks import at, copy_view, keep_blocks, put
from shardbook.model.causal_lm import build_model
from shardbook.model.masks import attention_mask, number_documents, rule_on_positions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=5)


def halves(folder):
    """Loss and gradients of two chunks of layers on one rank, as an interleaved pipeline has them on several."""
    whole, batch = load(folder), micro(True)
    first, second = copy_view(whole), copy_view(whole)
    keep_blocks(first, range(2), True, False)
    keep_blocks(second, range(2, 5), False, True)
    hidden = first(batch)
    sent = hidden.detach().requires_grad_()
    loss = second(batch, summed=True, hidden=sent)
    loss.backward()
    hidden.backward(sent.grad)
    return loss, {name: p.grad for name, p in whole.named_parameters()}


def test_two_chunks_have_the_bits_of_the_whole(tmp_path):
    """granite scales its embeddings: what stands for them in the second chunk must not count."""
    for family in ("llama", "granite"):
        write_model(tmp_path / family, family, tied=False, num_hidden_layers=5)
        wanted, found = gradients(load(tmp_path / family), micro(True)), halves(tmp_path / family)
        assert torch.equal(found[0], wanted[0])
        assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted[1].items())


def test_a_chunk_that_takes_what_the_forward_has_is_seen(tmp_path, monkeypatch):
    """Planted: the first block of a stage gets the base model's scaled input, not what was received."""
    write_model(tmp_path, "granite", tied=False, num_hidden_layers=5)
    wanted = gradients(load(tmp_path), micro(True))
    monkeypatch.setattr(blocks.Absent, "forward", lambda absent, hidden, *_, **__: hidden)
    with pytest.raises(AssertionError):
        assert_close(halves(tmp_path), wanted)


def test_a_block_that_is_not_here_keeps_what_a_forward_may_ask_of_it():
    model = build_model(config("qwen3", num_hidden_layers=4), "fp32")
    asked = {
        name: getattr(model.blocks[0], name) for name in ("hidden_size", "layer_type") if hasattr(model.blocks[0], name)
    }
    keep_blocks(model, range(2, 4), False, True)
    listed = list(at(model.base, model.names.blocks))
    assert [block is None for block in model.all_blocks] == [True, True, False, False]
    assert asked and all(getattr(listed[0], name) == value for name, value in asked.items())
    assert listed[2:] == model.blocks and not list(listed[0].parameters())
    with pytest.raises(AttributeError, match="'Absent' object has no attribute 'self_attn'"):
        _ = listed[0].self_attn


def test_a_part_is_found_and_replaced_by_its_dotted_name():
    model = build_model(config(), "fp32")
    assert at(model.base, "layers")[1] is model.blocks[1] and model.embedding is model.model.embed_tokens
    put(model.model, "norm", None)
    assert model.norm is None


WINDOW = 3


def window(row, head, query, key):
    return (key <= query) & (key > query - WINDOW)


def chunk(row, head, query, key):
    return (key <= query) & (key // WINDOW == query // WINDOW)


@pytest.mark.parametrize("rule", [window, chunk])
@pytest.mark.parametrize("packed", [True, False])
def test_a_familys_rule_is_asked_of_places_in_documents(rule, packed):
    batch = micro(packed)
    shape, facts = batch.input_ids.shape, (batch.cu_seqlens, batch.input_ids.shape, packed, torch.float32)
    found = attention_mask("sdpa", *facts, batch.max_seqlen, rule, WINDOW)
    wanted = torch.zeros(shape[0], 1, shape[1], shape[1], dtype=torch.bool)
    ends = [*batch.cu_seqlens.tolist(), shape.numel()]
    for start, end in itertools.pairwise(ends):
        row, first = divmod(start, shape[1])
        for query in range(end - start):
            for key in range(query + 1):
                wanted[row, 0, first + query, first + key] = bool(rule(row, 0, query, key))
    assert torch.equal(found, wanted)
    added = attention_mask("eager", *facts, batch.max_seqlen, rule, WINDOW)
    assert torch.equal(added == 0, wanted) and added.dtype == torch.float32
    # planted: places in rows, not in documents
    numbers = number_documents(batch.cu_seqlens, shape)
    alone = torch.tensor([row * shape[1] for row in range(shape[0] + 1)], dtype=torch.int32)
    of_rows = rule_on_positions(rule, alone, number_documents(alone, shape))
    assert torch.equal((of_rows & (numbers[:, :, None] == numbers[:, None, :]))[:, None], wanted) is (rule is window)


def test_a_window_that_hides_nothing_is_no_window():
    batch = micro(False)
    facts = batch.cu_seqlens, batch.input_ids.shape, False, torch.float32, batch.max_seqlen
    assert attention_mask("sdpa", *facts, window, batch.max_seqlen) is None
    assert attention_mask("sdpa", *facts, window, 2) is not None
    assert attention_mask("sdpa", *facts, may_skip=False) is not None


def test_attention_that_is_told_more_is_the_familys_own(monkeypatch):
    """Sinks, which sdpa would drop: the family's eager attention takes them, with a mask to be added."""
    seen = {}

    class Own(torch.nn.Module):
        pass

    def eager_attention_forward(module, query, key, value, mask, **named):
        seen.update(named, mask=mask)
        return query.transpose(1, 2), None

    monkeypatch.setitem(globals(), "eager_attention_forward", eager_attention_forward)
    query = torch.randn(1, 2, 5, 4)
    attend = attention.Attend(None, False)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    told = {"scaling": 1.0, "sliding_window": 3, "dropout": 0.0}
    attend(Own(), query, query, query, mask, **told, s_aux=None)
    assert not seen
    for given in (mask, None):
        attend(Own(), query, query, query, given, **told, s_aux=torch.zeros(2))
        assert seen["s_aux"].shape == (2,) and torch.equal(seen["mask"] == 0, mask)
    assert KERNELS["sdpa"].make is None
