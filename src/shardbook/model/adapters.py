"""LoRA: low-rank updates of frozen matrices (Hu et al., arXiv 2106.09685; rsLoRA, 2312.03732; DoRA, 2402.09353), built
into the model, so that stages, formulas and checkpoints treat them as they treat any parameter.

Invariant: a base parameter keeps its name and its bits; an adapter's name is peft's after `base_model.model.`. Applied
on the meta device, before checkpointing, compile and stage. Base and adapters of a block share its unit, so one gather
has both.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardbook.boxes import local_box
from shardbook.local_tensors import local_part
from shardbook.model.blocks import copy_module
from shardbook.model.causal_lm import CausalLM
from shardbook.model.expert_products import adapt_stacks, find_expert_stacks, pack_stacks
from shardbook.model.nf4 import PackedLinear, pack_module, packed_product, unpacked_weight
from shardbook.model.weight_files import digest_share
from shardbook.model.weights import HIGH_STACK, LOW_STACK, MAGNITUDE, is_adapter, local_rows
from shardbook.recipe import Lora, Model, RecipeError, nearest


class LoraLinear(nn.Linear):
    """A frozen linear and its update: x W^T + scaling * dropout(x) A^T B^T, A [r, in] and B [out, r]; with DoRA all of
    it times magnitude / |W + scaling * B A|, by row; the norm is taken as a constant (2402.09353, section 4.3)."""

    scaling: float
    dropout: float
    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_magnitude_vector: nn.Parameter | None
    is_on = True  # False: without the update

    def adapt(self, lora: Lora, dtype: torch.dtype) -> None:
        """Adds the trained parameters to a linear whose class was just set to this one."""
        place: dict[str, Any] = {"device": self.weight.device, "dtype": dtype}
        self.scaling = lora.scaling
        self.dropout = lora.lora_dropout
        self.lora_A = nn.Linear(self.in_features, lora.r, bias=False, **place)
        self.lora_B = nn.Linear(lora.r, self.out_features, bias=False, **place)
        magnitude = nn.Parameter(torch.empty(self.out_features, **place)) if lora.use_dora else None
        self.register_parameter(MAGNITUDE, magnitude)

    def forward(self, input: Tensor) -> Tensor:
        return self.compute(input, self.bias)

    def compute(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns what base and update make of `input`, plus `bias`."""
        if not self.is_on:
            return self.product(input, bias)
        if self.lora_magnitude_vector is not None:
            return self._decomposed(input, bias)
        low = self.lora_A(F.dropout(input, self.dropout, self.training)) * self.scaling
        return self.product(input, bias) + self.lora_B(low)

    def product(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the base's output for `input`."""
        return F.linear(input, self.weight, bias)

    def base_rows(self, dtype: torch.dtype) -> Tensor:
        """Returns this rank's rows of the base's weight, or all of them where it is gathered."""
        return local_rows(self.weight)[0].to(dtype)

    def _decomposed(self, input: Tensor, bias: Tensor | None) -> Tensor:
        kept = F.dropout(input, self.dropout, self.training)
        scale = self.magnitude() / self.row_norms()
        plain = self.product(input)
        shown = plain if kept is input else self.product(kept)
        out = plain + (scale - 1) * shown + scale * self.lora_B(self.lora_A(kept)) * self.scaling
        return out if bias is None else out + bias

    def magnitude(self) -> Tensor:
        assert self.lora_magnitude_vector is not None, "no DoRA"
        return self.lora_magnitude_vector

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """Returns |W + scaling * B A| of each row, [out]."""
        update = self.scaling * (self.lora_B.weight @ self.lora_A.weight)
        return torch.linalg.vector_norm(self.base_rows(update.dtype) + update, dim=1)


class PackedLoraLinear(LoraLinear):
    """A LoraLinear over a base in four bits."""

    def product(self, input: Tensor, bias: Tensor | None = None) -> Tensor:
        return packed_product(self, input, bias)

    def base_rows(self, dtype: torch.dtype) -> Tensor:
        return unpacked_weight(self, dtype)


def pack_blocks(model: CausalLM, dtype: torch.dtype, nested: bool) -> bool:
    """Packs every frozen matrix of a block in four bits, stored as `dtype`, those of experts too; embedding, norms and
    head stay. Returns whether there are such experts."""
    for name, module in list(_linear_maps(model)):
        if not is_adapter(name):
            pack_module(module, name, dtype, nested)
            module.__class__ = PackedLoraLinear if isinstance(module, LoraLinear) else PackedLinear
    stacked = {experts: name.rpartition(".")[0] for name, (experts, _) in _stacks(model).items()}
    for experts, name in stacked.items():
        pack_stacks(experts, name, dtype, nested)
    return bool(stacked)


def apply_lora(model: CausalLM, lora: Lora, frozen: torch.dtype) -> None:
    """Freezes everything, in the dtype `frozen`, but `modules_to_save`, which are trained in the dtype that they had;
    then adds adapters in that dtype. Raises RecipeError where a name finds no module."""
    dtype = model.head.weight.dtype
    targets, stacks, saved = find_targets(model, lora), find_target_stacks(model, lora), find_saved(model, lora)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            is_trained = any(parameter is other for kept in saved for other in kept.parameters())
            if not is_trained:
                setattr(module, name, nn.Parameter(parameter.to(frozen), requires_grad=False))
    model.tie()
    for target in targets:
        target.__class__ = LoraLinear
        assert isinstance(target, LoraLinear)
        target.adapt(lora, dtype)
    for experts, names in stacks.items():
        adapt_stacks(experts, names, lora.r, lora.scaling, dtype)
    model.is_adapted = True


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Runs, inside, the base model without its adapters."""
    adapted: list[Any] = [module for module in model.modules() if hasattr(module, "is_on")]
    for module in adapted:
        module.is_on = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_on = True


def find_targets(model: CausalLM, lora: Lora) -> list[nn.Linear]:
    """Returns the linears inside blocks that `target_modules` names. Raises RecipeError where a name finds none."""
    linears = list(_linear_maps(model))
    names = list(dict.fromkeys(name.rpartition(".")[2] for name, _ in linears))
    asked = names if lora.target_modules == "all-linear" else lora.target_modules
    if not names and not lora.target_parameters:
        kind = model.config.model_type
        raise RecipeError(f"lora.r = {lora.r}: the blocks of family {kind!r} have no linear maps; set lora.r=0")
    for name in asked:
        if name not in names:
            hint = nearest(name, names)
            if name in _outer_modules(model):
                hint = "; train it whole with lora.modules_to_save"
            if stacks := [stack for stack in _stack_names(model) if name in stack.split(".")]:
                hint = f"; experts are stacked: set lora.target_parameters={json.dumps(stacks)}"
            raise RecipeError(f"lora.target_modules: {name!r} is no linear map of a block; there are {names}{hint}")
    return [module for name, module in linears if name.rpartition(".")[2] in asked]


def find_target_stacks(model: CausalLM, lora: Lora) -> dict[Any, list[str]]:
    """Returns the stacks of experts that `target_parameters` names: of each module its parameters' names. Raises
    RecipeError where a name finds none."""
    stacks, targets = _stacks(model), dict[Any, list[str]]()
    for asked in lora.target_parameters:
        if not any(f".{name}".endswith(f".{asked}") for name in stacks):
            setting, stacked = f"lora.target_parameters: {asked!r}", _stack_names(model)
            if not stacked:
                kind = model.config.model_type
                raise RecipeError(
                    f"{setting}: family {kind!r} has no stacked experts that can be adapted; leave it out"
                )
            raise RecipeError(f"{setting} is no stack of experts; there are {stacked}{nearest(asked, stacked)}")
    for name, (experts, key) in stacks.items():
        if any(f".{name}".endswith(f".{asked}") for asked in lora.target_parameters):
            targets.setdefault(experts, []).append(key)
    return targets


def _stacks(model: CausalLM) -> dict[str, tuple[Any, str]]:
    """Returns the stacks of experts inside blocks (find_expert_stacks)."""
    inside = {module for block in model.blocks for module in block.modules()}
    return find_expert_stacks({name: module for name, module in model.named_modules() if module in inside})


def _stack_names(model: CausalLM) -> list[str]:
    """Returns the names of stacks of experts inside a block, each once."""
    before = f"{model.names.base}.{model.names.blocks}."
    return list(dict.fromkeys(name.removeprefix(before).partition(".")[2] for name in _stacks(model)))


def find_saved(model: CausalLM, lora: Lora) -> list[nn.Module]:
    """Returns the modules that `modules_to_save` names. Raises RecipeError where a name finds none, or one of two that
    are tied: peft would untie them."""
    outer = _outer_modules(model)
    for name in lora.modules_to_save:
        setting = f"lora.modules_to_save: {name!r}"
        if name not in outer:
            raise RecipeError(f"{setting} must be one of {list(outer)}{nearest(name, list(outer))}")
        if model.is_tied and outer[name] is not model.norm:
            raise RecipeError(f"{setting} is tied to another in this model, and cannot be trained apart")
    return [outer[name] for name in dict.fromkeys([*lora.modules_to_save, *["score"] * model.scores])]


def _outer_modules(model: CausalLM) -> dict[str, nn.Module]:
    """Returns the modules beside the blocks that can be trained whole, by the last parts of their names."""
    parts = (model.names.embedding, model.embedding), (model.names.head, model.head), (model.names.norm, model.norm)
    return {name.rpartition(".")[2]: module for name, module in parts if module is not None}


def _linear_maps(model: CausalLM) -> Iterator[tuple[str, nn.Linear]]:
    """Yields the linear maps inside blocks, with their names."""
    inside = {module for block in model.blocks for module in block.modules()}
    named = model.named_modules()
    return ((name, module) for name, module in named if module in inside and is_linear_map(module))


def is_linear_map(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns whether `module` computes what a linear does. A family's own class is asked: routers return more."""
    if not isinstance(module, nn.Linear) or type(module).forward in (nn.Linear.forward, LoraLinear.forward):
        return isinstance(module, nn.Linear)
    asked: Any = copy_module(module)
    given = torch.linspace(0, 1, 3).view(1, 3, 1)
    asked.weight, asked.bias = nn.Parameter(torch.linspace(-1, 1, module.out_features)[:, None], False), None
    try:
        output = asked(given)
    except RuntimeError:  # it does more with its inputs, of which it wants another number
        return False
    return isinstance(output, Tensor) and torch.equal(output, F.linear(given, asked.weight))


def kept_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that a checkpoint and an export hold: all or, with adapters or a teacher, the trained."""
    named = model.named_parameters()
    is_adapted = getattr(model, "is_adapted", False)
    return {name: parameter for name, parameter in named if parameter.requires_grad or not is_adapted}


def weights_identity(model: Model, seed: int, folder: Path) -> str:
    """Returns a text that identifies a run's initial weights: a digest of the weights files of `folder`, or the seed of
    random ones; and their quantisation. Collective."""
    named = f"random, seed {seed}" if model.init == "random" else digest_weights(folder)
    if model.load_in_4bit:
        named += ", nf4" + ", double" * model.bnb_4bit_use_double_quant
    return named


def digest_weights(folder: Path) -> str:
    """Returns a digest of every byte of the weights files of `folder`. Collective: each rank hashes its share."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shares: list[Any] = [None] * ranks
    dist.all_gather_object(shares, digest_share(folder, rank, ranks))
    digest = hashlib.sha256(b"".join(piece for pieces in zip_longest(*shares, fillvalue=b"") for piece in pieces))
    return digest.hexdigest()[:16]


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Fills adapters: A uniform within 1 / sqrt(in), B zero, magnitudes the rows' norms, so that the update begins at
    zero, as peft's does. The base must be loaded before.

    A pure function of (seed, name, device type): full tensors are drawn, and each rank keeps its part.
    """
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            _draw_low(module.lora_A.weight, seed, name)
            local_part(module.lora_B.weight).zero_()
            if module.lora_magnitude_vector is not None:  # sharded along the rows, as the weight is
                norms = torch.linalg.vector_norm(module.base_rows(torch.float32), dim=1)
                local_rows(module.lora_magnitude_vector)[0].copy_(norms)
    for name, parameter in model.named_parameters():
        if name.endswith(LOW_STACK):
            _draw_low(parameter, seed, name.removesuffix(LOW_STACK))
        elif name.endswith(HIGH_STACK):
            local_part(parameter).zero_()


def _draw_low(parameter: Tensor, seed: int, name: str) -> None:
    """Fills A [r, in], or those of all experts, [experts * r, in], of the matrix `name`."""
    low, box = local_part(parameter), local_box(parameter)
    number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
    generator = torch.Generator(low.device).manual_seed(number)
    bound = 1 / math.sqrt(parameter.shape[1])
    full = torch.empty(parameter.shape, device=low.device)
    low.copy_(full.uniform_(-bound, bound, generator=generator)[box.slices])
