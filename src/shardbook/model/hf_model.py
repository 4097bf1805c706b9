"""Parts of transformers' model of a config: its base model, blocks, embedding, last norm and head, found by asking.

Invariant: no family is named. Everything lies on the meta device but buffers, whose numbers the family's own
`initialize_weights` makes on the host: no file has most of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from shardbook.model.blocks import copy_module, put
from shardbook.model.experts import stack_rows

Transform = Callable[[Tensor], Tensor]
IS_INITIALIZED = "_is_hf_initialized"  # transformers' mark of a tensor that its initialize_weights leaves as it is
IN_FP32 = "_keep_in_fp32_modules_strict"  # transformers' name of what keeps fp32 in a bf16 model: biases of routers


class Unfit(Exception):
    """The reason why transformers' model of a config cannot be trained here."""


@dataclass(frozen=True)
class Names:
    """The names of the parts of transformers' model: of the base model and the head inside it, of the others inside the
    base model. `norm` is empty where no last norm is found."""

    base: str
    head: str
    embedding: str
    blocks: str
    norm: str


@dataclass(frozen=True)
class Parts:
    """Transformers' model of a config, on the meta device, and the names of its parts."""

    hf_model: PreTrainedModel
    names: Names
    is_tied: bool  # head and embedding are one parameter
    # by their names in `hf_model`: the family's first values of its vectors, and its shapes of stacked parameters
    vectors: dict[str, Tensor]
    stacked: dict[str, torch.Size]

    @property
    def base(self) -> Any:
        return getattr(self.hf_model, self.names.base)

    @property
    def head(self) -> Any:
        return getattr(self.hf_model, self.names.head)


def split_model(config: PreTrainedConfig, dtype: torch.dtype) -> Parts:
    """Returns the parts of transformers' causal LM of `config`. Raises Unfit where it has none."""
    kernel = config._attn_implementation
    with torch.device("meta"):
        # some choose classes by the kernel's name, and know only transformers' own
        hf_model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    config._attn_implementation = kernel
    for module in hf_model.modules():
        if isinstance(inner := getattr(module, "config", None), PreTrainedConfig):
            inner._attn_implementation = kernel
    children = {child: name for name, child in hf_model.named_children()}
    base = hf_model.base_model
    if base is hf_model:  # where the prefix names no child
        base = next((child for child in children if isinstance(child, PreTrainedModel)), hf_model)
    head, embedding = hf_model.get_output_embeddings(), base.get_input_embeddings()
    if base not in children or head not in children or not isinstance(head, nn.Linear):
        raise Unfit("its base model or its head is not found")
    inside = {module: name for name, module in base.named_modules()}
    count = config.get_text_config().num_hidden_layers
    lists = [each for each in inside if type(each) is nn.ModuleList]
    blocks = next((each for each in lists if len(each) == count), None)
    if blocks is None:
        blocks = next((each for each in lists if isinstance(each[0], GradientCheckpointingLayer)), None)
    if blocks is None or embedding not in inside:
        raise Unfit("its blocks or its embedding are not found")
    parameters = [parameter for block in blocks for parameter in set(block.parameters())]
    if len(parameters) > len(set(parameters)):
        raise Unfit("its blocks share parameters")
    vectors, stacked = fill_buffers(base), stack_rows(base)
    hf_model.tie_weights()
    norm = find_last_norm(base, inside[blocks], config)
    names = Names(children[base], children[head], inside[embedding], inside[blocks], norm)
    prefix = f"{names.base}."
    vectors = {prefix + name: vector for name, vector in vectors.items()}
    stacked = {prefix + name: shape for name, shape in stacked.items()}
    return Parts(hf_model, names, head.weight is embedding.weight, vectors, stacked)


def find_last_norm(base: nn.Module, blocks: str, config: PreTrainedConfig) -> str:
    """Returns the name, inside `base`, of the norm of what the last of the `blocks` returns; empty where none is found.
    It is the last part of the family's pipeline plan, else the first norm that is made after the blocks, beside them;
    not one without parameters, which a forward may apply before them too."""
    owner, _, last = blocks.rpartition(".")
    plan, beside = [*(getattr(config.get_text_config(), "base_model_pp_plan", None) or {})], base.get_submodule(owner)
    if plan and plan[-1] != blocks and plan[-1] in dict(base.named_modules()):
        return plan[-1]
    names = [name for name, _ in beside.named_children()]
    for name in names[names.index(last) + 1 :]:
        module = beside.get_submodule(name)
        if "norm" in type(module).__name__.lower() and [*module.parameters()]:
            return f"{owner}.{name}" if owner else name
    return ""


def fill_buffers(base: PreTrainedModel) -> dict[str, Tensor]:
    """Makes on the host the numbers of all buffers of `base`, which lies on the meta device. Returns the first values
    of its vectors by name: the family's own, the same in every process."""
    on_meta = dict(base.named_parameters())
    for parameter in on_meta.values():
        setattr(parameter, IS_INITIALIZED, True)
    in_fp32 = tuple(getattr(base, IN_FP32, None) or ())
    for stem, module in base.named_modules():
        vars(module).pop(IS_INITIALIZED, None)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 1:
                setattr(module, name, nn.Parameter(torch.zeros_like(parameter, device="cpu")))
        for name, buffer in list(module.named_buffers(recurse=False)):
            is_exact = any(word in f"{stem}.{name}" for word in in_fp32)
            dtype = torch.float32 if is_exact else buffer.dtype
            setattr(module, name, torch.zeros_like(buffer, dtype=dtype, device="cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base.initialize_weights()
    vectors = {}
    for name, parameter in on_meta.items():
        if parameter.ndim == 1:
            vectors[name] = base.get_parameter(name).detach()
            put(base, name, parameter)
    for module in base.modules():
        # The numbers hold for every row that load_config lets in. Without this, transformers would read the longest
        # row of "dynamic" and "longrope" from the device (a host sync) in every forward.
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            module.rope_type = dict.fromkeys(kinds, "default")  # type: ignore[assignment]
    return vectors


class _Output:
    """Stands for a base model's output, which has nothing but its last hidden states."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class _Stub(nn.Module):
    """Stands for a base model: returns its input embeddings as its last hidden states."""

    def __init__(self, base: nn.Module):
        super().__init__()
        vars(self)["of"] = base  # not registered: it is none of its parts

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["of"], name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **named: Any) -> _Output:
        return _Output(inputs_embeds)


class _SameLogits(nn.Identity):
    """Stands for a head, whose weight some families ask for its dtype."""

    weight = torch.empty(0)


def find_logit_transform(parts: Parts) -> tuple[Transform | None, Transform | None]:
    """Returns the change that the family's own forward makes to its head's logits: as a change of hidden states before
    the head where that is the same (a scale: logits are many more numbers), else as a change of logits; None for no
    change."""
    shell = copy_module(parts.hf_model)
    setattr(shell, parts.names.base, _Stub(parts.base))
    setattr(shell, parts.names.head, _SameLogits())

    def logit_transform(logits: Tensor) -> Tensor:
        return shell(inputs_embeds=logits[None], use_cache=False).logits[0]

    given = torch.linspace(-3, 40, 32, dtype=torch.float64).view(2, 16)
    with torch.no_grad():
        try:
            output = logit_transform(given).to(given.dtype)
        except Exception as error:
            raise Unfit(f"what follows its head is not found ({type(error).__name__})") from None
        if torch.equal(output, given):
            return None, None
        factor = (output[0, 0] / given[0, 0]).item()
        divisor = float(f"{1 / factor:.14g}")
        for scale in (lambda hidden: hidden / divisor, lambda hidden: hidden * factor):
            if torch.equal(scale(given), output):
                return scale, None
    return None, logit_transform
