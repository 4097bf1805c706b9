"""Families: a config that cannot be trained is refused in words, and dropout that is disabled drops nothing."""

import pytest
from tiny import config
from torch import nn

from shardbook.model.causal_lm import build_model
from shardbook.model.families import load_config, shares_of_noise
from shardbook.recipe import Model, RecipeError


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("t5", {}, "transformers has no causal LM of the family 't5'"),
        ("gpt2", {}, "resid_pdrop = 0.1; only 0 is supported: set model.disable_dropout=true to train without it"),
        ("mpt", {"attn_config": {"attn_pdrop": 1}}, "attn_pdrop = 1; only 0 is supported"),
        ("phimoe", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1; only 0 is supported"),
        ("qwen3_vl", {}, "transformers has no causal LM of the family 'qwen3_vl'"),
        ("llama", {"max_position_embeddings": 32}, "data.max_length = 64: .* sees at most 32 tokens"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, r"holds quantised weights \(fp8\)"),
        (
            "gpt_oss",  # as its files on the hub are
            {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
            r"holds quantised weights \(mxfp4\).*; set model.path to a copy in bf16$",
        ),
    ],
)
def test_models_that_cannot_be_trained(tmp_path, family, changes, message):
    made = config(**changes) if family == "llama" else config(family, **changes)
    made.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=message):
        load_config(Model(path=str(tmp_path)), tmp_path, 64)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("gpt2", {}), ("phimoe", {"router_jitter_noise": 0.1}), ("mpt", {"attn_config": {"attn_pdrop": 1}})],
)
def test_dropout_that_is_disabled_drops_nothing(tmp_path, family, changes):
    config(family, **changes).save_pretrained(tmp_path)
    quiet = load_config(Model(path=str(tmp_path), disable_dropout=True), tmp_path, 64)
    assert shares_of_noise(quiet) == []
    model = build_model(quiet, "fp32")
    assert not [name for name, each in model.named_modules() if isinstance(each, nn.Dropout) and each.p]


def test_a_directory_without_a_config(tmp_path):
    with pytest.raises(RecipeError, match=r"no usable config.json"):
        load_config(Model(path=str(tmp_path)), tmp_path, 64)
