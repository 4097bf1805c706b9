"""Bad input: one line that names the thing, exit code 2, and no step taken."""

import json
import os
import re

import pytest
from safetensors.torch import load_file, save_file
from tiny import tokenizer, write_model, write_recipe
from world import run_world, train_rank


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory):
    """A directory of broken things beside a good recipe."""
    out = tmp_path_factory.mktemp("bad")
    write_recipe(tiny, out)
    write_model(out / "truncated")
    path = out / "truncated" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    write_model(out / "misshapen")
    path = out / "misshapen" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:7].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    write_model(out / "untemplated")
    tokenizer(None).save_pretrained(out / "untemplated")
    (out / "untemplated" / "chat_template.jinja").unlink(missing_ok=True)
    write_model(out / "short", max_position_embeddings=64)
    write_model(out / "few", vocab=200)
    write_model(out / "stranger")
    other = json.loads((out / "stranger" / "tokenizer.json").read_text())
    vocabulary = other["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]  # of the same size
    (out / "stranger" / "tokenizer.json").write_text(json.dumps(other))
    (out / "empty.jsonl").write_text("")
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (out / "fields.jsonl").write_text(json.dumps({"question": "a"}) + "\n")
    rows = [good, {"messages": [{"role": "user", "content": "a"}]}]
    (out / "tools.jsonl").write_text(json.dumps(good | {"tools": "[{"}) + "\n")
    (out / "good.jsonl").write_text(json.dumps(good) + "\n")
    (out / "broken.jinja").write_text("{% for m in %}")
    (out / "mute.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "a-file").write_text("")
    return out


CASES = {
    "mesh": (["parallel.dp_shard_size=3"], ["mesh dp_replicate 1 x dp_shard 3 needs 3 ranks, the world has 1"]),
    "contradiction": (
        ["parallel.stage=zero2", "parallel.reshard_min_params=1000"],
        [
            "parallel.reshard_min_params = 1000",
            "zero2 keeps every parameter gathered",
            "parallel.stage to zero3 or hsdp",
        ],
    ),
    "budget": (["activation.checkpointing=budget:0.5"], ["budget:0.5", "train.compile=true"]),
    "stage": (["parallel.stage=zero5"], ["parallel.stage = 'zero5'", "ddp, zero1, zero2, zero3, hsdp, zeropp, fsdp"]),
    "max_length": (["data.max_length=300"], ["data.max_length = 300", "sees at most 256 tokens"]),
    "dataset": (["data.train={out}/absent.jsonl"], ["data.train", "absent.jsonl", "no such file"]),
    "field": (["data.train={out}/fields.jsonl"], ["data.train: row 0", "question", "nearest to", "lacks prompt"]),
    "tools": (["data.train={out}/tools.jsonl"], ["data.train: row 0: tools = '[{': is not JSON"]),
    "kwargs": (
        ["data.chat_template_kwargs.enable_thinking=false"],
        ["data.chat_template_kwargs = {'enable_thinking': False}", "does not read enable_thinking"],
    ),
    "template-file": (["data.chat_template={out}/absent.jinja"], ["data.chat_template", "absent.jinja", "cannot be"]),
    "template-text": (["data.chat_template={{{{ messages }}}}"], ["data.chat_template", "is a template, not a file"]),
    "template-jinja": (["data.chat_template={out}/broken.jinja"], ["data.train: row 0", "chat template refuses it"]),
    "weights": (
        ['data={{train = ["{out}/good.jsonl", "{out}/good.jsonl"], weights = [1000, 1], max_length = 64}}'],
        ["data.weights = [1000, 1]: 1 rows of source 1 can be trained, and 0 are its share"],
    ),
    "empty": (["data.train={out}/empty.jsonl"], ["data.train", "empty.jsonl", "no rows"]),
    "mute": (["data.train={out}/mute.jsonl"], ["data.train: row 1", "no assistant text"]),
    "truncated": (["model.path={out}/truncated"], ["truncated/model.safetensors", "truncated or not safetensors"]),
    "misshapen": (["model.path={out}/misshapen"], ["model.norm.weight has shape [7], the model wants [32]"]),
    "template": (
        ["model.path={out}/untemplated"],
        ["untemplated has no chat template", "model.tokenizer", "data.chat_template"],
    ),
    "model": (["model.path={out}/nowhere"], ["model.path", "nowhere", "no such directory"]),
    "hub": (["model.path=meta-llama/Llama-3.1-8B"], ["meta-llama/Llama-3.1-8B", "HF_TOKEN", "local directory"]),
    "hub-data": (["data.train=someone/something:train"], ["someone/something", "HF_TOKEN", "local file"]),
    "run-dir": (["run.dir={out}/a-file"], ["run directory", "a-file", "cannot be written", "run.dir"]),
    "teacher-absent": (["method=distill", "distill.teacher={out}/nowhere"], ["distill.teacher", "no such directory"]),
    "teacher-short": (["method=distill", "distill.teacher={out}/short"], ["max_length = 128", "short sees at most 64"]),
    "teacher-few": (["method=distill", "distill.teacher={out}/few"], ["few", "has 200 embeddings, its tokenizer 259"]),
    "teacher-stranger": (
        ["method=distill", "distill.teacher={out}/stranger"],
        ["distill.teacher", "has another tokenizer than the student"],
    ),
    "tp-beside": (["parallel.tp_size=2", "lora.r=4"], ["parallel.tp_size = 2 and lora.r = 4: they do not compose"]),
    "tp-heads": (["parallel.tp_size=5", "data.max_length=125"], ["parallel.tp_size = 5: the model has 4 heads"]),
    "tp-world": (["parallel.tp_size=2"], ["2 does not divide the world of 1 ranks", "start a multiple of 2 ranks"]),
    "no-recipe": ([], ["no recipe"]),
}


def check(results, parts):
    for code, out, err in results:
        assert code == 2, (out, err)
        assert "Traceback" not in err
        last = err.strip().splitlines()[-1]
        assert last.startswith("shardbook: ") and all(part in last for part in parts), last
        assert err.count("shardbook: ") == 1 and "step 1/" not in out


@pytest.mark.parametrize("name", CASES)
def test_refused_with_exit_code_2(place, name):
    words, parts = CASES[name]
    words = [str(place / "tiny.toml"), f"run.name={name}", *(word.format(out=place) for word in words)]
    check(run_world(1, train_rank, words if name != "no-recipe" else []), parts)
    assert not (place / name / "metrics.jsonl").exists()


def without_torchao(version, words):
    """A rank of a machine that has no torchao, or this version of it."""
    import sys
    from importlib import metadata
    from types import SimpleNamespace

    sys.modules["torchao"] = sys.modules["torchao.optim"] = None
    if version:
        sys.modules["torchao.optim"] = SimpleNamespace(AdamW8bit=None)
        real = metadata.version
        metadata.version = lambda package: version if package == "torchao" else real(package)
    return train_rank(words)


@pytest.mark.parametrize("version, said", [("", "torchao cannot be used ("), ("0.9.1", "torchao is 0.9.1")])
def test_an_optimizer_that_is_not_installed(place, version, said):
    """Before anything is fetched: the model does not exist either."""
    words = [str(place / "tiny.toml"), "optim.name=adamw_8bit", f"model.path={place}/nowhere"]
    parts = ["optim.name = 'adamw_8bit'", said, "pip install 'torchao>=0.18'", "or set optim.name=adamw_bf16"]
    check(run_world(2, without_torchao, version, words), parts)


def test_every_rank_refuses(place):
    words = [str(place / "tiny.toml"), "run.name=two", f"model.path={place}/misshapen"]
    check(run_world(2, train_rank, words), ["model.norm.weight has shape [7]"])


def test_a_launcher_that_would_shard_too(place):
    environment = {"ACCELERATE_USE_FSDP": "true"}
    check(
        run_world(1, train_rank, [str(place / "tiny.toml")], environment=environment),
        ["ACCELERATE_USE_FSDP", "MULTI_GPU"],
    )


def with_nobody_to_meet(words):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return train_rank(words)


def test_a_launcher_that_left_variables_out(place):
    check(run_world(1, with_nobody_to_meet, [str(place / "tiny.toml")]), ["MASTER_ADDR, MASTER_PORT", "torchrun"])


def test_losses_that_are_not_finite_end_the_run_with_1(place):
    results = run_world(2, train_rank, [str(place / "tiny.toml"), "run.name=not-finite", "optim.learning_rate=1e30"])
    for code, _, err in results:
        assert code == 1 and "Traceback" not in err
        assert re.search(
            r"shardbook: step 2: train/loss is \S+ and train/grad_norm (nan|inf); lower optim.learning_rate", err
        )
    assert not (place / "not-finite" / "export").exists()


def explode(words):
    import shardbook.train as train

    def broken(*positional, **named):
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("our own bug")
        return before(*positional, **named)

    before = train.clip_gradients
    train.clip_gradients = broken
    return train_rank(words)


def test_our_own_bug_on_one_rank_is_the_last_line_of_that_rank(place):
    alone = ("run.lost_seconds=0", "run.hang_seconds=0")  # without a heartbeat, which would end rank 0 with that reason
    (_, (code, _, err)) = run_world(2, explode, [str(place / "tiny.toml"), "run.name=bug", *alone])
    assert code == 1 and "Traceback" in err
    assert err.strip().splitlines()[-1] == "shardbook: run failed: ZeroDivisionError: our own bug"
