"""Bad input: one line that names the thing, exit code 2, and no step taken."""

import json
import os
import re
import subprocess
import sys

import pytest
from planted import replace
from safetensors.torch import load_file, save_file
from tiny import said_by, tokenizer, write_model, write_recipe
from world import run_world, train_rank

from shardbook.cli import main
from shardbook.model.families import load_config
from shardbook.parallel.placement import check_recipe
from shardbook.recipe import Model, Recipe, RecipeError, load_recipe
from shardbook.run.directory import RunDirectory


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
    write_model(out / "speechless")
    for file in (out / "speechless").glob("tokenizer*"):
        file.unlink()
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
    "misshapen": (["model.path={out}/misshapen"], ["model.norm.weight has shape [7], the model wants [32]"]),
    "template": (
        ["model.path={out}/untemplated"],
        ["untemplated has no chat template", "model.tokenizer", "data.chat_template"],
    ),
    "model": (["model.path={out}/nowhere"], ["model.path", "nowhere", "no such directory"]),
    "tokenizer-none": (["model.path={out}/speechless"], ["speechless (it has no tokenizer.json); set model.tokenizer"]),
    "hub": (["model.path=meta-llama/Llama-3.1-8B"], ["meta-llama/Llama-3.1-8B", "HF_TOKEN", "local directory"]),
    "hub-data": (["data.train=someone/something:train"], ["someone/something", "HF_TOKEN", "local file"]),
    "run-dir": (["run.dir={out}/a-file"], ["run directory", "a-file is a file", "run.dir"]),
    "teacher-absent": (["method=distill", "distill.teacher={out}/nowhere"], ["distill.teacher", "no such directory"]),
    "teacher-few": (["method=distill", "distill.teacher={out}/few"], ["few", "has 200 embeddings, its tokenizer 259"]),
    "teacher-stranger": (
        ["method=distill", "distill.teacher={out}/stranger"],
        ["distill.teacher", "has another tokenizer than the student"],
    ),
    "tp-beside": (["parallel.tp_size=2", "optim.name=muon"], ["parallel.tp_size = 2 and optim.name = 'muon': they do"]),
    "tp-heads": (["parallel.tp_size=5", "data.max_length=125"], ["parallel.tp_size = 5: the model has 4 heads"]),
    "tp-world": (["parallel.tp_size=2"], ["2 does not divide the world of 1 ranks", "start a multiple of 2 ranks"]),
    "no-recipe": ([], ["no recipe"]),
}


RANDOM = ["model.init=random"]  # without weights
NAMED = {  # what a run refuses before a model is built or weights are fetched: the words, and parts of its last line
    "data-absent": (["data.train={out}/absent.jsonl"], ["data.train = ", "absent.jsonl': no such file"]),
    "data-directory": (["data.train={out}/absent"], ["no such directory, and not a hub id"]),
    "data-nothing": (
        ["data.train={out}/nothing"],
        ["nothing': has no saved dataset, and no file that ends with .jsonl, .json"],
    ),
    "data-pattern": (["data.train={out}/no*.jsonl"], ["no*.jsonl': no file matches it that ends with .jsonl, .json"]),
    "data-none": (["data.train=[]"], ["data.train = '': needs a file, a pattern of files (rows/*.jsonl), a directory"]),
    "data-kind": (["data.train={out}/table.xlsx"], ["table.xlsx': this kind of file is not read; .jsonl, .json"]),
    "data-empty": (["data.train={out}/empty.jsonl"], ["empty.jsonl': holds no rows"]),
    "data-blank": (["data.train={out}/blank.jsonl"], ["blank.jsonl': holds no rows"]),
    "data-header": (["data.train={out}/header.csv"], ["header.csv': holds no rows"]),
    "data-broken": (["data.train={out}/broken.jsonl"], ["cannot be read as json (line 2 of broken.jsonl: Expecting"]),
    "data-semicolon": (
        ["data.train={out}/semicolon.csv"],
        ["(semicolon.csv: its first line, a;b, is separated by ';'"],
    ),
    "data-list": (["data.train={out}/list.jsonl"], ["(line 1 of list.jsonl: is no table of fields)"]),
    "data-cut": (
        ["data.train={out}/cut.parquet"],
        ["cut.parquet': cut.parquet cannot be read (truncated, or not parq"],
    ),
    "data-latin": (["data.train={out}/latin.csv"], ["cannot be read as csv (latin.csv: not UTF-8: 'utf-8' codec"]),
    "data-utf-16": (
        ["data.train={out}/excel.tsv"],
        ["excel.tsv is UTF-16, and only UTF-8 is read; iconv -f UTF-16 -t UTF-8 excel.tsv > utf8-excel.tsv"],
    ),
    "data-unpacked": (["data.train={out}/plain.jsonl.gz"], ["plain.jsonl.gz cannot be read (Not a gzipped file"]),
    "data-field": (["data.train={out}/fields.jsonl"], ["data.train: row 0: has the fields question; nearest to"]),
    "data-column": (
        ["data.train={out}/pairs.csv", 'data.columns={{prompt = "questoin"}}'],
        [
            "data.columns = {'prompt': 'questoin'}: ",
            "no column questoin; it has question, answer; did you mean question?",
        ],
    ),
    "data-both": (
        ["data.train={out}/both.csv", 'data.columns={{prompt = "question"}}'],
        ["both.csv' has question and prompt too; leave one of them out of the rows"],
    ),
    "data-eval": (["data.eval={out}/absent.jsonl", "data.eval_size=0"], ["data.eval = ", "no such file"]),
    "data-second": (
        ["data.train=[{out}/good.jsonl, {out}/fields.jsonl]"],
        ["data.train, ", "fields.jsonl: row 0: has the fields question"],
    ),
    "pair-field": (
        ["data.train={out}/good.jsonl", "method=dpo"],
        ["data.train: row 0: has the fields messages", "lacks"],
    ),
    "template-file": (["data.chat_template={out}/absent.jinja"], ["data.chat_template", "absent.jinja", "cannot be"]),
    "model": (["model.path={out}/nowhere"], ["model.path = ", "nowhere': no such directory, and not a hub id"]),
    "model-file": (["model.path={out}/lora/adapter_config.json"], ["/lora/adapter_config.json': is a file; must be a"]),
    "model-hub": (["model.path=no/where"], ["model.path = 'no/where': the hub did not give it", "HF_TOKEN"]),
    "model-value": (["model.path={out}/wrong", *RANDOM], ["'{out}/wrong': no usable config.json: hidden_size = 30 ("]),
    "model-weights": (
        ["model.path={out}/no-weights"],
        ["no-weights: no model.safetensors and no model.safetensors.ind"],
    ),
    "model-truncated": (
        ["model.path={out}/truncated"],
        ["truncated/model.safetensors: truncated or not safetensors ("],
    ),
    "model-pointer": (
        ["model.path={out}/pointer"],
        ["pointer/model.safetensors: truncated or not safetensors (its he"],
    ),
    "model-adapter": (
        ["model.path={out}/lora"],
        ["lora: holds an adapter; set model.path to its base, and lora.adapte"],
    ),
    "model-part": (["model.path={out}/part"], ["part/model-2.safetensors: named in model.safetensors.index.json, but"]),
    "tokenizer": (["model.tokenizer={out}/nowhere"], ["model.tokenizer = ", "no such directory"]),
    "teacher": (["method=distill", "distill.teacher={out}/nowhere"], ["distill.teacher = ", "no such directory"]),
    "adapter": (["lora.r=4", "lora.adapter={out}/nowhere"], ["lora.adapter = ", "no such directory"]),
    "resume": (["train.resume_from_checkpoint={out}/nowhere"], ["train.resume_from_checkpoint = ", "no such direct"]),
    "run-dir": (["run.dir={out}/a-file/runs"], ["a-file/runs/early: cannot be written", "a-file is a file); set run."]),
    "tracker": (
        ["run.report_to=aim"],
        ["report_to = 'aim': its package is not installed; pip install aim"],
    ),
    "config-absent": (["model.path={out}/nothing", *RANDOM], ["no usable config.json: ", "No such file or directory"]),
    "config-json": (["model.path={out}/not-json", *RANDOM], ["model.path = ", "no usable config.json: Expecting"]),
    "config-list": (["model.path={out}/list", *RANDOM], ["no usable config.json: ", "dictionary update sequence"]),
    "config-kind": (["model.path={out}/no-type", *RANDOM], ["no usable config.json: it has no model_type"]),
    "config-unknown": (
        ["model.path={out}/unknown", *RANDOM],
        ["no usable config.json: transformers 5.", "no model_type 'llama99'; a newer one may"],
    ),
    "config-own-code": (
        ["model.path={out}/own", *RANDOM],
        ["has no model_type 'mine'; its own code (auto_map) is not run"],
    ),
    "config-quantised": (["model.path={out}/gptq", *RANDOM], ["holds quantised weights (gptq)", "a copy in bf16"]),
    "config-short": (["data.max_length=300"], ["data.max_length = 300: ", "model sees at most 256 tokens"]),
    "teacher-short": (
        ["method=distill", "distill.teacher={out}/short"],
        ["data.max_length = 128: {out}/short sees at most 64 tokens"],
    ),
}
EARLY = {  # what a command refuses before torch is imported: its words, and parts of its last line
    "train-key": (["train", "{out}/tiny.toml", "optim.lr=1"], ["optim.lr is not a key of a recipe; here it is optim."]),
    "train-state": (["train", "llama405b-3d", "hardware.memory_gb=1e9"], ["needs 1,000,000,000 GB for its state, and"]),
    "data-source": (
        ["data", "{out}/tiny.toml", "data.train={out}/absent.jsonl"],
        ["data.train = '{out}/absent.jsonl': no such file"],
    ),
    "plan-recipe": (
        ["plan", "llama8b-fspd"],
        ["recipe 'llama8b-fspd': no such file or name; close to it: llama8b-fsdp"],
    ),
    "recipe-folder": (
        ["train", "{out}"],
        ["recipe '{out}': is a folder; must be a .toml file, or the name of a shipped"],
    ),
    "plan-gpu": (["plan", "--model", "qwen3-8b", "--gpu", "a100-40"], ["did you mean a100-40gb or a100-80gb?"]),
    "plan-gpus": (["plan", "llama8b-fsdp", "--gpus", "-4"], ["--gpus -4: must be at least 1"]),
    "plan-nodes": (["plan", "llama8b-fsdp", "--gpus", "12"], ["--gpus 12: must be whole nodes of 8; a multiple of 8"]),
    "plan-key": (
        ["plan", "--model", "qwen3-8b", "optim.lr=1"],
        ["optim.lr is not a key of a recipe; here it is optim."],
    ),
    "compare-none": (["compare", "{out}/tiny.toml"], ["STAGES is empty: name some of ddp, zero1"]),
    "compare-stage": (["compare", "{out}/tiny.toml", "--stages", "zero9"], ["variant zero9: parallel.stage = 'zero9'"]),
    "push-absent": (["push", "{out}/nothing", "--repo", "me/mine"], ["nothing: not a run directory (no resolved"]),
}
COMMANDS = """
import contextlib, io, json, sys
from shardbook.cli import main
found = {}
for name, words in json.load(sys.stdin).items():
    with contextlib.redirect_stderr(io.StringIO()) as err:
        found[name] = main(words), err.getvalue()
large = sorted({"torch", "transformers", "datasets"} & sys.modules.keys())
print(json.dumps([found, large]))
"""


def refusals_of(cases):
    """What a rank that is alone says to each of the cases, whose words are a recipe's."""
    import torch.distributed as dist

    import shardbook.run.prepare as prepare

    def fetch(model):
        raise AssertionError("weights are fetched before a refusal")

    prepare.model_folder = fetch
    del os.environ["RANK"]
    said = {}
    for name, words in cases.items():
        said[name] = train_rank(words)
        if dist.is_initialized():
            dist.destroy_process_group()
    return said


@pytest.fixture(scope="module")
def files(place):
    """Beside the broken things of `place` those of NAMED."""
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    files = {
        "table.xlsx": b"PK",
        "blank.jsonl": b"\n \n",
        "header.csv": b"prompt,completion\n",
        "broken.jsonl": b'\n{"text": \n',
        "list.jsonl": b"[1, 2]\n",
        "cut.parquet": b"PAR1 and no more",
        "semicolon.csv": b"a;b\n1;2\n",
        "latin.csv": "prompt,completion\nü,a\n".encode("latin-1"),
        "excel.tsv": "prompt\tcompletion\na\tb\n".encode("utf-16"),
        "plain.jsonl.gz": json.dumps(good).encode(),
        "pairs.csv": b"question,answer\na,b\n",
        "both.csv": b"question,prompt,completion\na,b,c\n",
    }
    for name, content in files.items():
        (place / name).write_bytes(content)
    for name, content in (
        ("nothing", ""),
        ("not-json", "{"),
        ("no-type", "{}"),
        ("no-weights", '{"model_type": "llama"}'),
        ("unknown", '{"model_type": "llama99"}'),
        ("own", '{"model_type": "mine", "auto_map": {}}'),
        ("list", "[1]"),
        ("pointer", '{"model_type": "llama"}'),
        ("lora", ""),
        ("gptq", '{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}'),
        ("wrong", '{"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}'),
    ):
        (place / name).mkdir()
        if content:
            (place / name / "config.json").write_text(content)
    (place / "pointer" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (place / "lora" / "adapter_config.json").touch()
    (place / "part").mkdir()
    (place / "part" / "config.json").write_text('{"model_type": "llama"}')
    weight_map = {"weight_map": {"a": "model-2.safetensors"}}
    (place / "part" / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    return place


@pytest.fixture(scope="module")
def named(files):
    recipe = [str(files / "tiny.toml"), "run.name=early"]
    before = set(files.iterdir())
    words = {name: [*recipe, *(word.format(out=files) for word in words)] for name, (words, _) in NAMED.items()}
    (found,) = run_world(1, refusals_of, words)
    assert set(files.iterdir()) == before  # no run directory
    return found


@pytest.mark.parametrize("name", NAMED)
def test_what_a_recipe_names_is_refused_before_weights_are_fetched(named, place, name):
    check([named[name]], [part.replace("{out}", str(place)) for part in NAMED[name][1]])


@pytest.fixture(scope="module")
def early(files):
    """What the command says to each case of EARLY, and the large packages that it imported: all in one process."""
    words = {name: [word.format(out=files) for word in words] for name, (words, _) in EARLY.items()}
    done = subprocess.run([sys.executable, "-c", COMMANDS], input=json.dumps(words), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", EARLY)
def test_a_command_refuses_what_it_can_see(early, place, name):
    code, said = early[0][name]
    assert code == 2 and said.count("\n") == 1 and said.startswith("shardbook: "), said
    assert all(part.replace("{out}", str(place)) in said for part in EARLY[name][1]), said


def test_a_command_refuses_before_torch_is_imported(early):
    assert early[1] == []


def looked_at(words):
    """One of two ranks: what it says, and whether it looked at what the recipe names itself."""
    import shardbook.run.preflight as preflight

    looks, find = [], preflight.find_sources
    preflight.find_sources = lambda *given: looks.append(1) or find(*given)
    return *train_rank(words), len(looks)


def test_one_rank_looks_and_all_are_told(place):
    absent = f"data.train={place}/absent.jsonl"
    results = run_world(2, looked_at, [str(place / "tiny.toml"), "run.name=told", absent])
    check([result[:3] for result in results], ["data.train = ", "absent.jsonl': no such file"])
    assert [looks for *_, looks in results] == [1, 0]


@pytest.mark.parametrize("name", ["data-field", "model-value"])
def test_what_one_rank_of_a_node_refuses_all_are_told(files, place, name):
    """Else the others would wait for it, and end with a line of a lost peer."""
    words, parts = NAMED[name]
    recipe = [str(place / "tiny.toml"), "run.name=told", *(word.format(out=place) for word in words)]
    check(run_world(2, train_rank, recipe), [part.replace("{out}", str(place)) for part in parts])


HERE = {  # what a command refuses in this process; the command's words, and parts of its last line
    "compare-run": (["compare", "{out}/a-run"], ["a-run is one run, and a comparison has several: name a recipe with"]),
    "compare-absent": (["compare", "{out}/none.toml"], ["none.toml': no such file or name; "]),
    "html-unwritable": (
        ["data", "{recipe}", "--html", "/proc/page.html"],
        ["--html /proc/page.html: cannot be written"],
    ),
    "html-nowhere": (["plan", "llama8b-fsdp", "--html", "{out}/none/a.html"], ["there is no such directory"]),
    "write-exists": (["plan", "llama8b-fsdp", "--write", "{recipe}"], ["tiny.toml: exists; name a new file"]),
    "dry-run-dir": (
        ["train", "{recipe}", "--dry-run", "run.dir={out}/a-file"],
        ["a-file is a file); set run.dir to a"],
    ),
    "plan-other": (["plan", "--model", "mixtral-8x7b"], ["its shape is not known here; known are smollm2-135m"]),
    "plan-close": (["plan", "--model", "Llama-3.1-8"], ["did you mean llama-3.1-8b?"]),
    "export-absent": (["export", "{out}/nothing"], ["not a run directory (no resolved.toml in it)"]),
    "translate-absent": (["translate", "{out}/none.json"], ["none.json: cannot be read: No such file"]),
}


@pytest.mark.parametrize("name", HERE)
def test_a_command_refuses_in_one_line(place, name, capsys):
    words, parts = HERE[name]
    (place / "a-run").mkdir(exist_ok=True)
    (place / "a-run" / "resolved.toml").touch()
    before = set(place.iterdir())
    assert main([word.format(out=place, recipe=place / "tiny.toml") for word in words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and all(part in err for part in parts), err
    assert "did you mean" not in err or "did you mean" in "".join(parts)
    assert set(place.iterdir()) == before


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
    assert not (place / name).exists() or name == "misshapen"  # weights are read when the run has begun


REFUSED = {  # by transformers' checks of a config, or by ours; with words of the line
    "type": ({"hidden_size": "32"}, "hidden_size = '32' (transformers' default is 4096): Field 'hidden_size' expected"),
    "heads": (
        {"num_attention_heads": 5},
        "num_attention_heads = 5 (transformers' default is 32): The hidden size (32)",
    ),
    "no-heads": ({"num_attention_heads": 0}, "modulo by zero"),
    "dtype": ({"dtype": "float17"}, "dtype = 'float17' (transformers' default is None): "),
    "layers": ({"layer_types": ["slanted"]}, "got ['slanted']"),
    "no-layers": ({"num_hidden_layers": 0}, "num_hidden_layers = 0; must be at least 1"),
    "rotation": (
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
        "rope_type = 'spiral'; must be one of default, linear, dynamic, yarn, longrope, llama3, proportional",
    ),
}
UNFIT = {  # what transformers takes, and no model runs with
    "key-heads": (
        {"num_key_value_heads": 3},
        "num_key_value_heads = 3 (transformers' default is 4): transformers runs no small model of it (RuntimeError: ",
    ),
    "key-heads-beyond": (
        {"num_key_value_heads": 8},
        "num_attention_heads = 4 (transformers' default is 32) or num_key_value_heads = 8 (transformers' default is 4)",
    ),
    "activation": (
        {"hidden_act": "swishy"},
        "hidden_act = 'swishy' (transformers' default is 'silu'): transformers runs no small model of it (KeyError: ",
    ),
    "padding": ({"pad_token_id": 999}, "pad_token_id = 999 (transformers' default is None): "),
    "theta": (
        {"rope_theta": 0},
        "is {'rope_theta': 10000.0, 'rope_type': 'default'}): the loss of its small model is ",
    ),
}


def changed(tiny, folder, change):
    """The config of the tiny model with `change`, as a run loads it."""
    config = json.loads((tiny / "model" / "config.json").read_text())
    if "rope_theta" in change:
        change = {"rope_parameters": {"rope_type": "default", **change}}
    (folder / "config.json").write_text(json.dumps(config | change))
    return load_config(Model(path=str(folder)), folder, 64)


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_transformers_refuses_is_no_bug_of_ours(tiny, name, tmp_path):
    """It raises errors of a dozen kinds, and takes some numbers that no model has."""
    change, said = REFUSED[name]
    refused = said_by(changed, tiny, tmp_path, change)
    assert refused.startswith(f"model.path = '{tmp_path}': no usable config.json: ") and said in refused


@pytest.mark.parametrize("name", UNFIT)
def test_a_config_that_no_model_runs_with_names_its_key(tiny, name, tmp_path):
    """The self-check's small model fails as the large one would."""
    change, said = UNFIT[name]
    recipe = Recipe.model_validate({"model": {"path": "there"}, "train": {"steps": 1}})
    refused = said_by(check_recipe, recipe, changed(tiny, tmp_path, change))
    assert refused.startswith("model.path = 'there': family 'llama' cannot be trained: ") and said in refused


def test_fewer_steps_than_a_run_has_done_are_refused(place):
    """Before weights are read, in the words of its steps and not of a checkpoint's insides."""
    recipe = load_recipe(place / "tiny.toml", ["train.steps=3"])
    run = RunDirectory("early", place / "early", finished_steps=0, is_held=False)
    said = r"early: its newest checkpoint is of step 5, and the recipe ends at step 3; raise train.steps, or choose"
    with pytest.raises(RecipeError, match=said):
        run.check_goes_on(3, place / "early" / "checkpoints" / "step-000005", recipe)


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
    from shardbook.optim.clip import clip_gradients

    def broken(*positional, **named):
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("our own bug")
        return clip_gradients(*positional, **named)

    replace(clip_gradients, broken)
    return train_rank(words)


def test_our_own_bug_on_one_rank_is_the_last_line_of_that_rank(place):
    alone = ("run.lost_seconds=0", "run.hang_seconds=0")  # without a heartbeat, which would end rank 0 with that reason
    (_, (code, _, err)) = run_world(2, explode, [str(place / "tiny.toml"), "run.name=bug", *alone])
    assert code == 1 and "Traceback" in err
    assert err.strip().splitlines()[-1] == "shardbook: run failed: ZeroDivisionError: our own bug"
