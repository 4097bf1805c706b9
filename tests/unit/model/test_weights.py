"""Safetensors in and out: everything wrong is named at once; what goes out loads in transformers bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import edit_weights, tokenizer, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardbook.model.weights as weights
from shardbook.model.causal_lm import build_model, materialize
from shardbook.model.families import load_config
from shardbook.model.weight_files import FLOATS, open_tensors
from shardbook.paths import whole_directory
from shardbook.recipe import Model, RecipeError


def load(folder):
    model = build_model(load_config(Model(path=str(folder)), folder, 64), "fp32")
    materialize(model, torch.device("cpu"))
    weights.load_weights(model, folder)
    return model


def export(model, folder, out, dtype="fp32"):
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    given = shapes, model.config, tokenizer(), folder, dtype
    weights.save_weights(out, weights.full_tensors(model, dtype), *given, True, model.files, {})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("limit", [None, 20_000])
def test_what_is_written_loads_in_transformers_with_bitwise_equal_logits(tmp_path, monkeypatch, tied, limit):
    write_model(tmp_path / "in", tied=tied)
    if limit:
        monkeypatch.setattr(weights, "SHARD_BYTES", limit)
    export(load(tmp_path / "in"), tmp_path / "in", tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) == (1 if not limit else 6 if tied else 7), files
    assert all((tmp_path / "out" / file).stat().st_size < (limit or 10**9) + 36_000 for file in files)
    ids = torch.arange(40)[None]
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(ids).logits for name in ("in", "out")
    )
    assert torch.equal(before, after)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer().chat_template
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32  # says what it holds
    assert not list(tmp_path.glob("*.partial"))
    load(tmp_path / "out")  # and we read what we write


@pytest.mark.parametrize(
    ("source", "stops", "wanted"),
    [
        (None, [], None),
        (None, [0], None),  # the config's own
        (None, [0, 258], {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": [0, 258]}),
        ({"eos_token_id": [0, 258], "top_p": 0.9}, [258], {"eos_token_id": [0, 258], "top_p": 0.9}),
        ({"eos_token_id": 0, "top_p": 0.9}, [0, 258], {"eos_token_id": [0, 258], "top_p": 0.9}),
        ({"top_p": 0.9}, [0], {"top_p": 0.9}),
        ({"top_p": 0.9}, [0, 258], {"eos_token_id": [0, 258], "top_p": 0.9}),
    ],
)
def test_what_was_learned_ends_what_is_generated(source, stops, wanted, tmp_path):
    write_model(tmp_path / "in")
    file, model = "generation_config.json", load(tmp_path / "in")
    (tmp_path / "in" / file).unlink(missing_ok=True)
    if source is not None:
        (tmp_path / "in" / file).write_text(json.dumps(source))
    shapes, tensors = {n: p.shape for n, p in model.named_parameters()}, weights.full_tensors(model, "fp32")
    given = shapes, model.config, tokenizer(), tmp_path / "in", "fp32"
    weights.save_weights(tmp_path / "out", tensors, *given, True, model.files, {}, stops)
    written = tmp_path / "out" / file
    assert (json.loads(written.read_text()) if written.is_file() else None) == wanted
    if wanted and "eos_token_id" in wanted:
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [0, 258]


def test_bf16_export(tmp_path):
    write_model(tmp_path / "in")
    model = load(tmp_path / "in")
    export(model, tmp_path / "in", tmp_path / "out", "bf16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], p.to(torch.bfloat16)) for name, p in model.named_parameters())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_everything_that_does_not_fit_is_in_one_error(tmp_path):
    write_model(tmp_path, tied=False)

    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["model.extra.weight"] = torch.zeros(2)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # old files hold it; it means nothing

    edit_weights(tmp_path, spoil)
    with pytest.raises(RecipeError) as error:
        load(tmp_path)
    problems = str(error.value).split(": ", 1)[1].split("; ")
    assert problems == [
        "missing model.norm.weight",
        "unexpected model.extra.weight",
        "model.layers.0.mlp.up_proj.weight has shape [3, 4], the model wants [48, 32]",
        "lm_head.weight has dtype I8, not a float",
    ]


def test_a_tied_model_may_bring_its_head_and_an_untied_one_must(tmp_path):
    write_model(tmp_path)
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(tmp_path)
    config = load_config(Model(path=str(tmp_path)), tmp_path, 64)
    for wrong in (lambda head: head[41].add_(1e-3), lambda head: head[258, 31].neg_()):
        keep = load_file(tmp_path / "model.safetensors")
        edit_weights(tmp_path, lambda t, wrong=wrong: wrong(t["lm_head.weight"]))
        with pytest.raises(
            RecipeError, match=r"tie_word_embeddings is true .* differs from the embedding in rows 0 to 258; set"
        ):
            load(tmp_path)
        save_file(keep, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": torch.cat([t["lm_head.weight"], torch.ones(5, 32)])}))
    load(tmp_path)  # rows of padding
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}))
    with pytest.raises(RecipeError, match=r"lm_head.weight has dtype I8, not a float"):
        load(tmp_path)
    config.tie_word_embeddings = False
    config.save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(RecipeError, match=r"missing lm_head.weight"):
        load(tmp_path)


def test_files_cut_short_or_absent(tmp_path):
    write_model(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for length in (len(content) - 1, 100, 3):
        path.write_bytes(content[:length])
        with pytest.raises(RecipeError, match=r"model.safetensors: truncated or not safetensors"):
            load(tmp_path)
    path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(RecipeError, match=r"no model.safetensors .*pickled weights are not read"):
        load(tmp_path)
    (tmp_path / weights.INDEX).write_text('{"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(RecipeError, match=r"model-00001-of-00001.safetensors: named in .*, but not there"):
        load(tmp_path)
    for damaged in ('{"weight_map": {"model.norm', "{}", "[]"):
        (tmp_path / weights.INDEX).write_text(damaged)
        with pytest.raises(RecipeError, match=r"model.safetensors.index.json: damaged \((JSON|Key|Type)"):
            load(tmp_path)


def shift_first(header):
    first = min((entry for name, entry in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"])
    first["data_offsets"][0] += 4


def shrink_norm(header):
    header["model.norm.weight"]["shape"][0] -= 1


@pytest.mark.parametrize(
    "damage, reason",
    [
        (shift_first, r"is said to be at bytes 4 to"),
        (shrink_norm, r"model.norm.weight is said to be at bytes"),
        (lambda header: header.pop("model.norm.weight"), r"said to be|its header says"),
        (lambda header: header["model.norm.weight"].pop("dtype"), r"its header cannot be read: KeyError"),
    ],
)
def test_a_header_that_is_not_the_whole_file_is_refused(tmp_path, damage, reason):
    path = write_model(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    damage(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(RecipeError, match=r"model.safetensors: truncated or not safetensors \(.*" + reason) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)
    for spoiled in (content + b"0", content[:8] + b"x" * length + content[8 + length :], b"\xff" * 4096):
        path.write_bytes(spoiled)
        with pytest.raises(RecipeError, match=r"model.safetensors: truncated or not safetensors"):
            load(tmp_path)


def test_rows_are_the_librarys_bit_for_bit(tmp_path):
    made = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    tensors = {str(dtype): made.to(dtype) for dtype in FLOATS.values()} | {"vector": made[:, 0].clone()}
    save_file(tensors | {"step": torch.tensor(3)}, tmp_path / "model.safetensors")
    with open_tensors(tmp_path) as stored:
        assert stored["step"].dtype == "I64" and stored["step"].shape == ()
        for name, tensor in tensors.items():
            for rows in (slice(0, 7), slice(2, 5), slice(6, 7), slice(7, 7)):
                read = stored[name].read_rows(rows)
                assert read.dtype == tensor.dtype and torch.equal(read, tensor[rows])


def test_random_weights_depend_on_the_seed_only(tmp_path):
    write_model(tmp_path)
    config = load_config(Model(path=str(tmp_path)), tmp_path, 64)

    def draw(seed):
        model = build_model(config, "fp32")
        materialize(model, torch.device("cpu"))
        weights.init_weights(model, seed)
        return dict(model.named_parameters())

    first, again, other = draw(1), draw(1), draw(2)
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert not torch.equal(parameter, other[name])
            assert parameter.std().item() == pytest.approx(config.initializer_range, rel=0.1)


def test_a_base_model_is_named_as_any_program_can_load_it(tmp_path, monkeypatch):
    from shardbook.model import embedded
    from shardbook.model.hub import loadable

    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "embedded_folder", lambda name: tmp_path / "converted")
    assert loadable("./model") == str(tmp_path / "model") and loadable("owner/name") == "owner/name"
    assert loadable(embedded.MODEL) == str(tmp_path / "converted")


def test_two_makers_of_one_directory_do_not_remove_each_others_parts(tmp_path):
    """Also of equal pids, as in two containers on one cache. The first that is complete stays."""
    out = tmp_path / "rows"
    with whole_directory(out, first_stays=True) as slow:
        (slow / "part").write_text("slow")
        with whole_directory(out, first_stays=True) as fast:
            (fast / "part").write_text("fast")
        assert (slow / "part").read_text() == "slow"
    assert (out / "part").read_text() == "fast" and [*tmp_path.iterdir()] == [out]
