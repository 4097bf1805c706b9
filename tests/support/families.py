"""The list of every causal language model of transformers: what the self-check says of each, as data and as a page.

`make families` writes docs/families.json and docs/families.md; tests/unit/support/test_families.py holds them.
"""

import json
import warnings
from pathlib import Path

import torch
import transformers
from tiny import tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS

from shardbook.model.families import text_config
from shardbook.model.selfcheck import check_family
from shardbook.model.shrink import shrink_config

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs" / "families.json", ROOT / "docs" / "families.md"
HEADS = {"head_dim": 128}
ROTATION = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
# What a class's own defaults leave out, though every released model has it.
RELEASED = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": ROTATION},
    "dbrx": {
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4},
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": (["mamba"] * 3 + ["attention"]) * 8},
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS,
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_hidden_layers": 16},
    "lfm2_moe": {"layer_types": (["conv"] * 2 + ["full_attention"]) * 10 + ["conv"] * 2},
    "ministral": HEADS,
    "mistral": {"sliding_window": 4096},
    "gemma2": {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "cohere2": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "ple_layer_ids": [2, 3],
        "eos_token_id": 248046,
    },
    "nemotron": {"num_key_value_heads": 8},
}
KINDS = {
    "packed": "exact on packed rows",
    "rows": "trained with `data.packing=false`, one document a row",
    "text": "see or hear too: their text model is trained",
    "refused": "refused",
}


def released_config(family: str) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **RELEASED.get(family, {}))


def small_config(family: str) -> PreTrainedConfig:
    """The config of a tiny model of a family, as the self-check makes it."""
    return shrink_config(released_config(family))


def write_family(folder: Path, family: str, vocabulary: int = 259, **facts) -> Path:
    """A directory with a tiny model of a family, as transformers saves it, and the byte-level tokenizer; `facts` of its
    config are set before."""
    torch.manual_seed(0)
    config = small_config(family)
    for name, value in facts.items():
        setattr(config, name, value)
    for name, value in config.to_dict().items():
        if name.startswith("vocab_size"):
            setattr(config, name, vocabulary)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name.endswith("_token_id") and isinstance(value, int):
            setattr(config, name, 0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
VISION |= {"patch_size": 4}
# what only some families' towers are told
SEES = {
    "head_dim": 8,
    "num_key_value_heads": 2,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "global_head_dim": 8,
}
SEES |= {"deepstack_visual_indexes": [], "num_position_embeddings": 4, "pixel_shuffle_ratio": 0.5, "num_channels": 3}
SEES |= {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32}
TEXTS = {"mistral3": "mistral"}  # of others: the family's own


def write_seeing(folder: Path, family: str, vocabulary: int = 259) -> Path:
    """A directory with a tiny model that sees too, as transformers saves it, and the byte-level tokenizer."""
    small = small_config(TEXTS.get(family, f"{family}_text"))
    small.vocab_size = vocabulary  # peft makes embeddings as long as the tokenizer is
    words = {"vision_config": VISION | SEES, "tie_word_embeddings": small.tie_word_embeddings}
    words |= {"mm_tokens_per_image": 4} if family == "gemma3" else {}
    whole = AutoConfig.for_model(family, text_config=small.to_dict(), **words)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(whole, dtype=torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def ask_all() -> dict[str, dict]:
    """What the self-check says of each type, by its name."""
    found = {}
    for family in sorted(MODELS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                config = released_config(family)
            except Exception as error:
                found[family] = {"kind": "refused", "why": f"it has no config of its own ({type(error).__name__})"}
                continue
            if (text := text_config(config)) is None:
                found[family] = {"kind": "refused", "why": "transformers has no text model of it by itself"}
                continue
            if text is not config:
                found[family] = {"kind": "text", "why": f"its text model is trained, as {text.model_type}"}
                continue
            said = check_family(config)
        of = {"kind": said.kind, "why": (said.refused or said.no_packing_reason).partition(" (")[0]}
        of |= {"together": said.no_parts_reason.partition(" (")[0]}
        of |= {"uncached": said.no_generation_reason.partition(" (")[0]}
        of |= {"kernels": str(said.demands).removeprefix(" and "), "frozen": len(said.without_gradient)}
        found[family] = {name: value for name, value in of.items() if value}
    return found


def write_page(found: dict[str, dict]) -> str:
    """The page of what was found."""
    lines = [
        "# Families",
        "",
        "Shardbook lists no model families in its code. Before a run it builds a small model from the model's config",
        "(smaller widths, the same switches), and compares with transformers' own model: the forward and backward of",
        "packed documents, with each document alone; what a run reads and writes, with transformers' own files; and a",
        "prompt that is continued with a cache, as samples are, with the whole forward.",
        "`make families` does this for every type of causal language model, with the default config, and writes this",
        f"page; a test keeps it in step with its data. It was made with transformers {transformers.__version__}.",
    ]
    for kind, words in KINDS.items():
        own = {family: said for family, said in found.items() if said["kind"] == kind}
        lines += ["", f"## {len(own)} {words}", "", "| type | remarks |", "|---|---|"]
        for family, said in own.items():
            remarks = [said[name] for name in ("why",) if name in said]
            if kernels := said.get("kernels"):
                remarks.append(f"attention by a dense mask: it takes {kernels}")
            if together := said.get("together"):
                remarks.append(f"one pipeline stage: {together}")
            if uncached := said.get("uncached"):
                remarks.append(f"no samples while it trains: {uncached}")
            if frozen := said.get("frozen"):
                kinds = f"{frozen} kinds of parameters get" if frozen > 1 else "one kind of parameters gets"
                remarks.append(f"{kinds} no gradient: they stay frozen")
            lines.append(f"| {family} | {'; '.join(remarks)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    everything = ask_all()
    DATA.write_text(json.dumps(everything, indent=1) + "\n")
    PAGE.write_text(write_page(everything))
