"""Biases of routers: how far they move, which buffer of a family is one, and which families are refused."""

from fractions import Fraction

import pytest
import torch
from families import small_config
from tiny import config, said_by
from transformers import AutoModelForCausalLM

from shardbook.model.causal_lm import build_model
from shardbook.parallel.expert_load import count_experts
from shardbook.parallel.router_bias import RouterBiases, check_biases, find_biases


def moved(bias, counts, rate):
    module = torch.nn.Module()
    module.bias = torch.nn.Buffer(torch.tensor(bias))
    RouterBiases(rate, True, {0: (module, "bias")}).move({0: torch.tensor(counts)})
    return module.bias


@pytest.mark.parametrize(
    "counts",
    [
        [3, 3, 3, 3],
        [0, 4, 2, 2],  # two of them have the mean
        [5, 5, 0],  # a mean that is no whole number
        [0, 0, 0, 0],
        [2**40 + 1, 2**40, 2**40],  # the mean is a third above two of them: in floats it would be equal to all
    ],
)
def test_each_moves_by_the_rate_towards_the_mean(counts):
    """In fp32, as the sum of two numbers is rounded; one that has the mean stays."""
    before, mean = [0.1 * number - 0.07 for number in range(len(counts))], Fraction(sum(counts), len(counts))
    wanted = torch.tensor(before)
    for expert, count in enumerate(counts):
        wanted[expert] += torch.tensor(0.001 * ((count < mean) - (count > mean)))
    assert torch.equal(moved(before, counts, 0.001), wanted)


# every family of transformers that has one in a buffer; the last ones have it beside their router
FAMILIES = """axk1 axk2 bailing_hybrid beam deepseek_v32 deepseek_v4 dots1 dots3_note_text exaone_moe glm4_moe
glm4_moe_lite glm_moe_dsa hy_v4 inkling2_text inkling_text kimi_linear kolibri1 mimo_v2_flash minimax_m3_vl_text
nemotron_h solar_open hy_v3 minimax_m2"""
QUICK = ("deepseek_v3", "lfm2_moe")


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES.split())])
def test_what_is_found_decides_the_choice(family):
    """In transformers' own model: where the bias of an expert is far above the others each token chooses it, where it
    is far below none does. Each block that has experts has one, but for those that choose by a token's number."""
    torch.manual_seed(0)
    biases = find_biases(model := build_model(small_config(family), "fp32"))
    counted = [number for number, experts in enumerate(count_experts(model)) if experts]
    assert biases and sorted(biases.values()) == (counted if family != "deepseek_v4" else counted[-len(biases) :])
    theirs = AutoModelForCausalLM.from_config(small_config(family), dtype=torch.float32, attn_implementation="eager")
    experts = [module for module in theirs.modules() if hasattr(module, "is_transposed")]
    ids, buffers = torch.arange(3, 35)[None], dict(theirs.named_buffers())
    chosen = {}
    for module in experts:
        module.register_forward_pre_hook(lambda module, given: chosen.update({module: given[1]}))
    for name, number in biases.items():
        module, bias = experts[counted.index(number)], buffers[name]
        for change, is_chosen in ((1e3, True), (-1e3, False)):
            bias[1] = change
            with torch.no_grad():
                theirs.eval()(input_ids=ids, use_cache=False)
            assert {bool((row == 1).any()) for row in chosen[module].view(ids.numel(), -1)} == {is_chosen}, name
        bias[1] = 0


REFUSED = {
    "llama": "has no router whose choices are counted and that adds a bias to them, one number an expert; set it to 0",
    "mixtral": "has no router whose choices are counted",
    "gpt_oss": "has no router whose choices are counted",  # its bias is of logits, and learns
    "longcat_flash": "has no router whose choices are counted",
    "zaya": "has no router whose choices are counted",  # its bias has a number for no expert, too
    "laguna": "holds the biases of its routers as parameters (gate.e_score_correction_bias), which a stage shards",
    "afmoe": "holds the biases of its routers as parameters (expert_bias), which a stage shards",
    "ernie4_5_moe": "holds the biases of its routers as parameters (gate.moe_statics.e_score_correction_bias)",
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_without_any_is_refused(family):
    settings = config() if family == "llama" else small_config(family)
    model = build_model(settings, "fp32")
    check_biases(model, settings, 0.0)
    message = said_by(check_biases, model, settings, 0.001)
    assert f"train.router_bias_update_rate = 0.001: family {settings.model_type!r} {REFUSED[family]}" in message


def test_biases_in_bf16_are_refused():
    """Where they are: most families keep them in fp32 whatever the masters are."""
    check_biases(build_model(settings := small_config("glm4_moe"), "bf16"), settings, 0.001)
    settings = small_config("minimax_m2")
    message = said_by(check_biases, build_model(settings, "bf16"), settings, 0.001)
    assert "which is torch.bfloat16 here and rounds small steps away; set precision.master=fp32 and offload" in message
