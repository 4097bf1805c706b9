"""Trackers: which there are, what they are told, and what is said of one that cannot be had."""

import inspect
import json
from importlib.util import find_spec

import pytest
import wandb
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from wandb_file import read_wandb

from shardbook.recipe import Recipe, RecipeError, Run, Train, flatten_recipe
from shardbook.recipe.sections import TRACKERS
from shardbook.run.log.trackers import Trackers, flat_config, options_of
from shardbook.run.preflight import check_run


def test_every_tracker_is_one_of_accelerate():
    assert set(TRACKERS) - {"none"} <= set(LOGGER_TYPE_TO_CLASS)


@pytest.mark.parametrize("tracker", [name for name in TRACKERS if name != "none"])
def test_accelerate_s_class_takes_what_it_is_given(tracker, tmp_path):
    """By keyword, else a name of its own would be swallowed by `**kwargs` or refused in a run."""
    given = options_of(tracker, tmp_path, "mine", Run(report_to=[tracker], group="tried"), "zero3")
    signature = inspect.signature(LOGGER_TYPE_TO_CLASS[tracker].__init__)
    signature.bind(None, **given)
    assert {"run_name", "experiment_name"} & {*given} & {*signature.parameters}
    assert "mine" in str(given) and "shardbook" in str(given) + "shardbook" * (tracker in ("tensorboard", "aim"))


def test_keys_are_flat_and_none_is_lost():
    values = flatten_recipe(Recipe(train=Train(steps=5)))
    config = flat_config(values, {"dp_replicate": 2, "dp_shard": 4})
    assert (config["stage"], config["checkpointing"], config["learning_rate"]) == ("zero3", "none", 2e-5)
    assert (config["dp_replicate_size"], config["dp_shard_size"]) == (2, 4)  # as they came out, not -1
    assert config["optim_name"] == "adamw" and config["run_name"] == "" and "name" not in config
    assert len(config) == len(values)


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(tmp_path):
    absent = next(name for name in TRACKERS if name != "none" and not find_spec(name))
    recipe = Recipe(train=Train(steps=5), run=Run(report_to=[absent], dir=str(tmp_path), name="mine"))
    with pytest.raises(
        RecipeError, match=f"report_to = '{absent}': its package is not installed; pip install {absent}"
    ):
        check_run(recipe)
    assert not list(tmp_path.iterdir())


def test_samples_are_a_table_of_their_step_where_a_tracker_has_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers = Trackers(tmp_path, "mine", Run(report_to=["wandb", "tensorboard"]), {"stage": "zero3"})
    for step in (0, 5):
        trackers.log_samples([{"step": step, "prompt": "why", "completion": word, "tokens": 1} for word in ("a", "b")])
    assert set(trackers._started) == {"wandb", "tensorboard"}  # neither failed
    trackers.finish()
    wandb.teardown()  # its process closes the file after finish() has returned
    (file,) = tmp_path.glob("wandb/offline-*/*.wandb")
    tables = [row for row in read_wandb(file).rows if "samples/_type" in row]
    assert [row["_step"] for row in tables] == [0, 5]
    assert [(row["samples/_type"], row["samples/nrows"]) for row in tables] == [("table-file", 2)] * 2
    rows = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("*.table.json"))]
    assert all(row["columns"] == ["step", "prompt", "completion", "tokens"] for row in rows)
    assert sorted(row["data"][0] for row in rows) == [[0, "why", "a", 1], [5, "why", "a", 1]]


def test_one_that_does_not_start_is_said_once_and_the_others_go_on(tmp_path, capsys):
    (tmp_path / "tensorboard").touch()  # a file where its folder should be
    trackers = Trackers(tmp_path, "mine", Run(report_to=["tensorboard"]), {"stage": "zero3"})
    trackers.log(1, {"train/loss": 1.0})
    trackers.finish()
    said = capsys.readouterr().out
    assert said.startswith("tensorboard: ") and said.count("the run goes on without it") == 1
