"""Pushing to the Hub: one commit with the export and a card, to a stand-in for its client."""

import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, ModelCard, ModelCardData, constants
from huggingface_hub.utils import filter_repo_objects

from shardbook import cli
from shardbook.recipe import RecipeError, load_recipe
from shardbook.run.result import hub as result_hub

ROOT = Path(__file__).parents[4]


class Hub:
    """A stand-in for HfApi that keeps what it is sent: repositories by name, each with its files. Each call must be
    one that HfApi takes."""

    repos, private, breaks = {}, {}, False

    def __getattribute__(self, name):
        call = object.__getattribute__(self, name)
        real = getattr(HfApi, name, None)
        if name.startswith("_") or real is None:
            return call

        def checked(*given, **named):
            inspect.signature(real).bind(self, *given, **named)
            return call(*given, **named)

        return checked

    def repo_exists(self, repo):
        return repo in self.repos or repo == "owner/base"

    def model_info(self, repo):
        return SimpleNamespace(card_data=ModelCardData(license="apache-2.0"))

    def create_repo(self, repo, private):
        self.repos[repo], self.private[repo] = {}, private

    def upload_folder(self, repo_id, folder_path, commit_message, ignore_patterns):
        if self.breaks:
            raise OSError("the disk is full")
        files = [str(path.relative_to(folder_path)) for path in folder_path.rglob("*") if path.is_file()]
        for name in filter_repo_objects(files, ignore_patterns=ignore_patterns):
            self.repos[repo_id][name] = (folder_path / name).read_bytes()
        return SimpleNamespace(repo_url=f"https://hub/{repo_id}")

    def delete_repo(self, repo, missing_ok):
        self.repos.pop(repo, None)


@pytest.fixture
def hub(monkeypatch):
    for name in ("repos", "private"):
        monkeypatch.setattr(Hub, name, {})
    monkeypatch.setattr(Hub, "breaks", False)
    monkeypatch.setattr(result_hub, "HfApi", Hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    return Hub


@pytest.fixture
def run(tmp_path):
    """A finished run as train.py leaves it."""
    from shardbook.recipe import dump_recipe

    folder = tmp_path / "runs" / "mine"
    (folder / "export").mkdir(parents=True)
    recipe = load_recipe(ROOT / "recipes" / "smollm2-135m-lora.toml", ["train.steps=4", "model.path=owner/base"])
    (folder / "resolved.toml").write_text(dump_recipe(recipe))
    facts = {"finished_steps": 4, "world_size": 2, "mesh": {"dp_shard": 2}, "torch": "2.13.0", "shardbook": "0.2.0"}
    (folder / "run.json").write_text(json.dumps(facts))
    rows = [{"step": 0, "eval/loss": 4.5}, *({"step": n, "train/loss": 4 - n / 4} for n in (1, 2, 3, 4))]
    rows[-1] |= {"eval/loss": 3.25, "train/tokens": 2048, "comm/sent_bytes": 5_000_000}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "export" / "adapter_model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "export" / "adapter_config.json").write_text("{}")
    return folder


def test_what_is_pushed_is_the_export_and_a_card(run, hub, capsys):
    (run / "export" / "more").mkdir()
    (run / "export" / "more" / "file").write_text("not of the result")
    assert cli.main(["push", str(run), "--repo", "me/mine"]) == 0
    sent = hub.repos["me/mine"]
    assert sorted(sent) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert sent["adapter_model.safetensors"] == b"weights" * 1000 and hub.private == {"me/mine": True}
    card = ModelCard(sent["README.md"].decode())
    front = {"base_model": "owner/base", "library_name": "peft", "license": "apache-2.0", "tags": ["shardbook", "sft"]}
    assert card.data.to_dict() == front
    before, _, recipe = card.text.partition("```toml\n")
    assert (
        before
        == """
# mine

owner/base (main) trained with Shardbook by `sft`, LoRA of rank 16, on chitchat.

- stage: zero3 on 2 ranks
- steps: 4
- final train loss: 3.0000
- final eval loss: 3.2500
- versions: shardbook 0.2.0, torch 2.13.0

To repeat it: `shardbook train recipe.toml --nproc 2`, where recipe.toml is

"""
    )
    assert recipe == (run / "resolved.toml").read_text().strip() + "\n```\n"
    assert capsys.readouterr().out == f"{run} -> https://hub/me/mine\n"


def test_what_was_not_measured_is_not_in_the_card_and_a_data_set_of_the_hub_is(run):
    (run / "metrics.jsonl").write_text('{"step": 4, "train/loss": 3.0}\n')
    words = ["data.train=owner/rows:train[:10%]", "model.path=owner/base"]
    recipe = load_recipe(ROOT / "recipes" / "smollm2-135m-fsdp.toml", words)
    card = result_hub.build_card(run, recipe, None)
    assert "eval loss" not in card.text and "final train loss: 3.0000\n- versions" in card.text
    front = {"base_model": "owner/base", "library_name": "transformers", "datasets": ["owner/rows"]}
    assert card.data.to_dict() == front | {"tags": ["shardbook", "sft"]}


def test_a_card_that_lies_in_the_export_is_sent_as_it_is(run, hub):
    (run / "export" / "README.md").write_text("mine")
    assert result_hub.push_run(run, "me/mine", public=True) == "https://hub/me/mine"
    assert hub.repos["me/mine"]["README.md"] == b"mine" and hub.private == {"me/mine": False}


def refusal(words, capsys) -> str:
    assert cli.main(["push", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_what_cannot_be_pushed_is_one_line_and_nothing_is_sent(run, hub, monkeypatch, capsys):
    hub.repos["me/taken"] = {}
    assert "me/taken: is there already" in refusal([str(run), "--repo", "me/taken"], capsys)
    assert "'mine': must look like name/model" in refusal([str(run), "--repo", "mine"], capsys)
    assert "holds no weights" in refusal([str(run), "--repo", "me/mine", "--export", str(run)], capsys)
    assert "not a run directory" in refusal([str(run.parent), "--repo", "me/mine"], capsys)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    said = refusal([str(run), "--repo", "me/mine"], capsys)
    assert "no token" in said and f"the result lies in {run / 'export'}" in said
    (run / "run.json").write_text(json.dumps({"finished_steps": 0}))
    assert "has not finished" in refusal([str(run), "--repo", "me/mine"], capsys)
    assert hub.repos == {"me/taken": {}}


def test_a_commit_that_fails_leaves_no_repository(run, hub, capsys):
    hub.breaks = True
    assert cli.main(["push", str(run), "--repo", "me/mine"]) == 1
    assert "me/mine: not pushed:" in capsys.readouterr().err and hub.repos == {}


def test_a_run_that_shall_be_pushed_is_refused_before_it_starts(monkeypatch):
    from shardbook.run.result.hub import check_push

    words = ["train.push_to_hub=true", "train.hub_model_id=me/mine"]
    path = ROOT / "recipes" / "smollm2-135m-fsdp.toml"
    with pytest.raises(RecipeError, match="HF_HUB_OFFLINE is set"):
        check_push(load_recipe(path, words).train)
    for wrong in (words[:1], words[1:], [*words, "train.export=false"]):
        with pytest.raises(RecipeError, match="set all three, or neither of the first two"):
            load_recipe(path, wrong)
    check_push(load_recipe(path).train)


def test_the_end_of_a_run_pushes_where_it_was_asked_to(run, hub):
    from shardbook.run.log.console import Console

    recipe = load_recipe(
        ROOT / "recipes" / "smollm2-135m-fsdp.toml", ["train.push_to_hub=true", "train.hub_model_id=me/mine"]
    )
    result_hub.push_if_asked(run, recipe.train, Console(True))
    assert "README.md" in hub.repos["me/mine"]


def test_init_copies_a_recipe_with_its_comments(tmp_path, capsys):
    file = tmp_path / "mine"
    assert cli.main(["init", str(file), "--of", "llama8b-lora"]) == 0
    made = tmp_path / "mine.toml"
    assert load_recipe(made) == load_recipe(ROOT / "recipes" / "llama8b-lora.toml")
    assert "# hardware:" in made.read_text() and "measured:" not in made.read_text()
    capsys.readouterr()
    assert cli.main(["init", str(file)]) == 2 and "is there already" in capsys.readouterr().err
    assert (
        cli.main(["init", str(tmp_path / "other"), "--of", "llama9b"]) == 2 and "close to it" in capsys.readouterr().err
    )


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert re.fullmatch(r"shardbook \d+\.\d+\.\d+\n", capsys.readouterr().out)
