"""A dense model upcycled to experts computes what it did; and what is counted of experts."""

import pytest
import torch
from families import released_config, small_config
from tiny import write_model
from transformers import AutoModelForCausalLM

from shardbook.model import embedded
from shardbook.model.causal_lm import build_model
from shardbook.model.flops import count_flops
from shardbook.model.shapes import shape_config
from shardbook.recipe import Model


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(torch.arange(3, 60)[None]).logits, model


def test_a_dense_model_and_its_copy_with_experts_say_the_same(tmp_path, monkeypatch):
    write_model(tmp_path / "dense", num_hidden_layers=2)
    embedded.upcycle(tmp_path / "dense", tmp_path / "moe")
    wanted, dense = logits(tmp_path / "dense")
    found, moe = logits(tmp_path / "moe")
    assert (found - wanted).norm() < 1e-6 * wanted.norm()
    experts, routers = 7 * 3 * 32 * 48, 8 * 32
    assert moe.num_parameters() == dense.num_parameters() + 2 * (experts + routers)
    chosen = moe.model(torch.arange(3, 60)[None], output_router_logits=True).router_logits
    assert all(len(each.topk(2).indices.unique()) > 4 for each in chosen), "a router sends all tokens to the same"
    real = embedded._expert_names  # planted: gate and up in each other's place
    swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj", "down_proj": "down_proj"}
    monkeypatch.setattr(
        embedded,
        "_expert_names",
        lambda name: real(
            name if ".mlp." not in name else ".".join(swapped.get(word, word) for word in name.split("."))
        ),
    )
    embedded.upcycle(tmp_path / "dense", tmp_path / "bad")
    assert (logits(tmp_path / "bad")[0] - wanted).norm() > 1e-3 * wanted.norm()


# By hand, of the published sizes: all parameters, and those that a token meets but for the embedding's rows.
COUNTED = {
    "smollm2-moe": (
        28_311_552 + 30 * (884_736 + 8 * 2_654_208 + 8 * 576 + 2 * 576) + 576,
        28_311_552 + 30 * (884_736 + 2 * 2_654_208 + 8 * 576),
    ),
}


def test_flops_of_stacks_are_those_that_a_token_meets():
    """By hand: DBRX's experts are rows of one matrix in its own code (36B of 132B are active), Recurrent
    Gemma stacks gates and has no router, and Inkling's shared experts serve every token."""
    dbrx = released_config("dbrx")
    dbrx.ffn_config.ffn_hidden_size, dbrx.vocab_size, hidden = 10752, 100352, 6144
    block = hidden * (hidden + 2 * 8 * 128) + hidden**2 + 16 * hidden + 4 * 3 * 10752 * hidden
    assert count_flops(build_model(dbrx, "fp32")).per_token == 6 * (40 * block + 100352 * hidden)
    for family in ("recurrent_gemma", "inkling_text"):
        model = build_model(small_config(family), "fp32")
        named = [pair for block in model.blocks for pair in block.named_parameters()]
        blocks = [(name, p.numel()) for name, p in named if p.ndim == 2 and not name.endswith("bias")]
        met = sum(count // (2 if ".experts." in f".{name}" else 1) for name, count in blocks)
        assert count_flops(model).block == met


@pytest.mark.parametrize("name", COUNTED)
def test_flops_are_those_of_the_experts_that_a_token_reaches(name):
    model = build_model(shape_config(Model(path=name), 1024), "fp32")
    whole, active = COUNTED[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == whole
    assert count_flops(model).per_token == 6 * active
