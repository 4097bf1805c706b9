"""Trackers: which there are, what they are told, and what is said of one that cannot be had."""

import json

import pytest
import wandb
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from wandb_file import read_wandb

from shardbook.recipe import Recipe, RecipeError, Run, Train, flatten_recipe
from shardbook.recipe.sections import TRACKERS
from shardbook.run.directory import find_run
from shardbook.run.metrics import Recorder
from shardbook.run.trackers import STEP, Trackers, flat_config


def test_every_tracker_of_accelerate_is_known():
    assert set(TRACKERS) == set(LOGGER_TYPE_TO_CLASS) | {"none"}


def test_keys_are_flat_and_none_is_lost():
    values = flatten_recipe(Recipe(train=Train(steps=5)))
    config = flat_config(values, {"dp_replicate": 2, "dp_shard": 4})
    assert (config["stage"], config["checkpointing"], config["learning_rate"]) == ("zero3", "none", 2e-5)
    assert (config["dp_replicate_size"], config["dp_shard_size"]) == (2, 4)  # as they came out, not -1
    assert config["optim_name"] == "adamw" and config["run_name"] == "" and "name" not in config
    assert len(config) == len(values)


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(tmp_path):
    run = Run(report_to=["clearml"], dir=str(tmp_path), name="mine")
    with pytest.raises(RecipeError, match=r"report_to = 'clearml': its package is not installed; pip install clearml"):
        find_run(run, tmp_path / "tiny.toml")
    assert not list(tmp_path.iterdir())


def test_samples_are_one_table_of_wandb_that_grows(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers = Trackers(tmp_path, "mine", Run(report_to=["wandb", "tensorboard"]), {"stage": "zero3"})
    for step in (0, 5):
        trackers.log_samples([{"step": step, "prompt": "why", "completion": word, "tokens": 1} for word in ("a", "b")])
    assert set(trackers._started) == {"wandb", "tensorboard"}  # neither failed
    trackers.finish(failed=False)
    wandb.teardown()  # its process closes the file after finish() has returned
    (file,) = tmp_path.glob("wandb/offline-*/*.wandb")
    tables = [row for row in read_wandb(file).rows if "samples/_type" in row]
    assert [row[STEP] for row in tables] == [0, 5]
    assert [(row["samples/_type"], row["samples/nrows"]) for row in tables] == [
        ("incremental-table-file", n) for n in (2, 4)
    ]
    rows = [json.loads(path.read_text())["data"] for path in sorted(tmp_path.rglob("*.table.json"))]
    assert sorted(map(len, rows)) == [2, 2]  # each step's own


def test_what_wandb_s_files_lack_is_sent_again_and_nothing_twice(tmp_path, monkeypatch):
    """A process that is killed has not written the last rows, and the one that goes on trains some steps anew."""
    monkeypatch.setenv("WANDB_MODE", "offline")

    def launch(done, until):
        """One launch that goes on after step `done`."""
        recorder = Recorder(tmp_path, "mine", Run(report_to="wandb"), {"stage": "zero3"}, True, done)
        for step in range(done + 1, until):
            recorder.log(step, {"train/loss": 1 / step, "train/tokens": 7 * step})
        recorder.__exit__(None, None, None)
        wandb.teardown()

    def rows():
        return [row for file in tmp_path.glob("wandb/offline-*/*.wandb") for row in read_wandb(file).rows]

    launch(0, 40)
    (file,) = tmp_path.glob("wandb/offline-*/*.wandb")
    data = file.read_bytes()
    file.write_bytes(data[: data.index(json.dumps(1 / 30).encode())])
    assert len(rows()) < 30
    launch(25, 45)
    assert sorted(row[STEP] for row in rows()) == list(range(1, 45))
    assert all(row["train/loss"] == 1 / row[STEP] for row in rows())


def test_one_that_does_not_start_is_said_once_and_the_others_go_on(tmp_path, capsys):
    (tmp_path / "tensorboard").touch()  # a file where its folder should be
    trackers = Trackers(tmp_path, "mine", Run(report_to=["tensorboard"]), {"stage": "zero3"})
    trackers.log(1, {"train/loss": 1.0})
    trackers.finish(failed=False)
    said = capsys.readouterr().out
    assert said.startswith("tensorboard: ") and said.count("the run goes on without it") == 1
