"""Adapters as files: reads and writes peft's directory, and merges updates into the base model's weights.

Invariant: names and settings are peft's, so peft loads the adapters written here, and training goes on from peft's.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from shardbook.model.adapters import kept_parameters
from shardbook.model.weights import HIGH, LOW, MAGNITUDE, SCORE, local_rows
from shardbook.paths import whole_directory
from shardbook.recipe import Lora, RecipeError, first_line

WEIGHTS, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."  # peft's


def load_adapter(model: nn.Module, folder: Path, lora: Lora) -> None:
    """Fills the trained parameters from a directory as peft writes it. Raises RecipeError where the two do not fit."""
    try:
        settings = json.loads((folder / CONFIG).read_text())
        stored = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise RecipeError(
            f"lora.adapter = {str(folder)!r}: no adapter can be read there ({first_line(error)})"
        ) from None
    for key in ("r", "lora_alpha", "use_rslora", "use_dora"):
        here, there = getattr(lora, key), settings.get(key, Lora.model_fields[key].default)
        if here != there:
            raise RecipeError(f"lora.{key} = {here}: the adapter in {folder} has {there}; set lora.{key}={there}")
    wanted = {PREFIX + name: parameter for name, parameter in kept_parameters(model).items()}
    problems = [f"missing {name}" for name in wanted.keys() - stored.keys()]
    problems += [f"unexpected {name}" for name in stored.keys() - wanted.keys()]
    shared = wanted.keys() & stored.keys()
    problems += [
        f"{name} has shape {list(stored[name].shape)}" for name in shared if stored[name].shape != wanted[name].shape
    ]
    if problems:
        said = "; ".join(sorted(problems)[:3])
        raise RecipeError(f"lora.adapter = {str(folder)!r}: does not fit ({len(problems)} tensors: {said})")
    for name, parameter in wanted.items():
        local, rows = local_rows(parameter)
        with torch.no_grad():
            local.copy_(stored[name][rows])


def adapter_config(model_path: str, revision: str, lora: Lora, names: Iterable[str]) -> dict[str, Any]:
    """Returns the contents of adapter_config.json for adapters whose parameters have these `names`."""
    names = list(names)
    scores = SCORE in names
    targets = sorted({name.split(".")[-3] for name in names if name.endswith(f"{LOW}.weight")})
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if scores else "CAUSAL_LM",
        "base_model_name_or_path": model_path,
        "revision": revision,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": targets,
        "modules_to_save": list(dict.fromkeys([*lora.modules_to_save, *["score"] * scores])) or None,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def merge(weight: Tensor, low: Tensor, high: Tensor, magnitude: Tensor | None, lora: Lora) -> Tensor:
    """Returns the matrix, fp32 [out, in], that computes the same as `weight` and its update together."""
    merged = weight.float() + lora.scaling * (high.float() @ low.float())
    if magnitude is None:
        return merged
    return merged * (magnitude.float() / torch.linalg.vector_norm(merged, dim=1))[:, None]


def full_trained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields `(peft's name, full tensor in fp32)` of each trained parameter, one at a time. Collective."""
    for name, parameter in kept_parameters(model).items():
        value = parameter.detach().float()
        yield PREFIX + name, value.full_tensor() if isinstance(value, DTensor) else value


def save_adapter(
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    settings: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    write: bool = True,
) -> None:
    """Writes a directory that `PeftModel.from_pretrained` loads: `tensors` by peft's names, in fp32, and `settings`
    (adapter_config). With `write` False it only consumes `tensors` (the other ranks of a collective)."""
    found = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors if write}
    if not write:
        return
    with whole_directory(out) as side:
        save_file(found, side / WEIGHTS, metadata={"format": "pt"})
        (side / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        tokenizer.save_pretrained(side)


def merged_tensors(
    base: Mapping[str, Any], trained: Mapping[str, Tensor], names: Iterable[str], lora: Lora
) -> Iterator[tuple[str, Tensor]]:
    """Yields `(name, full tensor)` of the base model's `names`, each with its update merged, one at a time. `trained`:
    the trained parameters by the model's own names, in fp32."""
    for name in names:
        stem = name.removesuffix("weight")
        weight = trained.get(name)
        if weight is None:
            weight = base[name].read_rows(slice(0, base[name].shape[0]))
        if (low := trained.get(f"{stem}{LOW}.weight")) is not None:
            weight = merge(weight, low, trained[f"{stem}{HIGH}.weight"], trained.get(stem + MAGNITUDE), lora)
        yield name, weight
