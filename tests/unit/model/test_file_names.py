"""Files of families whose names, experts or buffers are not the model's: read as transformers reads them, written as it
writes them."""

import dataclasses
import random

import pytest
import torch
from families import VISION, small_config
from safetensors.torch import load_file
from tiny import edit_weights, said_by, tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import shardbook.model.weights as weights
from shardbook.model import file_names
from shardbook.model.blocks import keep_blocks
from shardbook.model.causal_lm import build_model, materialize
from shardbook.model.families import load_config
from shardbook.model.file_buffers import load_buffers, stored_buffers
from shardbook.model.weight_files import StoredTensor, open_tensors
from shardbook.recipe import Model, RecipeError

# experts by themselves in two ways, renamed alone, stacked already, with a buffer, put one after another, a head's name
FAMILIES = ["qwen3_moe", "mixtral", "granitemoe", "gpt_oss", "deepseek_v3", "olmo_hybrid", "gpt_neox", "afmoe"]
FAMILIES += ["inkling2_text", "hrm_text"]  # rows interleaved, and chunks of one tensor
FAMILIES += ["sarvam_moe", "lara_mini"]  # one fused matrix that is split into three
# transformers 5.17 has no inkling2_text, and before 5.24 there are none of the last two
FAMILIES = [family for family in FAMILIES if family in CONFIG_MAPPING]
interleaves = pytest.mark.skipif(
    "inkling2_text" not in CONFIG_MAPPING, reason="of a family that this transformers lacks"
)


def write(folder, family):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(small_config(family), dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    theirs.save_pretrained(folder)
    return theirs


def load(folder, family):
    model = build_model(small_config(family), "fp32")
    materialize(model, torch.device("cpu"))
    weights.load_weights(model, folder)
    return model


def export(model, source, out, dtype="fp32"):
    shapes, beside = (
        {name: parameter.shape for name, parameter in model.named_parameters()},
        (model.files, stored_buffers(model)),
    )
    tensors = weights.full_tensors(model, dtype)
    weights.save_weights(out, tensors, shapes, model.config, tokenizer(), source, dtype, True, *beside)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_is_the_model_and_what_is_written_is_the_files(family, tmp_path):
    theirs = write(tmp_path / "in", family)
    model = load(tmp_path / "in", family)
    wanted = theirs.state_dict()
    assert all(torch.equal(tensor.view_as(wanted[name]), wanted[name]) for name, tensor in model.state_dict().items())
    export(model, tmp_path / "in", tmp_path / "out")
    there, here = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert there.keys() == here.keys() and all(torch.equal(there[name], here[name]) for name in there)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.arange(3, 20)[None]
    assert torch.equal(again(ids, use_cache=False).logits, theirs(ids, use_cache=False).logits)


def test_a_rank_reads_its_own_rows_alone(tmp_path, monkeypatch):
    """Rows 20 to 90 of 32 an expert: the end of the first one's gate, half of the third one's up."""
    theirs = write(tmp_path, "qwen3_moe")
    model, read = build_model(small_config("qwen3_moe"), "fp32"), []
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = theirs.state_dict()[name].flatten(0, 1)
    assert model.get_submodule("model.layers.1.mlp.experts").gate_up_proj.shape == (4, 32, 32)
    real = StoredTensor.read_rows
    with open_tensors(tmp_path) as opened:
        found = model.files.by_model_names(opened)[name]
        monkeypatch.setattr(
            StoredTensor, "read_rows", lambda own, rows: read.append(rows.stop - rows.start) or real(own, rows)
        )
        assert torch.equal(found.read_part(slice(20, 90)), whole[20:90]) and sum(read) == 70
        assert torch.equal(found.read_part(slice(3, 40), slice(1, 5)), whole[3:40, 1:5])
        assert found.read_rows(slice(2, 2)).shape == (0, 32) and found.shape == (128, 32)
        other = dict(zip(found.sources, reversed(found.sources.values()), strict=True))
        swapped = dataclasses.replace(found, sources=other)  # planted: gate and up in each other's place
        assert not torch.equal(swapped.read_part(slice(20, 90)), whole[20:90])


def test_an_expert_that_is_missing_or_misshapen_is_one_error(tmp_path):
    stem = "model.layers.1.mlp.experts"
    gates = "4 of mlp.experts.*.gate_proj.weight [16, 32]"
    for edit, ups in (
        (lambda tensors: tensors.pop(f"{stem}.2.up_proj.weight"), "3 of mlp.experts.*.up_proj.weight [16, 32]"),
        (
            lambda tensors: tensors.update({f"{stem}.2.up_proj.weight": torch.zeros(7, 32)}),
            "4 of mlp.experts.*.up_proj.weight [7, 32] or [16, 32]",
        ),
    ):
        write(tmp_path, "qwen3_moe")
        edit_weights(tmp_path, edit)
        said = said_by(load, tmp_path, "qwen3_moe")
        assert f"{stem}.gate_up_proj has shape [0" in said
        assert said.endswith(f"the model wants [128, 32]: its files have {gates}, {ups}"), said


def test_files_of_quantised_experts_are_one_error(tmp_path):
    """gpt-oss as the hub has it, where a config would not say so: blocks of four bits and their scales."""
    write(tmp_path, "gpt_oss")
    stem = "model.layers.0.mlp.experts.gate_up_proj"

    def edit(tensors):
        del tensors[stem]
        tensors |= {
            f"{stem}_blocks": torch.zeros(4, 2, dtype=torch.uint8),
            f"{stem}_scales": torch.zeros(4, dtype=torch.uint8),
        }

    edit_weights(tmp_path, edit)
    said = said_by(load, tmp_path, "gpt_oss")
    assert said.endswith(f"missing {stem}; unexpected {stem}_blocks; unexpected {stem}_scales")
    edit_weights(
        tmp_path,
        lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn) for name in ["lm_head.weight"]}),
    )
    assert "lm_head.weight has dtype F8_E4M3, not a float" in said_by(load, tmp_path, "gpt_oss")


@interleaves
def test_a_conversion_that_is_not_known_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(file_names, "MOVE_ROWS", {"MergeModulelist", "Concatenate"})
    write(tmp_path, "inkling2_text")
    said = said_by(load, tmp_path, "inkling2_text")
    assert said.endswith("by Interleave, which is not known here"), said


@interleaves
def test_rows_that_lie_between_others_are_read_from_where_they_are(tmp_path):
    """A gate's rows and an up projection's take turns in one tensor. Any range of any of them, of one file each."""
    theirs = write(tmp_path, "inkling2_text").state_dict()
    model, dice = build_model(small_config("inkling2_text"), "fp32"), random.Random(0)
    with open_tensors(tmp_path) as opened:
        found = model.files.by_model_names(opened)
        moved = [name for name, each in found.items() if isinstance(each, file_names.Assembled)]
        assert any(name.endswith("experts.gate_up_proj") for name in moved)
        for name in moved:
            whole = theirs[name].view(found[name].shape)
            start, stop = sorted(dice.sample(range(len(whole) + 1), 2))
            assert torch.equal(found[name].read_rows(slice(start, stop)), whole[start:stop]), name


def test_a_buffer_is_read_kept_and_written_in_its_own_dtype(tmp_path):
    """The bias that chooses experts: rounded to bf16 it would choose others."""
    theirs = write(tmp_path / "in", "deepseek_v3")
    model = load(tmp_path / "in", "deepseek_v3")
    (name,) = {name for name in stored_buffers(model) if ".2." in name}
    assert name.endswith("e_score_correction_bias") and torch.equal(model.get_buffer(name), theirs.get_buffer(name))
    export(model, tmp_path / "in", tmp_path / "out", "bf16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written[name], theirs.get_buffer(name)) and written["lm_head.weight"].dtype == torch.bfloat16
    assert build_model(small_config("deepseek_v3"), "bf16").get_buffer(name).dtype == torch.float32
    model.get_buffer(name).zero_()
    load_buffers(model, tmp_path / "in")  # as a resumed run does: its checkpoint has no buffer
    assert torch.equal(model.get_buffer(name), theirs.get_buffer(name))
    edit_weights(tmp_path / "in", lambda tensors: tensors.pop(name))
    assert f"missing {name}" in said_by(load, tmp_path / "in", "deepseek_v3")
    assert f"missing {name}" in said_by(load_buffers, model, tmp_path / "in")


def test_a_rank_of_other_blocks_reads_its_buffers_and_asks_for_all(tmp_path):
    """A rank along pp has some blocks: files of the whole model hold buffers of others too, and may lack none."""
    theirs = write(tmp_path / "in", "deepseek_v3")
    model = build_model(small_config("deepseek_v3"), "fp32")
    shapes = weights.file_shapes({name: each.shape for name, each in model.named_parameters()}, {})
    first, *others = model.files.buffers
    keep_blocks(model, range(2, 4), False, True)
    materialize(model, torch.device("cpu"))
    assert first not in stored_buffers(model) and stored_buffers(model).keys() == {*others}
    weights.load_weights(model, tmp_path / "in", shapes)
    assert all(torch.equal(model.get_buffer(name), theirs.get_buffer(name)) for name in others)
    edit_weights(tmp_path / "in", lambda tensors: tensors.pop(first))
    for read in (weights.load_weights, load_buffers):
        assert f"missing {first}" in said_by(read, model, tmp_path / "in", *[shapes] * (read is weights.load_weights))


def test_random_vectors_are_the_familys_own():
    """gemma's norms multiply by one more than their weight, which begins at zero."""
    for family, first in (("gemma2", 0.0), ("llama", 1.0)):
        model = build_model(small_config(family), "fp32")
        materialize(model, torch.device("cpu"))
        weights.init_weights(model, 1)
        norms = [parameter for name, parameter in model.named_parameters() if parameter.ndim == 1]
        assert norms and all((norm == first).all() for norm in norms)


@pytest.mark.parametrize(
    ("family", "text", "prefix"),
    [
        ("gemma3", "gemma3_text", None),  # transformers' own whole model
        ("gemma3", "gemma3_text", "language_model."),  # as files of today have it
        ("llama4", "llama4_text", "language_model."),
        ("mistral3", "mistral", "language_model."),
        ("gemma4", "gemma4_text", "model.language_model."),
    ],
)
def test_the_text_of_a_model_that_sees_is_found_by_its_prefix(family, text, prefix, tmp_path):
    from transformers import AutoConfig

    small = small_config(text)
    own = {"vision_config": VISION, "mm_tokens_per_image": 4} if family == "gemma3" else {}
    own["tie_word_embeddings"] = small.tie_word_embeddings
    whole = AutoConfig.for_model(family, text_config=small.to_dict(), **own)
    if prefix is None:
        torch.manual_seed(0)
        seeing = AutoModelForCausalLM.from_config(whole, dtype=torch.float32).eval()
        seeing.save_pretrained(tmp_path)
        wanted = seeing(torch.arange(3, 20)[None], use_cache=False).logits
    else:
        theirs = write(tmp_path, text)
        wanted = theirs(torch.arange(3, 20)[None], use_cache=False).logits

        def rename(tensors):
            for name in list(tensors):
                tensors[prefix + name.removeprefix("model." * prefix.startswith("model."))] = tensors.pop(name)
            tensors["vision_tower.weight"] = torch.zeros(3)

        edit_weights(tmp_path, rename)
        whole.save_pretrained(tmp_path)
    config = load_config(Model(path=str(tmp_path)), tmp_path, 64)
    assert config.model_type == text and config.tie_word_embeddings == whole.tie_word_embeddings
    model = build_model(config, "fp32")
    materialize(model, torch.device("cpu"))
    weights.load_weights(model, tmp_path)
    with open_tensors(tmp_path) as opened:
        said = model.files.describe_rest(opened)
    rest = "multi_modal_projector, vision_tower" if prefix is None else "vision_tower"
    wanted_said = f"its source has it under {prefix or 'language_model.'}, beside {rest}, not exported"
    assert said == f"the text model alone, {type(model.files.hf_model).__name__}; {wanted_said}"
    export(model, tmp_path, tmp_path / "out")
    with open_tensors(tmp_path / "out") as opened:
        assert model.files.describe_rest(opened) == ""
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert type(again).__name__.endswith("ForCausalLM")
    assert torch.equal(again(torch.arange(3, 20)[None], use_cache=False).logits, wanted)
    edit_weights(
        tmp_path, lambda tensors: tensors.pop(next(name for name in tensors if name.endswith("q_proj.weight")))
    )
    with pytest.raises(
        RecipeError, match=r"do not fit the model: missing model\.layers\.\d+\.self_attn\.q_proj\.weight$"
    ):
        weights.load_weights(model, tmp_path)
