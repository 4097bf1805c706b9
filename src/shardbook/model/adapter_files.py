"""Adapters as files: reads and writes peft's directory, and merges updates into the base model's weights.

Invariant: names and settings are peft's, so peft loads the adapters written here, and training goes on from peft's.
"""

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto import modeling_auto as tables

from shardbook.boxes import local_box
from shardbook.local_tensors import local_part
from shardbook.model.adapters import kept_parameters
from shardbook.model.causal_lm import CausalLM
from shardbook.model.expert_products import MATRICES
from shardbook.model.weights import HIGH, HIGH_STACK, LOW, LOW_STACK, MAGNITUDE, SCORE, Shapes, full_tensors
from shardbook.paths import whole_directory
from shardbook.recipe import Lora, RecipeError, first_line
from shardbook.terminal import print_line

WEIGHTS, CONFIG, PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."  # peft's
# Modules that peft 0.21 takes for parts of stacked experts, in a model that has some: it would adapt these in their
# place. A module's weight that is named as a parameter it leaves alone.
FUSED = ("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3")


@dataclass(frozen=True)
class PeftNames:
    """The names that a text model's parameters have in peft's files: those of the class in which transformers loads the
    base model's files, which may see or hear too."""

    kind: str  # the class
    library: str  # its module, where no class of peft's finds it by the task; empty: one does
    base: tuple[str, str]  # the name of the model's base model, in the model and in the files
    blocks: str  # of its list of blocks, inside the base model
    stacks: Mapping[str, int] = field(default_factory=dict)  # of stacked experts' updates, by name: how many experts
    has_stacks: bool = False  # the model has stacked experts, adapted or not

    @property
    def is_deeper(self) -> bool:
        return len(set(self.base)) > 1

    def in_files(self, name: str) -> str:
        base, base_in_files = self.base
        if name in self.stacks:
            name = self._in_wrappers(name)
        return base_in_files + name.removeprefix(base) if name.startswith(f"{base}.") else name

    def _in_wrappers(self, name: str) -> str:
        """Returns peft's name of a stack's update: it wraps the experts for each stack, the first one inside."""
        stem, end = name.rpartition(".")[0], LOW_STACK if name.endswith(LOW_STACK) else HIGH_STACK
        beside = [each for each in self.stacks if each.rpartition(".")[0] == stem and each.endswith(end)]
        return f"{stem}{'.base_layer' * (len(beside) - 1 - beside.index(name))}.{end[1:]}.weight"

    def to_file(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the parameter `name` as peft's files hold it: B of stacked experts, here [experts * out, r], is [out,
        r * experts] there, a column of each expert after another."""
        if not name.endswith(HIGH_STACK):
            return tensor
        return tensor.unflatten(0, (self.stacks[name], -1)).permute(1, 2, 0).flatten(1)

    def from_file(self, name: str, tensor: Tensor) -> Tensor:
        """Returns what `to_file` was given."""
        if not name.endswith(HIGH_STACK):
            return tensor
        return tensor.unflatten(1, (-1, self.stacks[name])).permute(2, 0, 1).flatten(0, 1)

    def targets(self, parameters: Iterable[str], lora: Lora) -> dict[str, Any]:
        """Returns peft's settings of what is adapted, for adapters whose `parameters` have these names: last names of
        modules or, where other parts have modules of these names too, a pattern of whole names; names of stacks; and
        the dropout, which no adapter of a parameter can have, nor needs once it is trained."""
        modules = [name.rsplit(".", 2)[0] for name in parameters if name.endswith(f"{LOW}.weight")]
        beside = [name for name in modules if self.has_stacks and name.rpartition(".")[2] in FUSED]
        if beside and lora.use_dora:
            last = sorted({name.rpartition(".")[2] for name in beside})
            print_line(f"export   peft 0.21 reads no DoRA of {', '.join(last)} beside stacked experts: export --merge")
            beside = []
        last = sorted({name.rpartition(".")[2] for name in modules if name not in beside})
        inside = re.escape(f"{self.base[1]}.{self.blocks}.")
        stacks = [name.removesuffix(LOW_STACK) for name in self.stacks if name.endswith(LOW_STACK)]
        whole_names = [*stacks, *(f"{name}.weight" for name in beside)]
        dropout = {"lora_dropout": 0.0 if beside else lora.lora_dropout}
        if self.is_deeper:
            return dropout | {
                "target_modules": rf"{inside}\d+\..*\b({'|'.join(last)})" if last else [],
                "target_parameters": [self.in_files(name) for name in whole_names] or None,
            }
        before = f"{self.base[0]}.{self.blocks}."
        ends = sorted({name.removeprefix(before).partition(".")[2] for name in whole_names})
        return dropout | {"target_modules": last, "target_parameters": ends or None}


def find_peft_names(model: CausalLM, folder: Path, trained: Iterable[str]) -> PeftNames:
    """Returns the names of `model` in peft's files, where `folder` has its config. `trained`: the names of the trained
    parameters of the whole model."""
    base, blocks = model.names.base, model.names.blocks
    adapted = [name.removesuffix(LOW_STACK) for name in trained if name.endswith(LOW_STACK)]
    shapes = model.files.stacked
    stacks = {name + end: shapes[name][0] for name in adapted for end in (LOW_STACK, HIGH_STACK)}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    is_seen = config.model_type not in tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = tables.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | tables.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto: Any = AutoModelForImageTextToText if is_seen else AutoModelForCausalLM
    of_model: Any = blocks, stacks, bool(shapes)
    plain = PeftNames("", "", (base, base), *of_model)
    if config.get_text_config() is config or model.scores or config.model_type not in known:
        return plain
    with torch.device("meta"):
        hf_model = auto.from_config(config)
    base_in_files = next((name for name, module in hf_model.named_modules() if type(module) is type(model.base)), None)
    kind = type(hf_model).__name__, type(hf_model).__module__ * is_seen
    return plain if base_in_files is None else PeftNames(*kind, (base, base_in_files), *of_model)


def load_adapter(model: CausalLM, folder: Path, lora: Lora, base: Path, kept_shapes: Shapes | None = None) -> None:
    """Fills the trained parameters of a model, whose base `base` is the directory of, from a directory as peft writes
    it. `kept_shapes`: of the trained parameters of the whole model, of which `model` may have a part. Raises
    RecipeError where the two do not fit."""
    setting = f"lora.adapter = {str(folder)!r}"
    try:
        settings = json.loads((folder / CONFIG).read_text())
        stored = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise RecipeError(f"{setting}: no adapter can be read there ({first_line(error)})") from None
    for key in ("r", "lora_alpha", "use_rslora", "use_dora"):
        asked, stated = getattr(lora, key), settings.get(key, Lora.model_fields[key].default)
        if asked != stated:
            raise RecipeError(f"lora.{key} = {asked}: the adapter in {folder} has {stated}; set lora.{key}={stated}")
    changes = str(settings.get("init_lora_weights")).lower().startswith(("pissa", "olora", "loftq", "corda"))
    for key in ("alpha_pattern", "rank_pattern", "fan_in_fan_out", *["init_lora_weights"] * changes):
        if settings.get(key):
            way_out = "merge it into its base with peft (merge_and_unload), and set model.path to that"
            raise RecipeError(f"{setting}: has {key} = {settings[key]!r}, which is not read here; {way_out}")
    parameters = kept_parameters(model)
    shapes = kept_shapes or {name: parameter.shape for name, parameter in parameters.items()}
    names = find_peft_names(model, base, shapes)
    empty = ((name, names.to_file(name, torch.empty(shape, device="meta"))) for name, shape in shapes.items())
    wanted = {PREFIX + names.in_files(name): list(tensor.shape) for name, tensor in empty}
    problems = [f"missing {name}" for name in wanted.keys() - stored.keys()]
    problems += [f"unexpected {name}" for name in stored.keys() - wanted.keys()]
    both = ((name, list(stored[name].shape), wanted[name]) for name in wanted.keys() & stored.keys())
    problems += [f"{name} has shape {shape}" for name, shape, fitting in both if shape != fitting]
    stacks = [name for name in settings.get("target_parameters") or [] if name.rpartition(".")[2] in MATRICES]
    hint = f"; it adapts stacks of experts: set lora.target_parameters={json.dumps(sorted(stacks))}"
    if problems:
        few = "; ".join(sorted(problems)[:3])
        more = hint if stacks and not lora.target_parameters else ""
        raise RecipeError(f"{setting}: does not fit ({len(problems)} tensors: {few}){more}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            whole_update = names.from_file(name, stored[PREFIX + names.in_files(name)])
            local_part(parameter).copy_(whole_update[local_box(parameter).slices])


def adapter_config(
    model_path: str, revision: str, lora: Lora, parameters: Iterable[str], names: PeftNames
) -> dict[str, Any]:
    """Returns the contents of adapter_config.json for adapters whose `parameters` have these names in the model."""
    parameters = list(parameters)
    scores = SCORE in parameters
    mapping = {"base_model_class": names.kind, "parent_library": names.library} if names.library else None
    return {
        "peft_type": "LORA",
        "task_type": ("SEQ_CLS" if scores else "CAUSAL_LM") if mapping is None else None,
        "auto_mapping": mapping,
        "base_model_name_or_path": model_path,
        "revision": revision,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        **names.targets(parameters, lora),
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


def merge_stack(weight: Tensor, low: Tensor, high: Tensor, is_transposed: bool, lora: Lora) -> Tensor:
    """Returns the stack of experts, fp32 and its rows those of `weight`, that computes the same as `weight` and its
    update together."""
    experts, merged = len(low) // lora.r, torch.empty(weight.shape)
    stacks = (each.chunk(experts) for each in (merged, weight, low, high))
    for into, matrix, lower, higher in zip(*stacks, strict=True):
        if is_transposed:
            into.copy_(merge(matrix.T, lower, higher, None, lora).T)
        else:
            into.copy_(merge(matrix, lower, higher, None, lora))
    return merged


def full_trained(model: nn.Module, kept_shapes: Shapes | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields `(name, full tensor in fp32)` of each trained parameter, one at a time. `kept_shapes`: of those of the
    whole model, which rank 0 gets where every rank has a part of them. Collective."""
    return full_tensors(model, "fp32", kept_shapes, kept_parameters(model))


def save_adapter(
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    settings: dict[str, Any],
    names: PeftNames,
    beside: Callable[[Path], None],
    write: bool = True,
) -> None:
    """Writes a directory that `PeftModel.from_pretrained` loads: `tensors` by the model's names, in fp32, `settings`
    (adapter_config), and what `beside` writes into it. With `write` False it only consumes `tensors` (the other ranks
    of a collective)."""
    every = ((PREFIX + names.in_files(name), names.to_file(name, tensor)) for name, tensor in tensors)
    peft_tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in every if write}
    if not write:
        return
    if names.is_deeper:
        print_line(f"export   an adapter of {names.kind}, whose text is under {names.base[1]}")
    with whole_directory(out) as side:
        save_file(peft_tensors, side / WEIGHTS, metadata={"format": "pt"})
        (side / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        beside(side)


def merged_tensors(
    base: Mapping[str, Any], trained: Mapping[str, Tensor], names: Iterable[str], transposed: Container[str], lora: Lora
) -> Iterator[tuple[str, Tensor]]:
    """Yields `(name, full tensor)` of the base model's `names`, each with its update merged, one at a time. `trained`:
    the trained parameters by the model's own names, in fp32; `transposed`: the stacks whose matrices are [in, out]."""
    for name in names:
        stem = name.removesuffix("weight")
        weight = trained.get(name)
        if weight is None:
            weight = base[name].read_rows(slice(0, base[name].shape[0]))
        if (low := trained.get(f"{stem}{LOW}.weight")) is not None:
            weight = merge(weight, low, trained[f"{stem}{HIGH}.weight"], trained.get(stem + MAGNITUDE), lora)
        elif (low := trained.get(name + LOW_STACK)) is not None:
            weight = merge_stack(weight, low, trained[name + HIGH_STACK], name in transposed, lora)
        yield name, weight
