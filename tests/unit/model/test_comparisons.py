"""Cached steps and files of families: what samples need, and what a run reads, as the self-check asks for them."""

import copy
import io
import json
from pathlib import Path

import families
import pytest
import torch
import transformers
from model_numbers import pair
from tiny import config, said_by
from transformers import CONFIG_MAPPING
from transformers import core_model_loading as loading

from shardbook.comm.versions import release_of
from shardbook.model import comparisons, file_names, selfcheck
from shardbook.model.causal_lm import CausalLM
from shardbook.model.comparisons import STEPS, cached_logits, decode_by_steps, relative_error
from shardbook.model.selfcheck import check_family
from shardbook.model.weight_files import StoredTensor
from shardbook.parallel.placement import check_recipe
from shardbook.recipe import Recipe

# of which some families do not read what they wrote, and others have another cache
IS_OLD = release_of(transformers.__version__) < (5, 23)
# full rows, windows, chunks, sinks, latent attention, alibi, learned positions; states in place of keys or beside them
CACHED = [
    "llama",
    "gemma3_text",
    "llama4_text",
    "gpt_oss",
    "deepseek_v3",
    "bloom",
    "gpt2",
    "qwen3_next",
    "mamba2",
    "lfm2",
]
ROWS = [torch.arange(3, 3 + length) * 7 % 120 + 3 for length in (5, 9, 14)]


def assert_cached(family):
    """A cached step is the whole forward to 1e-6 or, where that itself is off by so much in fp32, four times that."""
    theirs, ours = pair(family)

    def whole(model):
        with torch.no_grad():
            return torch.stack([model(input_ids=row[None], use_cache=False).logits[0, -STEPS - 1 :] for row in ROWS])

    wanted = whole(theirs)
    off = relative_error(cached_logits(ours, ROWS), wanted)
    if off < 1e-6:
        return
    try:
        rounding = relative_error(wanted.double(), whole(copy.deepcopy(theirs).double()))
    except RuntimeError:  # experts that do not run in fp64
        rounding = 1e-6
    assert off < 4 * rounding, (family, off)


@pytest.mark.parametrize("family", CACHED)
def test_a_cached_step_is_that_of_the_whole_forward(family):
    assert_cached(family)


@pytest.mark.slow
@pytest.mark.newest
def test_so_it_is_for_every_family_that_makes_samples():
    listed = json.loads(families.DATA.read_text())
    sampling = [
        name for name, about in listed.items() if about["kind"] in ("packed", "rows") and "uncached" not in about
    ]
    assert len(sampling) > 110
    for family in (name for name in sampling if name in CONFIG_MAPPING):  # an older transformers has fewer
        verdict = check_family(families.released_config(family))
        assert IS_OLD or not (verdict.refused or verdict.no_generation_reason), (family, verdict)
        if not (verdict.refused or verdict.no_generation_reason):
            assert_cached(family)


def test_a_name_that_a_forward_swallows_is_found():
    theirs, ours = pair("llama")
    assert ours.cache_argument in ("cache", "past_key_values") and decode_by_steps(ours, theirs, ROWS) == ""
    ours.cache_argument = "cache_params"  # planted: what mamba's forward calls it
    assert decode_by_steps(ours, theirs, ROWS).startswith("with a cache it computes other logits (off by ")
    ours.cache_argument = ""
    assert decode_by_steps(ours, theirs, ROWS) == "its forward takes no cache"


def test_padding_that_counts_is_found(monkeypatch):
    real = CausalLM.next_logits

    def unpadded(model, ids, places, attended, cache):
        return real(model, ids, places, torch.ones_like(attended), cache)

    theirs, ours = pair("llama")
    monkeypatch.setattr(CausalLM, "next_logits", unpadded)
    assert decode_by_steps(ours, theirs, ROWS).startswith("with a cache it computes other logits (off by ")


@pytest.mark.parametrize(
    ("family", "reason"),
    [("mamba", "with a cache it computes other logits (off by "), ("openai-gpt", "its forward takes no cache; ")],
)
def test_families_without_an_exact_cache_make_no_samples(family, reason):
    small = families.small_config(family)
    sections = {"model": {"path": "there"}, "train": {"steps": 1}, "data": {"packing": False}}
    check_recipe(Recipe.model_validate(sections), small)
    refusal = said_by(check_recipe, Recipe.model_validate(sections | {"generate": {"steps": 1}}), small)
    assert refusal.startswith(f"generate.steps: model.path = 'there': family {family!r} continues no prompt: {reason}")
    assert refusal.endswith("set generate.steps=0")


def refusal_of(family, monkeypatch):
    monkeypatch.setattr(selfcheck, "_KNOWN", {})
    return check_family(families.small_config(family)).refused


def test_a_conversion_that_is_left_out_is_found(monkeypatch):
    """Experts that files hold one by one; what no file can fill is refused before a run."""
    assert refusal_of("qwen3_moe", monkeypatch) == ""
    real = file_names.get_model_conversion_mapping
    monkeypatch.setattr(file_names, "get_model_conversion_mapping", lambda *given, **named: real(*given, **named)[:-1])
    assert refusal_of("qwen3_moe", monkeypatch).startswith("its files, as transformers writes them, lack model.layers.")


def test_an_operation_that_is_not_known_is_found(monkeypatch):
    monkeypatch.setattr(file_names, "MOVE_ROWS", {"MergeModulelist"})
    assert refusal_of("qwen3_moe", monkeypatch).startswith("no file can fill it (RecipeError: weights: ")


def test_what_is_not_made_of_rows_is_found(monkeypatch):
    """Of parts side by side no row is a row of a file."""
    names = [f"self_attn.o_proj.{half}.weight" for half in ("left", "right")]
    sides = loading.WeightConverter(names, "self_attn.o_proj.weight", operations=[loading.Concatenate(dim=1)])
    monkeypatch.setattr(file_names, "get_model_conversion_mapping", lambda *_, **__: [sides])
    monkeypatch.setattr(comparisons, "revert_weight_conversion", lambda _, state: halved(state))
    monkeypatch.setattr(file_names.FileNames, "to_files", lambda _, tensors: halved(dict(tensors)).items())
    refusal = refusal_of("llama", monkeypatch)
    assert (
        refusal
        == "no file can fill it: model.layers.0.self_attn.o_proj.weight is not made of rows of its files' tensors"
    )


def halved(state):
    """A state in which each output projection is two halves, side by side."""
    parts = {}
    for name, tensor in state.items():
        stem = name.removesuffix(".weight")
        if stem.endswith("o_proj"):
            left, right = tensor.chunk(2, 1)
            parts |= {f"{stem}.left.weight": left, f"{stem}.right.weight": right}
        else:
            parts[name] = tensor
    return parts


def test_tensors_of_another_shape_are_found(monkeypatch):
    real = file_names.FileNames.to_files
    monkeypatch.setattr(file_names.FileNames, "to_files", lambda *given: ((name, t[:1]) for name, t in real(*given)))
    assert refusal_of("llama", monkeypatch) == "its files are not those that transformers writes of it"


def test_rows_in_another_place_are_found(monkeypatch):
    real = file_names.Assembled.read_rows
    monkeypatch.setattr(file_names.Assembled, "read_rows", lambda tensor, rows: real(tensor, rows).flip(0))
    assert refusal_of("qwen3_moe", monkeypatch) == "its files are not those that transformers writes of it"


def test_files_that_are_written_otherwise_are_found(monkeypatch):
    real = file_names.FileNames.to_files
    monkeypatch.setattr(file_names.FileNames, "to_files", lambda *given: ((f"a.{n}", t) for n, t in real(*given)))
    assert refusal_of("qwen3_moe", monkeypatch) == "its files are not those that transformers writes of it"


class Inkling2UnpadVocab(loading.ConversionOps):
    """As transformers 5.24 has it: it leaves rows out, and casts to the parameter's dtype."""

    def convert(self, tensors, source_patterns, target_patterns, config, model, full_layer_name, **_):
        (tensor,) = next(iter(tensors.values()))
        return {target_patterns[0]: tensor[: config.vocab_size].to(model.get_parameter(full_layer_name).dtype)}


def read_converted(monkeypatch, converter, stored, **words):
    """What a llama in bf16, its config changed by `words`, reads of `stored` by one converter."""
    monkeypatch.setattr(file_names, "get_model_conversion_mapping", lambda *_, **__: [converter])
    model = CausalLM(config("llama", **words), torch.bfloat16)
    for parameter in model.parameters():  # what ranks share has other shapes
        parameter.data = parameter.data[:1]
    found = model.files.by_model_names({name: comparisons.in_memory(tensor) for name, tensor in stored.items()})
    return {name: each.read_rows(slice(0, each.shape[0])) for name, each in found.items()}


@pytest.mark.skipif(not hasattr(loading, "Split"), reason="transformers 5.17 splits no fused matrices")
def test_fused_matrices_are_split_by_the_shapes_of_the_whole_model(monkeypatch):
    parts = [f"self_attn.{letter}_proj.weight" for letter in "qkv"]
    converter = loading.WeightConverter("self_attn.qkv.weight", parts, operations=[loading.Split(dim=0)])
    fused = torch.randn(64, 32)  # 4 heads, and twice 2, of 8
    found = read_converted(monkeypatch, converter, {"model.layers.0.self_attn.qkv.weight": fused})
    rows = zip(parts, fused.split([32, 16, 16]), strict=True)
    assert all(torch.equal(found[f"model.layers.0.{name}"], part) for name, part in rows)


def test_rows_of_a_padded_vocabulary_are_left_out_though_numbers_of_rows_have_no_bf16(monkeypatch):
    converter = loading.WeightConverter("lm_head.weight", "lm_head.weight", operations=[Inkling2UnpadVocab()])
    padded = torch.randn(1024, 32)
    found = read_converted(monkeypatch, converter, {"lm_head.weight": padded}, vocab=1000, tied=False)
    assert torch.equal(found["lm_head.weight"], padded[:1000])


def test_a_tensor_in_memory_is_read_as_one_in_a_file():
    tensor = torch.randn(7, 3)
    stored = StoredTensor(Path("x"), io.BytesIO(tensor.numpy().tobytes()), "F32", (7, 3), 0)
    assert torch.equal(stored.read_part(slice(2, 5), slice(1, 3)), tensor[2:5, 1:3])
