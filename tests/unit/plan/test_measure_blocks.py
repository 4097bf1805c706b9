"""Blocks of any family, measured: how many kinds a model has, and what a plan of it is beside a step's own code."""

import dataclasses

import pytest
import torch
from families import small_config
from plans import MIXED, SIZES, settings
from plans import simulated_recipe as recipe_of
from tiny import config, said_by
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.utils.import_utils import is_tracing

from shardbook.comm.torch_private import fake_tensors
from shardbook.model import causal_lm
from shardbook.model.causal_lm import build_model, materialize
from shardbook.model.selfcheck import check_family
from shardbook.model.shrink import keep_layers
from shardbook.plan import activation_bytes
from shardbook.plan import measure_blocks as blocks
from shardbook.plan.measure_blocks import kinds_of, measure_blocks
from shardbook.plan.memory_trace import LiveBytes, meta_tensors

KINDS = {"gemma3_text": (0, 0, 2, 0), "gpt_oss": (0, 1, 0, 1), "qwen3_next": (0, 0, 0, 3)}


def test_blocks_that_differ_are_kinds_of_their_own():
    """smollm3 rotates nothing in every second layer; a block's own number makes no kind."""
    assert kinds_of(config("llama", num_hidden_layers=3)) == (0, 0, 0)
    assert kinds_of(config("smollm3", num_hidden_layers=5)) == (0, 1, 0, 1, 0)


def test_measuring_changes_nothing_around_it():
    before = torch.get_rng_state()
    made = config("llama", head_dim=16)
    measure_blocks(made, settings(), "full", "fp32", tp_size=2)
    assert torch.equal(before, torch.get_rng_state()) and not torch.distributed.is_initialized()


def test_products_of_a_block_are_counted():
    """Forward 2 FLOPs a parameter and token, backward 4; what is recomputed is all but the last product, whose result
    nobody asks for."""
    made = config("llama", head_dim=16, vocab=260)
    plain, full = (measure_blocks(made, settings(), kind, "bf16").blocks[0].products for kind in ("none", "full"))
    width, inner = made.hidden_size, made.intermediate_size
    matrices = 2 * width * made.num_attention_heads * 16 + 2 * width * made.num_key_value_heads * 16 + 3 * width * inner
    assert (plain[0].token, plain[1].token) == (2 * matrices, 4 * matrices)
    assert full[1].token == 6 * matrices - 2 * width * inner


class Unseen(LiveBytes):
    def ran(self, *operation, is_larger):
        """Is not asked."""


def test_experts_in_fp32_keep_what_a_cpu_keeps():
    """Torch's own product of groups on fake tensors takes bf16 alone."""
    model = build_model(config("qwen3_moe", head_dim=16, vocab=266), "fp32")

    def kept(hidden):
        found = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.setdefault(id(t), t), lambda t: t):
            model.blocks[0].mlp(hidden).sum().backward()
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found.values()}
        return sorted(size for key, size in storages.items() if key not in own)

    with fake_tensors(), Unseen():
        materialize(model, torch.device("cpu"))
        fake = kept(torch.empty(2, 16, 32, requires_grad=True))
    model = build_model(config("qwen3_moe", head_dim=16, vocab=266), "fp32")
    materialize(model, torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    assert kept(torch.randn(2, 16, 32, requires_grad=True)) == fake and len(fake) > 5


def test_a_block_that_needs_values_is_named(monkeypatch):
    def forward(self, *inputs, **named):
        return self.own(*inputs, **named) * inputs[0].sum().item()

    made = config("llama", num_hidden_layers=2, vocab=261)
    build = blocks.build_local

    def planted(*given):
        local = build(*given)
        block = local.model.blocks[0]
        block.own, block.forward = block.forward, forward.__get__(block)
        return local

    monkeypatch.setattr(blocks, "build_local", planted)
    said = said_by(measure_blocks, made, settings(), "none", "bf16")
    assert "block 0, a LlamaDecoderLayer, cannot run without memory" in said
    assert said.endswith("so neither the peak nor the time of a step can be planned")


def test_a_bug_of_ours_is_no_reason(monkeypatch):
    """What transformers' code raises when it runs is a reason; what Python raises in our own is a bug of ours."""

    def refuses(self, hidden):
        raise ValueError("needs values")

    one, other = (config("llama", num_hidden_layers=1, vocab=vocab) for vocab in (262, 264))
    assert check_family(one).kind == check_family(other).kind == "packed"  # else the check would be asked below
    with monkeypatch.context() as patch:
        patch.setattr(LlamaMLP, "forward", refuses)
        said = said_by(measure_blocks, one, settings(), "none", "bf16")
        assert "cannot run without memory (needs values)" in said
        assert "needs values" in check_family(config("llama", vocab=263)).refused
    monkeypatch.setattr(causal_lm, "documents_of", lambda batch: None)
    with pytest.raises(TypeError, match="context manager"):
        measure_blocks(other, settings(), "none", "bf16")
    with pytest.raises(TypeError, match="context manager"):
        check_family(config("llama", vocab=265))


def planned(family, stage, checkpointing, one_kind=False):
    """(the plan's peak, the simulated one) of a small model of four layers."""
    from shardbook.objectives import build_objective
    from shardbook.parallel.placement import World, place_model
    from shardbook.plan.peak import predict_peak
    from shardbook.plan.simulate import simulate_step

    made, more = MIXED[family]
    packing = "data.packing=" + str(family != "qwen3_next").lower()
    words = ("data.max_length=512", "train.per_device_train_batch_size=2", "train.loss_chunk_tokens=256", packing)
    recipe = recipe_of(stage, checkpointing, 1, *words)
    laid = place_model(recipe, World(8, 8), made(**SIZES, **more, pad_token_id=0), None)
    assert kinds_of(laid.config) == KINDS[family]
    if one_kind:
        activation_bytes.kinds_of = lambda config: (0,) * config.num_hidden_layers
    peak = predict_peak(laid.layout, laid.config, recipe).total
    objective = build_objective(recipe.method, recipe.preference, recipe.distill)
    return peak, simulate_step(laid, objective.terms).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize(("stage", "checkpointing"), [("zero3", "full"), ("zero2", "none")])
def test_a_plan_of_any_family(apart, family, stage, checkpointing):
    peak, simulated = apart(planned, family, stage, checkpointing)
    assert peak / simulated == pytest.approx(1, abs=0.02)


@pytest.mark.slow
def test_one_kind_that_is_measured_for_two_is_seen(apart):
    peak, simulated = apart(planned, "qwen3_next", "zero2", "none", True)
    assert peak / simulated != pytest.approx(1, abs=0.02)


def on_fake_tensors(patch):
    """Has blocks run on fake tensors, as if none ran on meta tensors."""
    make = blocks.full_rows

    def refuse(*given):
        if torch.get_default_device().type == "meta":
            raise RuntimeError("not on meta tensors")
        return make(*given)

    patch.setattr(blocks, "full_rows", refuse)


def shapes_of(measured):
    """Every number of what is measured; the order of moments does not count."""
    return dataclasses.asdict(measured) | {
        "blocks": {
            kind: {name: sorted(map(str, value)) if isinstance(value, tuple) else value for name, value in each.items()}
            for kind, each in dataclasses.asdict(measured)["blocks"].items()
        }
    }


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        ("ctrl", "none"),
        ("bloom", "full"),
        ("gpt_oss", "none"),
        pytest.param("qwen3_next", "none", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "full", marks=pytest.mark.slow),
    ],
)
def test_meta_tensors_tell_what_fake_ones_do(family, checkpointing, monkeypatch):
    """Attention of one's own, sinks, linear attention whose mask asks for numbers. In fp32: in bf16 a CPU's LayerNorm
    keeps its statistics in bf16, a GPU's and meta's in fp32."""
    monkeypatch.setattr(blocks, "_measured", {})
    few = small_config(family)
    recipe = settings(data={"max_length": 256, "packing": False})
    on_meta = measure_blocks(few, recipe, checkpointing, "fp32")
    blocks._measured.clear()
    on_fake_tensors(monkeypatch)
    assert shapes_of(measure_blocks(few, recipe, checkpointing, "fp32")) == shapes_of(on_meta)


def test_a_buffer_that_the_first_forward_casts_is_no_micro_batch_s():
    """ctrl's table of positions: counted with the shortest row alone, it would make longer rows cheaper."""
    measured = measure_blocks(small_config("ctrl"), settings(), "none", "bf16")
    assert measured.before.fixed == 0 and measured.blocks[0].kept.fixed >= 0


def test_sdpa_is_never_taken_apart_on_meta_tensors():
    """No kernel of it is for that device: its scores would be counted, which no kernel keeps."""
    query = torch.empty(1, 2, 8, 4, device="meta")
    with meta_tensors(), pytest.raises(NotImplementedError, match="looks at the device"):
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert torch.nn.functional.scaled_dot_product_attention(query, query, query).shape == query.shape


def test_transformers_takes_meta_tensors_for_fake_ones_inside_only():
    tensor = torch.empty(1, device="meta")
    with pytest.raises(KeyError), meta_tensors():
        assert is_tracing(tensor) and not is_tracing(torch.empty(1))
        raise KeyError
    assert not is_tracing(tensor)


def measured_with(config, layers, packing):
    """What is measured of `config` where the few layers are these."""
    blocks._measured.clear()
    kinds = blocks._look_at(config)
    few = keep_layers(config, layers)
    few.tie_word_embeddings = False
    blocks._kinds[blocks.text_of(config)] = dataclasses.replace(kinds, few=few, layers=layers)
    try:
        recipe = settings(data={"max_length": 2048, "packing": packing})
        return measure_blocks(config, recipe, "none", "bf16")
    finally:
        blocks._kinds.clear()
        blocks._measured.clear()


@pytest.mark.parametrize("family", MIXED)
def test_one_layer_of_each_kind_tells_what_all_up_to_the_last_kind_tell(family):
    made, more = MIXED[family]
    config = made(**SIZES, **more, pad_token_id=0)
    firsts, packing = tuple(sorted(set(KINDS[family]))), family != "qwen3_next"
    assert blocks._look_at(config).layers == firsts
    assert measured_with(config, firsts, packing) == measured_with(config, tuple(range(firsts[-1] + 1)), packing)


def test_a_layer_whose_number_says_its_kind_has_those_before_it():
    """DeepSeek's first layers are dense by their number: alone, the first with experts would be dense too."""
    facts = {"first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    facts |= {"moe_intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32, "n_shared_experts": 1}
    facts |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    config = AutoConfig.for_model("deepseek_v3", **SIZES, **facts, pad_token_id=0)
    kinds = blocks._look_at(config)
    assert kinds.of_blocks == (0, 0, 2, 2) and kinds.layers == (0, 1, 2)
