"""The files that a recipe names, looked at by a launcher in a second: before torch is imported or a rank is started.

Invariant: nothing is made, and nothing but a model's small files is fetched; ranks would refuse the same.
"""

import json
import os
import re
from pathlib import Path

from shardbook.data.files import check_first_rows, read_template
from shardbook.model import embedded
from shardbook.model.hub import CONFIG_FILES, fetch_folder, weights_files
from shardbook.recipe import Recipe, RecipeError, Run, Train, first_line
from shardbook.run.trackers import check_installed

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # on the Hub


def check_files(recipe: Recipe) -> None:
    """Raises RecipeError where something that the recipe names is missing, of another kind, or broken at its
    beginning: a tracker's package, run.dir, the template, directories of models and checkpoints, sources of data."""
    model, teacher, sequences = recipe.model, recipe.distill.teacher, recipe.sequences
    check_installed(recipe.run)
    check_run_directory(recipe.run)
    check_push(recipe.train)
    read_template(recipe.data.chat_template)
    _check_model(model.path, model.revision, "model.path", model.init == "pretrained")
    if model.tokenizer:
        fetch_folder(model.tokenizer, "main", "model.tokenizer", CONFIG_FILES)
    if teacher:
        _check_model(teacher, "main", "distill.teacher", True)
    beside = {"lora.adapter": recipe.lora.adapter, "train.resume_from_checkpoint": recipe.train.resume_from_checkpoint}
    for key, path in beside.items():
        if path and not Path(path).expanduser().is_dir():
            raise RecipeError(f"{key} = {path!r}: no such directory")
    check_first_rows(recipe.data, recipe.data.train, "data.train", sequences)
    if recipe.data.eval:
        check_first_rows(recipe.data, recipe.data.eval, "data.eval", sequences)


def check_run_directory(run: Run) -> None:
    """Raises RecipeError where the run's directory cannot be made. Makes nothing."""
    folder = Path(run.dir).expanduser() / run.name
    there = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    if not there.is_dir():
        raise unwritable(folder, f"{there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise unwritable(folder, os.strerror(13))


def check_push(train: Train) -> None:
    """Raises RecipeError where the result is to be pushed to the Hub, and could not be."""
    if train.push_to_hub:
        try:
            check_repo(train.hub_model_id)
        except RecipeError as error:
            raise RecipeError(f"train.push_to_hub: {error}") from None


def check_repo(repo: str) -> None:
    """Raises RecipeError where nothing can be pushed to `repo`: it is no name of a repository, or there is no token."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if not REPOSITORY.fullmatch(repo):
        raise RecipeError(f"repository {repo!r}: must look like name/model")
    if HF_HUB_OFFLINE:
        raise RecipeError(f"repository {repo}: HF_HUB_OFFLINE is set; unset it to push")
    if not get_token():
        raise RecipeError(f"repository {repo}: no token; run `hf auth login`, or set HF_TOKEN")


def unwritable(folder: Path, why: str) -> RecipeError:
    return RecipeError(f"run directory {folder}: cannot be written ({why}); set run.dir to a place that can")


def _check_model(path: str, revision: str, what: str, is_pretrained: bool) -> None:
    """Raises RecipeError where there is no model at `path`, or its config.json or list of weights is damaged."""
    if path in embedded.MODELS:  # it is converted once, with torch
        return
    folder = fetch_folder(path, revision, what, CONFIG_FILES)
    try:
        config = json.loads((folder / "config.json").read_text())
        why = "" if isinstance(config, dict) and config.get("model_type") else "it has no model_type"
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    if why:
        raise RecipeError(f"{what} = {path!r}: no usable config.json: {why}")
    if is_pretrained and Path(path).is_dir():
        weights_files(folder)
