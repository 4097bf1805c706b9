"""Public configuration files of five programs, with the values found in them: each becomes the recipe that lies beside
it, which loads and is planned; transformers' own reading of the same arguments has the same numbers."""

import dataclasses
from pathlib import Path

import pytest
from transformers import HfArgumentParser, TrainingArguments

from shardbook.cli import main
from shardbook.model.shapes import known_shapes
from shardbook.plan.cluster import build_planner
from shardbook.plan.hardware import build_cluster
from shardbook.recipe import RecipeError, load_recipe, parse_recipe
from shardbook.translate import PROGRAMS, find_program, translate
from shardbook.translate.reading import read_command, read_keys
from shardbook.translate.rules import KEYS, File
from shardbook.translate.trl import TRL
from shardbook.translate.write import describe, write_recipe

CONFIGS = Path(__file__).parents[1] / "configs"
KINDS = (".json", ".yaml", ".yml", ".sh")
FILES = sorted(path for path in CONFIGS.glob("*/*") if path.suffix in KINDS)
NAMES = [f"{path.parent.name}/{path.name}" for path in FILES]
REFUSED_WHOLE = {
    "trl/open-r1-grpo-demo.yaml": "trains by GRPO (num_generations, reward_funcs, use_vllm), which has no counterpart",
    "llamafactory/llama3-lora-kto.yaml": "trains by stage = kto, which has no counterpart",
}
TRANSLATED = [name for name in NAMES if name not in REFUSED_WHOLE]


@pytest.fixture(autouse=True)
def in_the_folder_of_its_program(request, monkeypatch):
    """A file names others from the folder in which its program is started."""
    if name := getattr(request.node, "callspec", None) and request.node.callspec.params.get("name"):
        monkeypatch.chdir((CONFIGS / name).parent)


def keys_of(path):
    if path.suffix == ".sh":
        _, arguments, _ = read_command(path)
        return arguments
    return read_keys(path)


def leaves(keys, prefix=""):
    for name, value in keys.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_there_are_ten_files_of_each_program():
    assert {folder: sum(name.startswith(f"{folder}/") for name in NAMES) for folder in FOLDERS} == dict.fromkeys(
        FOLDERS, 10
    )


FOLDERS = ("deepspeed", "accelerate", "axolotl", "llamafactory", "trl")


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_public_file_becomes_the_recipe_beside_it(name):
    path = CONFIGS / name
    settings, entries = translate(path)
    text = write_recipe(settings, entries, path.name)
    assert text == path.with_suffix(".toml").read_text()
    parse_recipe(text, name)
    for leaf in leaves(keys_of(path)):  # none in silence
        assert any(
            leaf == entry.key or leaf.startswith(f"{entry.key}.") or entry.key.startswith((f"{leaf}: ", f"{leaf}."))
            for entry in entries
        ), leaf
    lines = describe(entries)
    for entry in entries:
        assert sum(entry.key in line for line in lines) >= 1, entry


@pytest.mark.parametrize("name", REFUSED_WHOLE)
def test_a_method_without_counterpart_is_refused_whole(name, capsys):
    for more in ([], ["--without-refused"]):
        assert main(["translate", str(CONFIGS / name), *more]) == 2
        out, err = capsys.readouterr()
        assert not out and REFUSED_WHOLE[name] in err


@pytest.mark.parametrize("name", [name for name in TRANSLATED if name.startswith(("trl/", "llamafactory/"))])
def test_the_numbers_are_those_that_transformers_reads(name, tmp_path):
    """The reference is TrainingArguments, built from the same keys; keys of other classes are left out."""
    keys = keys_of(CONFIGS / name)
    known = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    plain = {key: value for key, value in keys.items() if key in known and value is not None}
    apart = ("deepspeed", "fsdp", "push_to_hub", "report_to", "eval_strategy", "eval_steps", "bf16", "fp16", "tf32")
    plain = {key: value for key, value in plain.items() if key not in (*apart, "lr_scheduler_kwargs", "optim")}
    plain |= {"output_dir": str(tmp_path), "use_cpu": True}
    (read,) = HfArgumentParser(TrainingArguments).parse_dict(plain)
    settings, entries = translate(CONFIGS / name)
    refused = {entry.key for entry in entries if entry.refused}
    pairs = {
        "optim.learning_rate": "learning_rate",
        "optim.weight_decay": "weight_decay",
        "optim.eps": "adam_epsilon",
        "optim.max_grad_norm": "max_grad_norm",
        "optim.lr_scheduler_type": "lr_scheduler_type",
        "train.per_device_train_batch_size": "per_device_train_batch_size",
        "train.gradient_accumulation_steps": "gradient_accumulation_steps",
        "train.seed": "seed",
        "train.logging_steps": "logging_steps",
    }
    recipe = parse_recipe(write_recipe(settings, entries, name), name)
    for setting, field in pairs.items():
        section, _, key = setting.partition(".")
        if field in refused or (field == "logging_steps" and field not in keys):
            continue
        expected = getattr(read, field)
        expected = getattr(expected, "value", expected)
        if field == "learning_rate" and field not in keys:
            continue  # each class of TRL has its own
        assert getattr(getattr(recipe, section), key) == (
            "constant" if expected == "constant_with_warmup" else expected
        ), setting
    assert recipe.optim.betas == [read.adam_beta1, read.adam_beta2]
    assert (recipe.train.steps or 0) == max(read.max_steps, 0)
    assert recipe.train.epochs == (0 if read.max_steps > 0 else read.num_train_epochs)
    warmup = keys.get("warmup_steps") or keys.get("warmup_ratio") or 0
    assert recipe.optim.warmup_steps == (0 if read.lr_scheduler_type.value == "constant" else warmup)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSLATED)
def test_the_recipe_is_planned(name):
    """On as many GPUs as the file names; a model whose shape is not known here is planned as Llama 3.1 8B."""
    known = {hub_id for shape in known_shapes().values() for hub_id in shape["ids"]}
    path = CONFIGS / name
    recipe = load_recipe(path.with_suffix(".toml"))
    recipe = load_recipe(path.with_suffix(".toml"), [] if recipe.model.path in known else [STAND_IN])
    if name in TOO_LONG:
        with pytest.raises(RecipeError, match=TOO_LONG[name]):
            build_planner(recipe)
        return
    gpus = max(keys_of(path).get("num_processes", 16), recipe.parallel.row_ranks)
    planned = build_planner(recipe).stages(build_cluster("h100", gpus))[recipe.parallel.stage]
    assert planned.peak.total > 0 and planned.time.seconds > 0


TOO_LONG = {"axolotl/llama3-8b-deepspeed-alst.yaml": "sees at most 131072 tokens"}  # where the file asks for 500,000
STAND_IN = "model.path=meta-llama/Llama-3.1-8B"


def test_each_argument_of_transformers_is_known():
    """An argument that a newer transformers has is seen here, not refused at a user."""
    assert {field.name for field in dataclasses.fields(TrainingArguments) if field.init} <= TRL.keys


def test_a_key_is_in_one_list():
    for program, lists in KEYS.items():
        ignored, refused = (lists[kind].split() for kind in ("ignored", "refused"))
        assert not set(ignored) & set(refused) and len({*ignored, *refused}) == len(ignored + refused), program


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_seen_to_be_its_programs(name):
    path = CONFIGS / name
    programs = dict(zip(FOLDERS, PROGRAMS, strict=True))
    assert find_program(File(path, keys_of(path))) is programs[path.parent.name]
