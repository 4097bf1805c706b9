"""Pushing to the Hub: one commit with the export, a card and the recipe, to a server that speaks its protocol."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from shardbook import cli
from shardbook.recipe import RecipeError, load_recipe
from shardbook.run import push
from shardbook.run.card import plot_losses, write_card

ROOT = Path(__file__).parents[2]


class Hub(BaseHTTPRequestHandler):
    """A Hub that keeps what it is sent: repositories by name, each with its files."""

    def log_message(self, *words):
        pass

    def answer(self, body, status=200):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    @property
    def repos(self):
        return self.server.repos

    def do_GET(self):
        name = re.match(r"/api/models/([^/]+/[^/?]+)", self.path)
        if name and name[1] in self.repos:
            return self.answer({"id": name[1], "modelId": name[1], "sha": "0" * 40, "private": True, "tags": []})
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        given = self.body()
        if self.path == "/api/repos/create":
            asked = json.loads(given)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.repos[name] = {}
            self.server.private[name] = asked.get("private", asked.get("visibility") == "private")
            return self.answer({"url": f"http://{self.headers['Host']}/{name}"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = json.loads(given)["files"]
            modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in files}
            found = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return self.answer({"files": found})
        if self.path.endswith("/info/lfs/objects/batch"):
            there = f"http://{self.headers['Host']}/upload/"
            objects = [
                {**each, "actions": {"upload": {"href": there + each["oid"], "header": {}}}}
                for each in json.loads(given)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if "/commit/" in self.path:
            if self.server.breaks:
                return self.answer({"error": "the disk is full"}, 507)
            name = re.match(r"/api/models/([^/]+/[^/]+)/commit", self.path)[1]
            for line in map(json.loads, given.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.repos[name][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.repos[name][value["path"]] = self.server.uploads[value["oid"]]
            address = f"http://{self.headers['Host']}/{name}"
            return self.answer({"commitOid": "1" * 40, "commitUrl": f"{address}/commit/{'1' * 40}", "success": True})
        return self.answer({}, 404)

    def do_PUT(self):
        given = self.body()
        self.server.uploads[self.path.rpartition("/")[2]] = given
        self.answer({})

    def do_DELETE(self):
        asked = json.loads(self.body())
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        self.repos.pop(name, None)
        self.answer({})


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants, hf_api

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repos, server.private, server.uploads, server.breaks = {}, {}, {}, False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    for module in (constants, hf_api):
        monkeypatch.setattr(module, "ENDPOINT", address, raising=False)
    monkeypatch.setattr(hf_api.HfApi, "__init__", of(hf_api.HfApi.__init__, address))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    yield server
    server.shutdown()
    server.server_close()


def of(init, address):
    return lambda self, *given, **named: init(self, *given, **{"endpoint": address, **named})


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


def test_what_is_pushed_is_the_export_a_card_and_the_recipe(run, hub, capsys):
    assert cli.main(["push", str(run), "--repo", "me/mine"]) == 0
    sent = hub.repos["me/mine"]
    assert sorted(sent) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "losses.svg",
        "recipe.toml",
    ]
    assert sent["adapter_model.safetensors"] == (run / "export" / "adapter_model.safetensors").read_bytes()
    assert hub.private == {"me/mine": True}
    assert set(hub.uploads) == {hashlib.sha256(sent["adapter_model.safetensors"]).hexdigest()}
    assert load_recipe(run / "push" / "recipe.toml").train.steps == 4
    card = sent["README.md"].decode()
    front = yaml.safe_load(card.split("---")[1])
    assert front == {"library_name": "peft", "tags": ["shardbook", "sft"], "base_model": ["owner/base"]}
    for said in (
        "| loss, at the end | 3.0000 |",
        "| held-out loss | 3.2500 |",
        "dp_shard 2",
        "LoRA of rank",
        "torch 2.13.0",
    ):
        assert said in card
    assert "shardbook train recipe.toml --nproc 2" in card
    assert f"{run} -> " in capsys.readouterr().out


def test_a_number_that_was_not_measured_is_not_in_the_card(run):
    card, plot = write_card(run, "me/mine")
    assert "peak memory" not in card and plot.count("<polyline") == 2
    assert "held out" not in plot_losses([{"step": 1, "train/loss": 2.0}]) and "polyline" not in plot_losses([])


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
    assert "no token" in said and f"5 files of 0.00 GB lie in {run / 'push'}" in said
    (run / "run.json").write_text(json.dumps({"finished_steps": 0}))
    assert "has not finished" in refusal([str(run), "--repo", "me/mine"], capsys)
    assert hub.repos == {"me/taken": {}}


def test_a_commit_that_fails_leaves_no_repository(run, hub, capsys):
    hub.breaks = True
    assert cli.main(["push", str(run), "--repo", "me/mine"]) == 1
    assert "me/mine: not pushed:" in capsys.readouterr().err and hub.repos == {}


def test_a_run_that_shall_be_pushed_is_refused_before_it_starts(monkeypatch):
    from shardbook.run.files import check_push

    words = ["train.push_to_hub=true", "train.hub_model_id=me/mine"]
    path = ROOT / "recipes" / "smollm2-135m-fsdp.toml"
    with pytest.raises(RecipeError, match="HF_HUB_OFFLINE is set"):
        check_push(load_recipe(path, words).train)
    for wrong in (words[:1], words[1:], [*words, "train.export=false"]):
        with pytest.raises(RecipeError, match="set all three, or neither of the first two"):
            load_recipe(path, wrong)
    check_push(load_recipe(path).train)


def test_the_end_of_a_run_pushes_where_it_was_asked_to(run, hub):
    from shardbook.run.console import Console

    recipe = load_recipe(
        ROOT / "recipes" / "smollm2-135m-fsdp.toml", ["train.push_to_hub=true", "train.hub_model_id=me/mine"]
    )
    push.push_if_asked(run, recipe.train, Console(True))
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
