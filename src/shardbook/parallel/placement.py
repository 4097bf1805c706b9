"""A model placed on ranks: made from a recipe, a model's config and a number of ranks, before any memory is taken.

Invariant: a run, its rehearsal, its simulation and its plan build it by `place_model`, so all refuse the same recipes.
The model lies on the meta device, and no process group is needed.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from shardbook.model.adapters import apply_lora, pack_blocks
from shardbook.model.attention import KERNELS, Kernel, choose_attention, kernel_on_gpu
from shardbook.model.causal_lm import CausalLM, build_model
from shardbook.model.dtypes import DTYPES
from shardbook.model.experts import expert_width, has_interface
from shardbook.model.flops import Flops, count_flops, experts_per_token
from shardbook.model.marks import STACKED
from shardbook.model.routers import check_routers, count_choices, freeze_routers
from shardbook.model.selfcheck import check_family, freeze
from shardbook.model.shrink import keep_layers
from shardbook.model.teacher import attach_teacher
from shardbook.parallel.context import apply_context_parallel
from shardbook.parallel.expert_load import count_experts
from shardbook.parallel.experts import apply_expert_parallel, expert_parameters, find_experts
from shardbook.parallel.layout import Layout, build_layout
from shardbook.parallel.pipeline import apply_pipeline_parallel
from shardbook.parallel.router_bias import check_biases, find_biases
from shardbook.parallel.schedule import Pipeline
from shardbook.parallel.tensor import apply_tensor_parallel
from shardbook.parallel.units import Placement, note_shards, place_whole
from shardbook.recipe import Recipe, RecipeError


@dataclass(frozen=True)
class World:
    """The ranks that a model is placed on, and which of them this is."""

    size: int
    ranks_per_node: int
    rank: int = 0
    device: torch.device | None = None  # of this rank; None: a GPU that this machine does not have
    expert_load: float = 1.0  # of a plan: the rows that this rank's experts receive, as a multiple of the mean

    @property
    def device_type(self) -> str:
        return self.device.type if self.device else "cuda"

    @property
    def device_name(self) -> str:
        """The name that CUDA has for the device; empty for a GPU that this machine does not have."""
        if self.device_type == "cuda":
            return torch.cuda.get_device_name() if self.device else ""
        return "CPU"


@dataclass(frozen=True)
class LocalModel:
    """The part of a model that one rank has under tensor, context and pipeline parallel, and facts of the whole."""

    model: CausalLM
    pipeline: Pipeline
    chunks: list[CausalLM]  # the chunks of layers, each of which runs by itself
    placements: dict[str, Placement]  # of every parameter of the whole model
    flops: Flops  # of the whole model
    experts: int  # of a block of the whole model, where ranks along ep share them; else 0
    expert_width: int  # Layout.expert_width
    counted: tuple[int, ...]  # Layout.counted
    biases: dict[str, list[int]]  # Layout.biases


@dataclass(frozen=True)
class PlacedModel:
    """A recipe without `auto`, with its model and layout as one rank of a world has them."""

    recipe: Recipe
    world: World
    config: PreTrainedConfig
    teacher: PreTrainedConfig | None
    attention: Kernel
    model: CausalLM
    layout: Layout
    flops: Flops  # of the whole model

    def with_layers(self, layers: int) -> "PlacedModel":
        """Returns this with its first `layers` layers."""
        return place_model(self.recipe, self.world, keep_layers(self.config, range(layers)), self.teacher)


def place_model(
    recipe: Recipe, world: World, config: PreTrainedConfig, teacher: PreTrainedConfig | None
) -> PlacedModel:
    """Returns `recipe` (without `auto`) with a model of `config` on `world`, beside a model of the config `teacher`.
    Raises RecipeError where attention, adapters, mesh or tiers do not fit the model, the device or each other."""
    asked, dtype = recipe.model.attention, DTYPES[recipe.precision.params]
    demands = check_family(config).demands
    if world.device:
        attention = choose_attention(asked, config, world.device, dtype, demands)
    else:
        attention = kernel_on_gpu(asked, demands)
    local = build_local(recipe, config, attention, teacher, world.rank, world.size)
    layout = layout_of(recipe, local, world)
    for module in find_experts(local.model):
        module.ep_group.load = layout.expert_load
    return PlacedModel(recipe, world, config, teacher, attention, local.model, layout, local.flops)


def check_packed_experts(recipe: Recipe) -> None:
    """Raises RecipeError where `recipe` asks for what does not go with experts in four bits, of which the host knows
    the rows of each: those of parallel.ep_size (recipe/refusals.py) that hold without it too."""
    if recipe.train.compile and recipe.activation.checkpointing != "none":
        raise RecipeError(
            "train.compile = true with experts in four bits: torch's compiler recomputes no block that it compiles in "
            "parts, and they part it; set train.compile=false or activation.checkpointing=none"
        )
    check_schedule(recipe, "experts in four bits")


def check_schedule(recipe: Recipe, experts: str) -> None:
    """Raises RecipeError where a `recipe` with these `experts`, each of which multiplies rows of its own, asks for the
    interleaved schedule: that of parallel.ep_size (recipe/refusals.py) that holds without it too."""
    if recipe.parallel.pp_size > 1 and recipe.parallel.pipeline_schedule == "interleaved":
        raise RecipeError(
            f"parallel.pipeline_schedule = interleaved with {experts}: each micro-batch has other numbers of rows, so "
            "a kernel may be loaded in mid-step, and two stages then wait for each other; set "
            "parallel.pipeline_schedule=1f1b"
        )


def check_recipe(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Raises RecipeError where `recipe` asks for something that the family of its model's `config` cannot do."""
    verdict, family = check_family(config), f"model.path = {recipe.model.path!r}: family {config.model_type!r}"
    if verdict.refused:
        raise RecipeError(f"{family} cannot be trained: {verdict.refused}")
    if verdict.no_packing_reason and recipe.data.packing:
        raise RecipeError(
            f"data.packing = true: family {config.model_type!r}: {verdict.no_packing_reason}; set data.packing=false"
        )
    if recipe.parallel.cp_size > 1 and not verdict.can_split_heads:
        why = verdict.no_packing_reason or f"its attention takes more than heads that ranks can share{verdict.demands}"
        raise RecipeError(f"parallel.cp_size = {recipe.parallel.cp_size}: {family} cannot be split: {why}; set it to 1")
    if getattr(config, "output_router_logits", False) and "router_aux_loss_coef" not in recipe.train.model_fields_set:
        raise RecipeError(
            f"{family}: output_router_logits = true asks for an auxiliary loss: set train.router_aux_loss_coef, to "
            f"{getattr(config, 'router_aux_loss_coef', 0)} as its config has it, or to 0"
        )
    if recipe.parallel.pp_size > 1 and verdict.no_parts_reason:
        raise RecipeError(
            f"parallel.pp_size = {recipe.parallel.pp_size}: {family}: {verdict.no_parts_reason}; set it to 1"
        )
    if recipe.generate.steps and verdict.no_generation_reason:
        raise RecipeError(
            f"generate.steps: {family} continues no prompt: {verdict.no_generation_reason}; set generate.steps=0"
        )


def layout_of(recipe: Recipe, local: LocalModel, world: World, chosen: dict[Any, Any] | None = None) -> Layout:
    """Returns the layout of a model that `build_local` made. `chosen`: build_layout's."""
    model, teacher = local.model, local.model.teacher
    given = recipe.parallel, recipe.precision, model, model.parts, model.blocks, world.size, world.ranks_per_node
    split = local.placements, local.pipeline, local.chunks
    beside = teacher.config if teacher else None
    layout = build_layout(*given, recipe.offload, chosen, *split, beside)
    balanced = count_choices(model.base, model.config) if recipe.train.router_aux_loss_coef else ()
    share = experts_per_token(model.config) / local.experts if local.experts else 1.0
    layout = replace(layout, balanced=balanced, counted=local.counted, biases=local.biases)
    layout = replace(layout, bias_update_rate=recipe.train.router_bias_update_rate)
    layout = replace(layout, experts=local.experts, expert_width=local.expert_width, chosen_share=share)
    return replace(layout, expert_load=min(world.expert_load, layout.most_expert_load))


def build_local(
    recipe: Recipe,
    config: PreTrainedConfig,
    attention: Kernel = KERNELS["sdpa"],
    teacher: PreTrainedConfig | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> LocalModel:
    """Returns the part of a recipe's model (without `auto`), on the meta device, that the global `rank` has under
    tensor, context and pipeline parallel: build_model's, with adapters where the recipe asks for them, and with a
    teacher of the config `teacher` in it. Raises RecipeError where these do not fit the model."""
    chunk, scores = recipe.train.loss_chunk_tokens, recipe.method == "reward"
    if scores and config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise RecipeError(f"method = 'reward': transformers has no classifier of the family {config.model_type!r}")
    check_recipe(recipe, config)
    model = build_model(config, recipe.at_rest, chunk, attention, scores)
    width = expert_width(model)
    if any(getattr(module, STACKED, None) and not has_interface(module) for module in model.modules()):
        check_schedule(recipe, "experts that are multiplied one by one")
    freeze(model, check_family(config).without_gradient)
    check_routers(model.base, config, recipe.train.router_aux_loss_coef)
    check_biases(model, config, recipe.train.router_bias_update_rate)
    if recipe.train.freeze_router:
        freeze_routers(model.base, config)
    if recipe.lora.r:
        apply_lora(model, recipe.lora, DTYPES[recipe.precision.frozen])
    nested = recipe.model.bnb_4bit_use_double_quant
    if recipe.model.load_in_4bit and pack_blocks(model, DTYPES[recipe.precision.params], nested):
        check_packed_experts(recipe)
    if teacher:
        attach_teacher(model, build_model(teacher, recipe.precision.frozen, attention=attention))
    placements, flops = place_whole(model), count_flops(model)
    if model.teacher:
        flops = replace(flops, beside=count_flops(model.teacher))
    for part in (model, model.teacher):
        if part is not None:
            apply_tensor_parallel(part, recipe.parallel.tp_size, rank)
            apply_context_parallel(part, recipe.parallel, rank)
    apply_expert_parallel(model, recipe.parallel.ep_size)
    placements = note_shards(placements, model, expert_parameters(model))
    experts = max((module.num_experts for module in find_experts(model)), default=0)
    counted = count_experts(model)
    biases = {name: [*model.get_buffer(name).shape] for name in find_biases(model)}
    pipeline, chunks = apply_pipeline_parallel(model, recipe.parallel, rank, world_size)
    return LocalModel(model, pipeline, chunks, placements, flops, experts, width, counted, biases)
