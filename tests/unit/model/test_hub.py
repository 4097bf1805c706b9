"""Of a repository of the hub, what is read is fetched, at the revision that the recipe names, and nothing else."""

import json
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects
from tiny import write_model

from shardbook.model.hub import config_folder, model_folder, tokenizer_folder
from shardbook.parallel.placement import World
from shardbook.recipe import Distill, Model, RecipeError, parse_recipe
from shardbook.run.load_teacher import fill_teacher
from shardbook.run.prepare import place_run

BESIDE = ["config.json", "tokenizer.json", "tokenizer_config.json", "README.md"]
COPIES = ["consolidated.safetensors", "original/model-00001-of-00001.safetensors", "original/params.json"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


class Hub:
    """A stand-in for snapshot_download: the files of one repository, and what was asked."""

    def __init__(self, cache, files):
        self.cache, self.files, self.asked = cache, files, []

    def snapshot_download(self, repo, revision, allow_patterns):
        self.asked.append((repo, revision))
        for name in filter_repo_objects(self.files, allow_patterns=allow_patterns):
            (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
            (self.cache / name).write_text(self.files[name])
        return str(self.cache)

    def fetched(self):
        return {str(path.relative_to(self.cache)) for path in self.cache.rglob("*") if path.is_file()}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    def serve(files):
        made = Hub(tmp_path, files)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
        return made

    return serve


@pytest.mark.parametrize("shards", [SHARDS, ["model.safetensors"], ["part-1.safetensors"]])
def test_weights_that_a_repository_holds_twice_are_fetched_once(shards, hub):
    """As mistralai's do in consolidated.safetensors, and gpt-oss in original/."""
    files = dict.fromkeys([*BESIDE, *COPIES, *shards], "x")
    if shards != ["model.safetensors"]:
        files["model.safetensors.index.json"] = json.dumps({"weight_map": {f"{n}.weight": n for n in shards}})
    made = hub(files)
    model = Model(path="owner/name", revision="abc")
    assert config_folder(model) == made.cache
    assert not any(name.endswith(".safetensors") for name in made.fetched())
    model_folder(Model(path="owner/name", init="random"))
    assert not any(name.endswith(".safetensors") for name in made.fetched())
    assert model_folder(model) == made.cache
    assert {name for name in made.fetched() if name.endswith(".safetensors")} == {*shards}
    assert {revision for _, revision in made.asked} == {"abc", "main"}


def test_a_damaged_index_is_named(hub):
    made = hub({"config.json": "{}", "model.safetensors.index.json": "{}"})
    with pytest.raises(RecipeError, match=rf"weights file {made.cache}/model.safetensors.index.json: damaged"):
        model_folder(Model(path="owner/name"))


def test_a_teacher_is_fetched_at_its_revision(tiny, monkeypatch):
    """By each that fetches it: for its config and tokenizer, and for its weights."""
    asked = []

    def snapshot_download(repo, revision, allow_patterns):
        asked.append(revision)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    words = [
        "method=distill",
        "data.train=chitchat",
        "distill.teacher=owner/name",
        "distill.teacher_revision=1a2b3c",
        "train.steps=1",
    ]
    recipe = parse_recipe("", "a recipe", [*words, f"model.path={tiny / 'model'}", "data.max_length=64"])
    sharded = SimpleNamespace(model=SimpleNamespace(teacher=object()))
    for fetch in (lambda recipe: place_run(recipe, World(1, 1)), lambda recipe: fill_teacher(sharded, recipe)):
        with pytest.raises(RecipeError, match=r"distill.teacher = 'owner/name': the hub did not give it"):
            fetch(recipe)
    assert asked == ["1a2b3c"] * 2 and Distill(teacher="owner/name").model.revision == "main"


def test_a_hub_id_is_its_snapshot(tmp_path, monkeypatch):
    """Offline, with the snapshot that an earlier download left in the hub's cache."""
    from huggingface_hub import constants

    repository = tmp_path / "models--owner--name"
    write_model(repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert model_folder(Model(path="owner/name")) == repository / "snapshots" / "abc123"
    assert tokenizer_folder(Model(path="x", tokenizer="owner/name")) == repository / "snapshots" / "abc123"
    with pytest.raises(RecipeError, match=r"model.path = 'owner/other': the hub did not give it .*HF_TOKEN is not set"):
        model_folder(Model(path="owner/other"))
