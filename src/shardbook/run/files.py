"""The files that a recipe names, looked at by a launcher in a second: before torch is imported or a rank is started.

Invariant: nothing is made, and nothing but a model's small files is fetched; ranks would refuse the same.
"""

import errno
import os
import re
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from shardbook.data.files import check_first_rows, read_template
from shardbook.model import embedded
from shardbook.model.hub import config_folder, read_header, tokenizer_folder, weights_files
from shardbook.ranks.exits import LAUNCHER, watch_launcher
from shardbook.recipe import Model, Recipe, RecipeError, Run, Train
from shardbook.run.log.trackers import check_installed

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # on the Hub


def check_files(recipe: Recipe) -> None:
    """Raises RecipeError where something that the recipe names is missing, of another kind, or broken at its beginning:
    a tracker's package, run.dir, the template, models and their configs, checkpoints, sources of data."""
    model, distill, sequences, configs = recipe.model, recipe.distill, recipe.sequences, []
    check_installed(recipe.run)
    check_run_directory(recipe.run)
    check_push(recipe.train)
    read_template(recipe.data.chat_template)
    models = {"model.path": model} | ({"distill.teacher": distill.model} if distill.teacher else {})
    for what, each in models.items():
        if each.path not in embedded.MODELS:  # it is converted once, with torch
            folder = config_folder(each, what)
            if each.init == "pretrained" and Path(each.path).is_dir():
                for weights in weights_files(folder):
                    with weights.open("rb", buffering=0) as file:
                        read_header(weights, file)
            configs.append((each, folder, recipe.data.max_length, what))
    if model.tokenizer:
        tokenizer_folder(model)
    beside = {"lora.adapter": recipe.lora.adapter, "train.resume_from_checkpoint": recipe.train.resume_from_checkpoint}
    for key, path in beside.items():
        if path and not Path(path).expanduser().is_dir():
            raise RecipeError(f"{key} = {path!r}: no such directory")
    check_first_rows(recipe.data, recipe.data.train, "data.train", sequences)
    if recipe.data.eval:
        check_first_rows(recipe.data, recipe.data.eval, "data.eval", sequences)
    if "torch" in sys.modules:
        _load_configs(configs)
    elif configs:  # in a process that believes there is no torch, whose import takes a second more
        with ProcessPoolExecutor(1, get_context("fork"), _leave_torch_out, (os.getpid(),)) as process:
            process.submit(_load_configs, configs).result()


def _leave_torch_out(launcher: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the launcher's to hear
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", LAUNCHER: str(launcher)}  # ranks show what it remarks
    watch_launcher()  # a pool's process waits for more work, whoever was killed


def _load_configs(configs: list[tuple[Model, Path, int, str]]) -> None:
    """Raises RecipeError where transformers refuses a config, or no run takes it."""
    from shardbook.model.families import load_config

    for each in configs:
        load_config(*each)


def check_run_directory(run: Run) -> None:
    """Raises RecipeError where the run's directory cannot be made. Makes nothing."""
    folder = Path(run.dir).expanduser() / run.name
    there = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    if not there.is_dir():
        raise unwritable(folder, f"{there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise unwritable(folder, os.strerror(errno.EACCES))


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
