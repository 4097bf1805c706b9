"""Ranks that were not started alike are told so at once, each of them, and by what."""

import json
import os
import platform
import re
import shutil
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
from tiny import CHATML
from world import run_world, train_rank

from shardbook.ranks.distributed import broadcast_from_main, raise_on_all_ranks
from shardbook.ranks.exits import RunFailed
from shardbook.recipe import RecipeError


def start_unlike(recipe, words, module):
    """Rank 1 gets `words` too, and finds another version of `module`."""
    mine = [str(recipe), "run.name=unlike"]
    if os.environ["RANK"] == "1":
        import shardbook.run.directory as rundir

        real, mine = rundir.version, mine + words
        rundir.environment.cache_clear()  # the server that ranks are forked from has asked
        rundir.version = lambda name: "9.9" if name == module else real(name)
    return train_rank(mine)


@pytest.mark.parametrize(
    "words, module, said",
    [
        (["optim.learning_rate=1.0"], "", "optim.learning_rate is 1.0 there, 0.003 here"),
        (["parallel.stage=ddp"], "", "parallel.stage is 'ddp' there, 'zero3' here"),
        ([], "transformers", "transformers is '9.9' there, '"),
    ],
)
def test_ranks_that_differ(recipe, words, module, said):
    for code, _, errors in run_world(2, start_unlike, recipe, words, module):
        assert code == 2 and f"shardbook: rank 1 is not started like rank 0: {said}" in errors, errors


def start_without_git(recipe):
    """Rank 1 has another patch of Python, and no git."""
    import shardbook.run.directory as rundir

    if os.environ["RANK"] == "1":
        rundir.environment.cache_clear()
        minor = rundir.platform.python_version_tuple()[:2]
        rundir.platform.python_version_tuple = lambda: (*minor, "99")
        rundir.platform.python_version = lambda: ".".join((*minor, "99"))
        rundir.shutil.which = rundir.subprocess.run = None  # an error where it is asked
    return train_rank([str(recipe), "run.name=alike", "train.steps=1"])


def test_a_rank_without_git_and_with_another_patch_of_python_is_no_other_start(recipe):
    results = run_world(2, start_without_git, recipe)
    assert [code for code, _, _ in results] == [0, 0], results
    facts = json.loads((recipe.parent / "alike" / "run.json").read_text())
    assert facts["python"] == platform.python_version()


def start_with_package(recipe):
    """As if rank 0's machine had the package of the optimizer, and rank 1's had not."""
    import dataclasses
    import sys

    from shardbook.optim.table import OPTIMIZERS

    if os.environ["RANK"] == "0":
        OPTIMIZERS["adamw_8bit"] = dataclasses.replace(OPTIMIZERS["adamw_8bit"], needs=None)
    sys.modules["torchao"] = sys.modules["torchao.optim"] = None  # an ImportError where it is imported
    return train_rank([str(recipe), "run.name=packages", "optim.name=adamw_8bit", "train.steps=1"])


def test_each_rank_looks_for_the_package_of_its_optimizer(recipe):
    place = f"shardbook: rank 1 on {socket.gethostname()}: optim.name = 'adamw_8bit': torchao cannot be used ("
    way_out = "; pip install 'torchao>=0.18' (the extra `8bit`), or set optim.name=adamw_bf16\n"
    for code, out, error in run_world(2, start_with_package, recipe):
        assert code == 2 and not out and error.count("\n") == 1, error
        assert error.startswith(place) and error.endswith(way_out), error
    assert not (recipe.parent / "packages").exists()


def errors_of(share, rank, error):
    """What this rank raises where `rank` alone meets an error in what `share` calls."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))

    def make():
        if dist.get_rank() == rank:
            raise error

    try:
        share(make)
    except Exception as met:
        return type(met).__name__, str(met)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "some/where"),
        OSError("of a library"),
        RunFailed("taken"),
        RecipeError("wrong"),
    ],
    ids=["errno", "library", "failed", "refused"],
)
def test_an_error_of_one_rank_is_that_of_all(error):
    """Until then a rank waited in a collective that rank 0 had left."""
    for share, rank in ((broadcast_from_main, 0), (raise_on_all_ranks, 1)):
        assert run_world(2, errors_of, share, rank, error) == [(type(error).__name__, str(error))] * 2


def test_nodes_of_unlike_size(recipe):
    for code, _, errors in run_world(2, start_with_own_node, recipe):
        assert code == 2 and "ranks of a node is 2 there, 1 here" in errors


def start_with_own_node(recipe):
    os.environ["LOCAL_WORLD_SIZE"] = str(int(os.environ["RANK"]) + 1)
    return train_rank([str(recipe), "run.name=unlike"])


UNLIKE = {  # what rank 1's folder has in place of rank 0's
    "fewer rows": ("rows.jsonl", lambda text: "".join(text.splitlines(keepends=True)[:-4]), "data.train is '"),
    "another row": ("rows.jsonl", lambda text: text.replace("lazy", "fast", 1), "data.train is '"),
    "a template": (
        "chat.jinja",
        lambda text: text.replace("\n", " \n"),
        "data.train is '.*; the tokenizer, or its chat",
    ),
    "weights": (
        "model/model.safetensors",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        "what is in model.path is '",
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_machines_with_unlike_files_are_told_so_before_a_step(recipe, tiny, tmp_path, name):
    """With epochs they would take unlike numbers of steps, and wait for each other at the end."""
    path, change, words_of_fact = UNLIKE[name]
    for rank in "01":
        shutil.copytree(tiny / "model", tmp_path / rank / "model")
        shutil.copy(tiny / "chats.jsonl", tmp_path / rank / "rows.jsonl")
        (tmp_path / rank / "chat.jinja").write_text(CHATML)
    file = tmp_path / "1" / path
    if file.suffix == ".safetensors":
        file.write_bytes(change(file.read_bytes()))
    else:
        assert (changed := change(file.read_text())) != file.read_text() and file.write_text(changed)
    words = ["model.path=model", "data.train=rows.jsonl", "data.chat_template=chat.jinja", "data.packing=false"]
    words += ["train.steps=0", "train.epochs=1", f"run.name=own-{path.partition('.')[0].replace('/', '-')}"]
    for code, out, errors in run_world(2, start_in_own_folder, tmp_path, [str(recipe), *words]):
        assert code == 2 and "step" not in out, out
        beginning = r"rank 1 has other files than rank 0; copy them, so that all machines have the same: .*"
        assert re.search(beginning + words_of_fact, errors), errors


def start_in_own_folder(folder, words):
    os.chdir(folder / os.environ["RANK"])
    return train_rank(words)
