"""A run's result as files: the whole model, or the trained adapters."""

from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from shardbook.model.adapter_files import PREFIX, adapter_config, full_trained, merged_tensors, save_adapter
from shardbook.model.adapters import kept_parameters
from shardbook.model.causal_lm import build_model
from shardbook.model.stored import open_tensors
from shardbook.model.weights import full_tensors, global_shapes, save_weights
from shardbook.parallel.sharding import ShardedModel
from shardbook.recipe import Recipe, RecipeError
from shardbook.run.checkpoint import checkpoint_shapes, read_parameters


def export_result(
    out: Path,
    sharded: ShardedModel,
    recipe: Recipe,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    write: bool,
) -> None:
    """Writes a finished run's result to `out`: a model that transformers loads, or an adapter that peft loads.
    Collective; the rank with `write` writes."""
    if recipe.lora.r:
        settings = adapter_config(recipe.model.path, recipe.model.revision, recipe.lora, kept_parameters(sharded.model))
        save_adapter(out, full_trained(sharded.model), settings, tokenizer, write)
        return
    shapes = global_shapes(sharded.model)
    dtype = recipe.train.export_dtype
    save_weights(out, full_tensors(sharded.masters, dtype), shapes, config, tokenizer, folder, dtype, write)


def export_checkpoint(
    source: Path,
    out: Path,
    recipe: Recipe,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: str,
    merges: bool,
) -> None:
    """Writes a checkpoint's model or adapter to `out`, one 5 GB file in memory at a time and without a process group.
    `merges`: adds adapters to the base weights in `folder`, as they are stored there; RecipeError without adapters."""
    shapes = checkpoint_shapes(source)
    if not recipe.lora.r:
        if merges:
            raise RecipeError("--merge: this run trained the whole model; there is nothing to merge")
        save_weights(out, read_parameters(source, shapes), shapes, config, tokenizer, folder, dtype)
        return
    trained = dict(read_parameters(source, shapes))
    if not merges:
        settings = adapter_config(recipe.model.path, recipe.model.revision, recipe.lora, trained)
        save_adapter(out, ((PREFIX + name, tensor) for name, tensor in trained.items()), settings, tokenizer)
        return
    model = build_model(config, "fp32", scores=recipe.method == "reward")
    whole = {name: parameter.shape for name, parameter in model.named_parameters()}
    with open_tensors(folder) as base:
        tensors = merged_tensors(base, trained, whole, recipe.lora)
        save_weights(out, tensors, whole, config, tokenizer, folder, dtype)
