"""Families that nobody listed: the numbers of transformers' own forward, and what a self-check says of them."""

import copy
import dataclasses

import pytest
import torch
from families import released_config, small_config
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, reject
from hypothesis import settings as examples
from hypothesis import strategies as st
from model_numbers import assert_close, gradients, micro, pair, rows
from tiny import config, said_by, write_model
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from varlen import plain_varlen_attn

from shardbook.model import attention, hf_model, masks, selfcheck
from shardbook.model.attention import KERNELS, PLAIN
from shardbook.model.selfcheck import check_family
from shardbook.model.shrink import keep_layers
from shardbook.parallel.placement import World, check_recipe, place_model
from shardbook.recipe import Recipe, resolve_precision

# one of each sort: windows, two rotations and scaled embeddings, caps, sinks and experts, chunks, a scale, a divisor, a
# head with a bias, learned positions, alibi, latent attention and a buffer that files hold, kinds of blocks
PACKED = ["llama", "mistral", "gemma3_text", "gemma2", "gpt_oss", "llama4_text", "cohere2", "granite", "phi", "gpt2"]
PACKED += ["bloom", "deepseek_v3", "gemma4_text"]
ROWS = ["qwen3_next", "lfm2"]  # recurrent and convolving layers
# A recurrence is summed in another order alone than padded; its experts do not run in fp64.
ROUNDS = {"qwen3_next": 3e-6}


def small_rows():
    return [{**row, "input_ids": [3 + token % 120 for token in row["input_ids"]]} for row in rows()]


def batches(packed, monkeypatch):
    import model_numbers

    monkeypatch.setattr(model_numbers, "rows", small_rows)
    return micro(packed)


def alone(theirs):
    """Loss and gradients of transformers' own forward of each document by itself."""
    total = torch.zeros(())
    for row in small_rows():
        ids = torch.tensor(row["input_ids"])
        labels = torch.where(torch.tensor(row["mask"]), ids, -100)
        logits = theirs(input_ids=ids[None], use_cache=False).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
    total.backward()
    return total, {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}


def rounding(theirs, grads):
    """How far two sums in fp32 may be apart: four times what transformers' own gradients are off those in fp64, which
    depends on the processor."""
    exact = copy.deepcopy(theirs).double()
    exact.zero_grad()
    _, wanted = alone(exact)
    whole = torch.stack([grad.norm() for grad in wanted.values()]).norm()
    off = {name: (grads[name] - grad).norm() / max(grad.norm(), 0.03 * whole) for name, grad in wanted.items()}
    return 4 * float(max(off.values()))


@pytest.mark.parametrize("family", [*PACKED, *ROWS])
def test_loss_and_gradients_are_those_of_transformers(family, monkeypatch):
    theirs, ours = pair(family)
    wanted = alone(theirs)
    bound = rounding(theirs, wanted[1]) if family == "gemma4_text" else ROUNDS.get(family, 1e-6)
    for packed in (True, False) if family in PACKED else (False,):
        ours.zero_grad()
        assert_close(gradients(ours, batches(packed, monkeypatch)), wanted, bound)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "llama4_text"])
def test_windows_and_chunks_without_a_dense_mask(family, monkeypatch):
    stand_in = dataclasses.replace(KERNELS["varlen"], make=lambda: attention.make_varlen(plain_varlen_attn))
    monkeypatch.setitem(KERNELS, "varlen", stand_in)
    theirs, ours = pair(family, "varlen")
    wanted = alone(theirs)
    for packed in (True, False):
        ours.zero_grad()
        assert_close(gradients(ours, batches(packed, monkeypatch)), wanted)


def without_rule(patch):
    real = masks.attention_mask
    patch.setattr(masks, "attention_mask", lambda *given: real(*given[:6]))


def documents_untold(patch):
    real = masks.number_documents
    patch.setattr(masks, "number_documents", lambda cu_seqlens, shape: real(cu_seqlens, shape) * 0)


def places_in_rows(patch):
    def places(cu_seqlens, numbers):
        return torch.arange(numbers.shape[1], dtype=torch.int32).expand_as(numbers)

    patch.setattr(masks, "positions_in_documents", places)


def head_unfinished(patch):
    from shardbook.model import causal_lm

    patch.setattr(causal_lm, "find_logit_transform", lambda found: (None, None))


def buffers_unfilled(patch):
    patch.setattr(hf_model.PreTrainedModel, "initialize_weights", lambda base: None)


def positions_go_on(patch):
    from shardbook.model.causal_lm import CausalLM

    real = CausalLM.losses

    def losses(model, batch, **named):
        places = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
        return real(model, dataclasses.replace(batch, position_ids=places), **named)

    patch.setattr(CausalLM, "losses", losses)


@pytest.mark.parametrize(
    ("family", "bug"),
    [
        ("mistral", without_rule),
        ("gemma3_text", without_rule),
        ("llama4_text", places_in_rows),
        ("gpt2", documents_untold),
        ("gpt2", positions_go_on),
        ("gemma2", head_unfinished),
        ("cohere2", head_unfinished),
        ("granite", head_unfinished),
        ("gemma3_text", buffers_unfilled),
    ],
)
def test_a_planted_bug_turns_it_red(family, bug, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, "_KNOWN", dict(selfcheck._KNOWN))
        check_family(small_config(family))
        bug(patch)
        theirs, ours = pair(family)
        found = gradients(ours, batches(True, monkeypatch))
        with pytest.raises(AssertionError):
            assert_close(found, alone(theirs))
        # and the self-check finds it
        patch.setattr(selfcheck, "_KNOWN", {})
        assert check_family(small_config(family)).kind != "packed"


def test_sinks_that_a_kernel_drops_turn_it_red(monkeypatch):
    """Transformers' sdpa takes no sinks, and says nothing."""
    monkeypatch.setattr(selfcheck, "_KNOWN", {})  # what is found here is no other test's to know
    monkeypatch.setattr(attention, "unknown_arguments", lambda named: [])
    theirs, ours = pair("gpt_oss", "sdpa")
    with pytest.raises(AssertionError):
        assert_close(gradients(ours, batches(True, monkeypatch)), alone(theirs))


def test_no_kernel_gets_what_it_does_not_know(monkeypatch):
    found = check_family(small_config("gpt_oss"))
    assert found.kind == "packed" and found.demands.arguments == ("s_aux",) and not found.can_split_heads
    cpu, fp32 = torch.device("cpu"), torch.float32
    said = said_by(attention.choose_attention, "sdpa", config(), cpu, fp32, found.demands)
    assert said == (
        "model.attention = 'sdpa': needs an attention of queries, keys, values and a mask alone, and this is float32 "
        "with heads of 8 and s_aux on cpu; set model.attention to auto, or to eager"
    )
    assert attention.kernel_on_gpu("auto", found.demands).name == "eager"
    monkeypatch.setattr(attention.KernelContext, "is_ampere", True)  # as on a GPU: what no kernel knows is named
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: True)
    for told in ("s_aux", "softcap", "position_bias", "what_comes_next"):
        gpu = attention.KernelContext(cpu, torch.bfloat16, 64, attention.Demands((told,)))
        for name in ("varlen", "flex"):
            assert KERNELS[name].lacks(gpu) == "an attention of queries, keys, values, windows and chunks alone"
            assert not KERNELS[name].lacks(dataclasses.replace(gpu, demands=PLAIN))
        assert KERNELS["sdpa"].lacks(gpu) and not KERNELS["eager"].lacks(gpu) and told in str(gpu)
    latent = check_family(small_config("deepseek_v3")).demands
    assert latent.needs_dense_mask and attention.kernel_on_gpu("auto", latent).name == "sdpa"
    assert check_family(small_config("llama")).demands == PLAIN


def test_what_is_refused_and_why():
    recipe = Recipe.model_validate({"model": {"path": "there"}, "train": {"steps": 1}})
    said = said_by(check_recipe, recipe, small_config("qwen3_next"))
    assert said.startswith("data.packing = true: family 'qwen3_next': documents of a packed row see each other (")
    assert said.endswith("set data.packing=false")
    apart = Recipe.model_validate({"model": {"path": "there"}, "train": {"steps": 1}, "data": {"packing": False}})
    check_recipe(apart, small_config("qwen3_next"))
    assert said_by(check_recipe, recipe, small_config("bert")) == (
        "model.path = 'there': family 'bert' cannot be trained: its tokens see later ones, so it is no causal language "
        "model"
    )
    assert "its blocks share parameters" in said_by(check_recipe, recipe, small_config("zamba"))
    assert "its forward in evaluation changes its weights" in said_by(check_recipe, recipe, small_config("rwkv"))
    split = Recipe.model_validate({"model": {"path": "there"}, "train": {"steps": 1}, "parallel": {"cp_size": 2}})
    assert "more than heads that ranks can share and softcap" in said_by(check_recipe, split, small_config("gemma2"))


def test_parameters_without_a_gradient_are_frozen():
    """Else an optimizer would decay them: under a stage they have gradients of zero."""
    theirs, ours = pair("deepseek_v32")
    alone(theirs)
    unreached = {name for name, parameter in theirs.named_parameters() if parameter.grad is None}
    assert unreached and all(".indexer." in name for name in unreached)
    assert {name for name, parameter in ours.named_parameters() if not parameter.requires_grad} == unreached


def test_a_config_is_made_small_in_widths_and_not_in_switches():
    large = AutoConfig.for_model("gemma3_text", num_hidden_layers=62, use_bidirectional_attention=False)
    small = selfcheck.shrink_config(large)
    assert small.layer_types == ["sliding_attention"] * 2 + ["full_attention"] * 2 and small.num_hidden_layers == 4
    assert small.sliding_window == 4 and small.hidden_size == 32 and small.vocab_size == 128
    kept = ("hidden_activation", "rope_parameters", "query_pre_attn_scalar", "attn_logit_softcapping", "attention_bias")
    assert all(getattr(small, name) == getattr(large, name) for name in kept)


FULL, NEAR = "full_attention", "sliding_attention"
BY_LAYER = [  # a family, its list of entries or numbers of six layers, and that of layers 0, 3, 4
    ("gemma3_text", "layer_types", [NEAR, FULL, NEAR, FULL, NEAR, NEAR], [NEAR, FULL, NEAR]),
    ("smollm3", "no_rope_layers", [1, 1, 1, 0, 1, 0], [1, 0, 1]),
    (
        "gpt_neo",
        "attention_layers",
        ["global", "local", "global", "local", "global", "local"],
        ["global", "local", "global"],
    ),
    ("glm4_moe_lite", "mlp_layer_types", ["dense", *["sparse"] * 2, *["dense"] * 2, "sparse"], ["dense"] * 3),
    ("granite_swa", "layer_rope_theta", [1e4, 1e4, 1e4, 2e4, 0, 1e4], [1e4, 2e4, 0]),
    ("gemma3n_text", "intermediate_size", [64, 65, 66, 67, 68, 69], [64, 67, 68]),
    ("qwen3_moe", "mlp_only_layers", [0, 2, 3], [0, 1]),
]


@pytest.mark.parametrize(("family", "name", "listed", "wanted"), BY_LAYER, ids=[name for _, name, *_ in BY_LAYER])
def test_layers_are_left_out_of_any_list_that_has_one_for_each(family, name, listed, wanted):
    kind, own = {"gpt_neo": ("attention_types", [[["global", "local"], 3]])}.get(family, (name, listed))
    config = AutoConfig.for_model(family, num_hidden_layers=6, **{kind: own})
    assert list(getattr(config, name)) == listed
    few = keep_layers(config, (0, 3, 4))
    assert few.num_hidden_layers == 3 and getattr(few, name) == wanted
    assert (config.num_hidden_layers, list(getattr(config, name))) == (6, listed)


def test_layers_are_left_out_of_an_inner_config():
    config = AutoConfig.for_model("llama4", text_config={"num_hidden_layers": 6, "no_rope_layers": [1, 1, 1, 0, 1, 0]})
    few = keep_layers(config, (0, 3, 4)).get_text_config()
    assert few.num_hidden_layers == 3 and few.no_rope_layers == [1, 0, 1]
    assert few.moe_layers == [0, 1, 2] and config.get_text_config().num_hidden_layers == 6


def test_a_model_of_fewer_layers_has_the_lists_of_those():
    """As the simulator builds it: the first layers, and no list with entries for more."""
    config = small_config("smollm3")
    config.num_hidden_layers, config.layer_types, config.no_rope_layers = 6, ["full_attention"] * 6, [1, 1, 1, 0, 1, 0]
    recipe = Recipe.model_validate({"model": {"path": "there"}, "train": {"steps": 1}})
    few = place_model(resolve_precision(recipe, "cuda"), World(1, 1), config, None).with_layers(4)
    assert few.config.no_rope_layers == [1, 1, 1, 0] and len(few.config.layer_types) == len(few.model.blocks) == 4


@examples(max_examples=40)
@given(
    family=st.sampled_from(["llama", "qwen3", "gemma3_text", "mixtral", "phi", "olmo2", "gpt_oss", "gpt2", "gpt_neox"]),
    heads=st.integers(1, 12),
    shared=st.integers(1, 12),
    head_dim=st.sampled_from([8, 16, 40, 64]),
    is_named=st.booleans(),
    layers=st.integers(1, 6),
)
def test_heads_and_widths_of_any_valid_config_pass(family, heads, shared, head_dim, is_named, layers):
    """Valid is what transformers itself builds and runs, at the size that the config has."""
    words = {"hidden_size": heads * head_dim, "intermediate_size": 2 * heads * head_dim, "num_hidden_layers": layers}
    words |= {"num_attention_heads": heads, "vocab_size": 300, "pad_token_id": 0}
    words |= {"num_key_value_heads": heads if heads % shared else heads // shared}
    words |= {"head_dim": head_dim} if is_named else {}
    try:
        large = AutoConfig.for_model(family, **words)
        with torch.no_grad():
            AutoModelForCausalLM.from_config(large)(input_ids=torch.arange(3, 9)[None])
    except (ValueError, RuntimeError, StrictDataclassError):
        reject()
    assert check_family(large).refused == ""


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 3), (3, 2), (4, 3), (8, 3), (1, 2)])
def test_key_heads_that_do_not_divide_the_heads_are_refused(heads, key_heads):
    wrong = config(num_attention_heads=heads, num_key_value_heads=key_heads, hidden_size=96)
    assert "num_key_value_heads" in check_family(wrong).refused


def test_what_depends_on_each_other_is_made_small_together():
    """A list of layers that counts from one; heads that are as wide as their two parts; heads inside a config of
    their own; an indexer with so many heads that hardly any score is a tie at zero."""
    small = small_config("qwen4_exp_text")
    kinds = released_config("qwen4_exp_text").layer_types  # the fourth kind has another name in transformers 5.17
    assert small.ple_layer_ids == [2, 3] and small.layer_types[:4] == kinds[:4] and len(set(kinds[:4])) == 2
    assert small.indexer_budget == 2 * small.indexer_compress_ratio == 4
    if "dots3_note_text" in CONFIG_MAPPING:  # transformers 5.17 has none
        small = small_config("dots3_note_text")
        assert small.head_dim == small.qk_nope_head_dim + small.qk_rope_head_dim == 16
    assert small_config("deepseek_v3").head_dim == 8  # of which all is rotated
    assert small_config("hy_v4").index_n_heads == 16
    families = ["hy_v4"] + [family for family in ("dots3_note_text", "dbrx") if reads_itself(family)]
    if "dbrx" in families:
        assert small_config("dbrx").attn_config.kv_n_heads == 2 and small_config("dbrx").attn_config.rope_theta == 5e5
    assert {check_family(small_config(family)).kind for family in families} == {"packed"}


def reads_itself(family):
    """Whether transformers has the family, and reads the config that it wrote: 5.17 does not of dbrx."""
    try:
        return bool(released_config(family).from_dict(released_config(family).to_dict()))
    except ValueError:
        return False


def test_todays_families_are_asked_in_a_second(tmp_path):
    """The time is not held here: a machine may be loaded. What is: one small model, of few parameters."""
    sizes, real = [], AutoModelForCausalLM.from_config

    def from_config(*given, **named):
        made = real(*given, **named)
        sizes.append(sum(parameter.numel() for parameter in made.parameters()))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selfcheck.AutoModelForCausalLM, "from_config", from_config)
        patch.setattr(selfcheck, "_KNOWN", {})
        write_model(tmp_path)
        check_family(config(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, vocab_size=128_256))
    assert max(sizes) < 100_000


@pytest.mark.skipif("gemma4_unified_text" not in CONFIG_MAPPING, reason="of a family that this transformers lacks")
def test_what_a_block_passes_to_a_later_one_is_seen_wherever_it_is():
    """Of four blocks the last takes keys and values of the third: two halves would not miss them, stages of a block
    do."""
    config = small_config("gemma4_unified_text")
    assert not check_family(config).no_parts_reason
    config.num_kv_shared_layers = 1
    assert "pass on more than hidden states" in check_family(config).no_parts_reason
