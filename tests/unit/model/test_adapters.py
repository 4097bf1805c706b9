"""Which linear maps of any family get adapters."""

import pytest
from families import small_config
from tiny import said_by

from shardbook.model import adapters
from shardbook.model.causal_lm import build_model
from shardbook.recipe import Lora

LORA = Lora(r=2, lora_alpha=4)


@pytest.mark.parametrize(("family", "count"), [("bloom", 8), ("falcon", 16), ("phimoe", 16), ("llama4_text", 28)])
def test_linear_maps_are_found_where_blocks_and_linears_have_other_names(family, count):
    """A linear of the family's own counts where it computes what a linear does; a router that returns more does not."""
    model = build_model(small_config(family), "fp32")
    assert len(adapters.find_targets(model, LORA)) == count


def test_blocks_without_a_linear_map_are_refused():
    said = said_by(adapters.find_targets, build_model(small_config("gpt2"), "fp32"), LORA)
    assert said == "lora.r = 2: the blocks of family 'gpt2' have no linear maps; set lora.r=0"
    assert list(adapters._outer_modules(build_model(small_config("phi"), "fp32"))) == [
        "embed_tokens",
        "lm_head",
        "final_layernorm",
    ]
