"""The width of the rows that experts take, as their stacks say."""

import pytest
from families import small_config

from shardbook.model.causal_lm import build_model
from shardbook.model.experts import expert_width


@pytest.mark.parametrize(
    ("family", "facts", "width"),
    [
        ("qwen3_moe", {"hidden_size": 48}, 48),
        ("gpt_oss", {"hidden_size": 48}, 48),  # matrices the other way round
        ("nemotron_h", {"hidden_size": 48, "moe_latent_size": 20}, 20),
        ("nemotron_h", {"hidden_size": 48}, 48),  # up alone, no gate
        ("dbrx", {}, 0),  # not behind transformers' interface
        ("llama", {}, 0),
    ],
)
def test_rows_are_as_wide_as_a_matrix_of_a_stack(family, facts, width):
    config = small_config(family)
    for name, value in facts.items():
        setattr(config, name, value)
    assert expert_width(build_model(config, "fp32")) == width
