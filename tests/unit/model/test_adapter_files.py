"""Adapters of text models, as peft finds them in the class that transformers loads the whole checkpoint in."""

import json
import warnings

import pytest
import torch
from families import write_family, write_seeing
from tiny import said_by, tokenizer, write_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

from shardbook.model import adapter_files, adapters, weights
from shardbook.model.causal_lm import build_model, materialize
from shardbook.model.families import load_config
from shardbook.recipe import Lora, Model

peft = pytest.importorskip("peft")
LORA = Lora(r=2, lora_alpha=4)
IDS = torch.arange(3, 20)[None]
# by the checkpoint's family: the class that reads all of it, and where the text lies in it
SEEING = {
    "gemma3": (AutoModelForCausalLM, "model.language_model"),
    "gemma4": (AutoModelForCausalLM, "model.language_model"),
    "mistral3": (AutoModelForImageTextToText, "model.language_model"),
    "qwen3_5": (AutoModelForCausalLM, "model"),
    "llama4": (AutoModelForCausalLM, "model"),
}


def adapted(folder, lora=LORA):
    config = load_config(Model(path=str(folder)), folder, 64)
    model = build_model(config, "fp32")
    adapters.apply_lora(model, lora, torch.float32)
    materialize(model, torch.device("cpu"))
    weights.load_weights(model, folder)
    adapters.init_adapters(model, 1)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    return model.eval()


def save(model, folder, out, lora=LORA):
    trained = adapters.kept_parameters(model)
    names = adapter_files.find_peft_names(model, folder, trained)
    settings = adapter_files.adapter_config(str(folder), "main", lora, trained, names)
    adapter_files.save_adapter(out, adapter_files.full_trained(model), settings, names, tokenizer().save_pretrained)


def last_logits(model):
    places = torch.arange(IDS.shape[1])[None]
    return model.next_logits(IDS, places, torch.ones_like(IDS), DynamicCache(config=model.config))


@pytest.mark.parametrize("family", SEEING)
def test_peft_finds_each_adapter_of_a_models_text(family, tmp_path, capsys):
    (auto, at), _ = SEEING[family], write_seeing(tmp_path / "model", family)
    model = adapted(tmp_path / "model")
    save(model, tmp_path / "model", tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    is_deeper = at != "model"
    assert isinstance(settings["target_modules"], str) == is_deeper
    assert (f"whose text is under {at}" in capsys.readouterr().out) == is_deeper
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*missing adapter keys.*")
        base = auto.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
        plain = base(input_ids=IDS, use_cache=False).logits[:, -1]
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        found = loaded(input_ids=IDS, use_cache=False).logits[:, -1]
        named = peft.AutoPeftModelForCausalLM if auto is AutoModelForCausalLM else peft.AutoPeftModel
        again = named.from_pretrained(tmp_path / "adapter", dtype=torch.float32).eval()
        wanted = last_logits(model)
        assert torch.equal(again(input_ids=IDS, use_cache=False).logits[:, -1], found)
    assert (found - wanted).norm() < 1e-5 * wanted.norm() < 1e-3 * (found - plain).norm()
    inside = [name for name, module in loaded.named_modules() if hasattr(module, "lora_A")]
    assert inside and all(f".{at}." in name for name in inside)
    # and training goes on from what peft writes
    loaded.save_pretrained(tmp_path / "pefts")
    other = adapted(tmp_path / "model")
    for name, parameter in other.named_parameters():
        if "lora" in name:
            parameter.data.zero_()
    adapter_files.load_adapter(other, tmp_path / "pefts", LORA, tmp_path / "model")
    assert torch.equal(last_logits(other), wanted)


STACKS = ["experts.gate_up_proj", "experts.down_proj"]
WITH_STACKS = Lora(r=8, lora_alpha=4, target_parameters=STACKS)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixtral", {"target_parameters": STACKS}),
        ("mixtral", {"target_modules": [], "target_parameters": STACKS[1:]}),
        ("granitemoe", {"target_parameters": STACKS[:1], "use_rslora": True}),
        ("gpt_oss", {"target_parameters": STACKS}),  # [in, out]
        ("nemotron_h", {"target_modules": ["q_proj"], "target_parameters": ["experts.up_proj", "experts.down_proj"]}),
        # gates and ups beside stacked experts, for whose parts peft 0.21 takes modules of their names
        ("deepseek_v3", {"target_parameters": STACKS}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"lora_dropout": 0.05}),
        ("glm4_moe", {"target_modules": ["up_proj", "k_proj"], "target_parameters": STACKS}),
    ],
)
def test_peft_finds_the_adapters_of_stacked_experts(family, settings, tmp_path):
    lora, folder = Lora(r=8, lora_alpha=4, **settings), write_family(tmp_path / "model", family)
    model = adapted(folder, lora)
    save(model, folder, tmp_path / "adapter", lora)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*missing adapter keys.*")
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        plain = base(input_ids=IDS, use_cache=False).logits[:, -1]
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        found, wanted = loaded(input_ids=IDS, use_cache=False).logits[:, -1], last_logits(model)
    assert (found - wanted).norm() < 1e-6 * wanted.norm() < 1e-4 * (found - plain).norm()
    loaded.save_pretrained(tmp_path / "pefts")
    other = adapted(folder, lora)
    for name, parameter in other.named_parameters():
        if "lora" in name:
            parameter.data.zero_()
    adapter_files.load_adapter(other, tmp_path / "pefts", lora, folder)
    assert torch.equal(last_logits(other), wanted)


def test_an_adapter_of_stacks_says_what_it_adapts(tmp_path):
    folder = write_family(tmp_path / "model", "deepseek_v3")
    save(adapted(folder, WITH_STACKS), folder, tmp_path / "adapter", WITH_STACKS)
    without = Lora(r=8, lora_alpha=4)
    said = said_by(adapter_files.load_adapter, adapted(folder, without), tmp_path / "adapter", without, folder)
    assert "unexpected base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight" in said
    stacks = '["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]'
    assert said.endswith(f"; it adapts stacks of experts: set lora.target_parameters={stacks}")


def test_a_module_that_peft_takes_for_a_part_of_experts(tmp_path, monkeypatch):
    """Planted: named as other modules are."""
    monkeypatch.setattr(adapter_files, "FUSED", ())
    with pytest.raises(RuntimeError, match="size mismatch"):
        test_peft_finds_the_adapters_of_stacked_experts("deepseek_v3", {"target_parameters": STACKS}, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("alpha_pattern", {"q_proj": 8}), ("rank_pattern", {"q_proj": 8}), ("fan_in_fan_out", True)]
    + [("init_lora_weights", value) for value in ("pissa", "pissa_niter_4", "olora", "loftq", "corda")],
)
def test_what_would_load_as_another_model_is_refused(key, value, tmp_path):
    write_model(tmp_path / "model")
    model = adapted(tmp_path / "model")
    save(model, tmp_path / "model", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(file.read_text())
    given = adapter_files.load_adapter, model, tmp_path / "adapter", LORA, tmp_path / "model"
    for init in (True, False, "gaussian", "eva"):  # say how the training began, and change no weight of the base
        file.write_text(json.dumps(settings | {"init_lora_weights": init}))
        adapter_files.load_adapter(*given[1:])
    file.write_text(json.dumps(settings | {key: value}))
    assert f"has {key} = {value!r}, which is not read here; merge it into its base with peft" in said_by(*given)


def test_names_of_the_text_alone_are_not_found_there(tmp_path, monkeypatch):
    """Planted: names as if the checkpoint held a text model. Peft says so in a warning, and adapts nothing."""
    write_seeing(tmp_path / "model", "gemma3")
    model = adapted(tmp_path / "model")
    monkeypatch.setattr(adapter_files.PeftNames, "in_files", lambda own, name: name)
    save(model, tmp_path / "model", tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with pytest.warns(UserWarning, match="missing adapter keys"):
        peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
