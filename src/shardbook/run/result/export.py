"""A run's result as files: the whole model, or the trained adapters."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from shardbook.data.encoding import load_tokenizer
from shardbook.model.adapter_files import adapter_config, find_peft_names, full_trained, merged_tensors, save_adapter
from shardbook.model.causal_lm import build_model
from shardbook.model.expert_products import transposed_stacks
from shardbook.model.export_files import choose_padding, write_generation
from shardbook.model.families import load_config
from shardbook.model.file_buffers import load_buffers, stored_buffers
from shardbook.model.file_names import FileNames
from shardbook.model.hub import loadable, model_folder, tokenizer_folder
from shardbook.model.weight_files import open_tensors
from shardbook.model.weights import full_buffers, full_tensors, save_weights
from shardbook.parallel.sharding import ShardedModel
from shardbook.recipe import Recipe, RecipeError
from shardbook.run.checkpoint.format import name_of, newest_checkpoint
from shardbook.run.checkpoint.load import checkpoint_shapes, load_biases, read_parameters
from shardbook.run.checkpoint.save import kept_shapes
from shardbook.run.directory import read_facts
from shardbook.run.prompts import find_learned_stops
from shardbook.terminal import print_line


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
    model: Any = sharded.model
    stops = find_learned_stops(tokenizer, config, folder, recipe.data)
    if recipe.lora.r:
        trained = kept_shapes(sharded.layout, model)
        names = find_peft_names(model, folder, trained)
        settings = adapter_config(loadable(recipe.model.path), recipe.model.revision, recipe.lora, trained, names)
        beside_adapter = _beside_adapter(recipe, config, tokenizer, folder, stops)
        save_adapter(out, full_trained(model, trained), settings, names, beside_adapter, write)
        return
    shapes = sharded.layout.full_shapes
    dtype = recipe.train.export_dtype
    tensors = full_tensors(sharded.masters, dtype, shapes)
    beside = model.files, full_buffers(model, shapes), stops
    save_weights(out, tensors, shapes, config, tokenizer, folder, dtype, write, *beside)
    if write and recipe.model.init == "pretrained":
        _say_rest(model.files, folder)


def _beside_adapter(
    recipe: Recipe, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, folder: Path, stops: list[int]
) -> Callable[[Path], None]:
    """Returns what writes the files beside an adapter: its tokenizer, and the tokens that end an answer (`stops`). The
    base model's config is not the adapter's, so of a reward model the console says what must be set in it."""

    def write(side: Path) -> None:
        if recipe.method == "reward":
            changed = copy.deepcopy(config)
            choose_padding(changed, tokenizer, {*stops, tokenizer.eos_token_id})
            if changed.pad_token_id is None:
                print_line(
                    "export   an adapter whose base model has no token free for padding: score one answer at a time"
                )
            elif changed.pad_token_id != config.pad_token_id:
                setting = f"model.config.pad_token_id = {changed.pad_token_id} before it scores"
                print_line(f"export   an adapter whose base model needs {setting} (it has {config.pad_token_id})")
        else:
            write_generation(side, folder, config, stops, always=True)
        tokenizer.save_pretrained(side)

    return write


def _say_rest(files: FileNames, folder: Path) -> None:
    """Prints what an export does not have of the files in `folder`, where these have more than a text model."""
    with open_tensors(folder) as opened:
        if rest := files.describe_rest(opened):
            print_line(f"export   {rest}")


def export_run(run: Path, recipe: Recipe, checkpoint: Path | None, out: Path | None, dtype: str, merges: bool) -> None:
    """Writes the model or adapter in `checkpoint` of the run in directory `run` (None: the newest) to `out` (None: its
    export/), one 5 GB file in memory at a time and without a process group. `merges`: adds adapters to the base
    weights, as they are stored.

    Raises RecipeError where the run has no checkpoint, or none of its last step, `out` is not empty, or `merges` finds
    no adapters.
    """
    source = _find_checkpoint(run, checkpoint)
    folder = model_folder(recipe.model)
    config = load_config(recipe.model, folder, recipe.data.max_length)
    tokenizer = load_tokenizer(tokenizer_folder(recipe.model), "model.tokenizer", recipe.data.chat_template)
    if out and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"--out {out}: exists and is not empty; name a new directory")
    target, shapes = out or run / "export", checkpoint_shapes(source)
    if merges and not recipe.lora.r:
        raise RecipeError("--merge: this run trained the whole model; nothing to merge; leave it out")
    stops = find_learned_stops(tokenizer, config, folder, recipe.data)
    tensors, model = read_parameters(source, shapes), build_model(config, "fp32", scores=recipe.method == "reward")
    if recipe.lora.r and not merges:
        names = find_peft_names(model, folder, shapes)
        settings = adapter_config(loadable(recipe.model.path), recipe.model.revision, recipe.lora, shapes, names)
        save_adapter(target, tensors, settings, names, _beside_adapter(recipe, config, tokenizer, folder, stops))
    else:
        has_base = merges or recipe.model.init == "pretrained"
        if has_base:
            load_buffers(model, folder)
        load_biases(source, model)
        beside = model.files, stored_buffers(model), stops
        with ExitStack() as opened:
            if merges:
                base = model.files.by_model_names(opened.enter_context(open_tensors(folder)))
                shapes, trained = {name: each.shape for name, each in model.named_parameters()}, dict(tensors)
                tensors = merged_tensors(base, trained, shapes, transposed_stacks(model), recipe.lora)
            save_weights(target, tensors, shapes, config, tokenizer, folder, dtype, True, *beside)
        if has_base:
            _say_rest(model.files, folder)
    print_line(f"{source} -> {target}")


def _find_checkpoint(run: Path, checkpoint: Path | None) -> Path:
    """Returns `checkpoint`, or the run's newest, which must be of its last step where it has finished."""
    source = checkpoint or newest_checkpoint(run / "checkpoints")
    finished = read_facts(run).get("finished_steps")
    result = f"; the result of its {finished} steps is in {run / 'export'}" if finished else ""
    if source is None:
        raise RecipeError(f"{run}: has no complete checkpoint{result}")
    if finished and not checkpoint and source.name != name_of(finished):
        newest = f"its newest checkpoint is {source.name}{result}"
        raise RecipeError(f"{run}: {newest}; for that step name it with --checkpoint")
    return source
