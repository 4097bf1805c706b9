"""Of a repository of the hub, what is read is fetched, at the revision that the recipe names, and nothing else."""

import json
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from shardbook.model.hub import config_folder, model_folder
from shardbook.recipe import Distill, Model, RecipeError, parse_recipe
from shardbook.run.load_teacher import fill_teacher, load_teacher
from shardbook.run.preflight import check_named

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


def test_a_teacher_is_fetched_at_its_revision(monkeypatch):
    """By each that fetches it: the preflight, the ranks for its config and tokenizer, and for its weights."""
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
    recipe = parse_recipe("", "a recipe", words)
    sharded = SimpleNamespace(model=SimpleNamespace(teacher=object()))
    for fetch in (
        load_teacher,
        lambda recipe: check_named(recipe, "cpu"),
        lambda recipe: fill_teacher(sharded, recipe),
    ):
        with pytest.raises(RecipeError, match=r"distill.teacher = 'owner/name': the hub did not give it"):
            fetch(recipe)
    assert asked == ["1a2b3c"] * 3 and Distill(teacher="owner/name").model.revision == "main"
