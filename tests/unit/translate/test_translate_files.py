"""Public configuration files of five programs, with the values found in them: each becomes the recipe that lies beside
it, which loads and is planned; transformers' own reading of the same arguments has the same numbers."""

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import HfArgumentParser, TrainingArguments

from shardbook.cli import main
from shardbook.model.shapes import known_shapes
from shardbook.plan.cluster import build_planner
from shardbook.plan.hardware import build_cluster
from shardbook.recipe import RecipeError, load_recipe, parse_recipe
from shardbook.translate import PROGRAMS, find_program, translate
from shardbook.translate.arguments import TRANSFORMERS
from shardbook.translate.reading import read_command, read_keys
from shardbook.translate.rules import KEYS, File
from shardbook.translate.trl import TRL
from shardbook.translate.write import describe, write_recipe

CONFIGS = Path(__file__).parents[2] / "configs"
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
        return read_command(path).arguments
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
    programs = dict(zip(FOLDERS, (program for program in PROGRAMS if program is not TRANSFORMERS), strict=True))
    assert find_program(File(path, keys_of(path))) is programs[path.parent.name]


# ---- keys that are spelt in several ways, comments, and files of nobody


def written(folder, file, content):
    (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / file


def test_a_field_of_deepspeed_has_two_names(tmp_path):
    """Its own and an alias, which is longer by stage3_; both mean the same."""
    names = ["max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold"]
    names += ["gather_16bit_weights_on_model_save", "module_granularity_threshold", "use_all_reduce_for_fetch_params"]
    plain, longer = (
        translate(
            written(tmp_path, "ds.json", {"zero_optimization": {"stage": 3} | {f"{prefix}{name}": 1 for name in names}})
        )
        for prefix in ("", "stage3_")
    )
    assert plain[0] == longer[0] and plain[0]["train.export_dtype"] == "bf16"
    assert not [entry for entry in plain[1] + longer[1] if entry.refused]


def test_earlier_spellings_of_accelerate(tmp_path):
    names = ("seq_length_is_variable", "attn_implementation", "seq_length", "backend")
    for axis in ("cp", "sp"):
        axes = {f"parallelism_config_{axis}_size": 2} | {f"parallelism_config_{axis}_{name}": "x" for name in names}
        settings, entries = translate(
            written(tmp_path, "a.yaml", {"distributed_type": "FSDP", "parallelism_config": axes})
        )
        assert settings["parallel.cp_size"] == 2 and not [entry for entry in entries if entry.refused]


@pytest.mark.parametrize("name", ["_comment", "//", "#", "$schema", "_why"])
def test_a_text_behind_a_mark_is_a_comment(name, tmp_path):
    inside = {"zero_optimization": {"stage": 2, name: "a note"}, name: "another"}
    settings, entries = translate(written(tmp_path, "ds.json", inside))
    assert settings["parallel.stage"] == "zero2" and not [entry for entry in entries if entry.refused]
    _, entries = translate(written(tmp_path, "ds.json", {"zero_optimization": {"stage": 2}, name: {"stage": 3}}))
    assert [entry.key for entry in entries if entry.refused] == [name]  # a section is none


@pytest.mark.parametrize("value", ["auto", None, False, 0, "none", {}, []])
def test_a_key_that_is_not_known_is_refused_whatever_its_value(value, tmp_path):
    """A misspelt key must not pass because its value is empty, or a word that has a meaning elsewhere."""
    for file, keys, misspelt in (
        ("ds.json", {"zero_optimization": {"stage": 3}}, "train_micro_batch_size_per_gpus"),
        ("a.yaml", {"distributed_type": "FSDP"}, "mixed_precisions"),
        ("b.yaml", {"base_model": "a/b", "datasets": []}, "micro_batch_sizes"),
        ("c.yaml", {"model_name_or_path": "a/b", "stage": "sft", "finetuning_type": "full"}, "cutoff_length"),
        ("d.yaml", {"model_name_or_path": "a/b", "dataset_name": "c/d"}, "learning_rates"),
    ):
        _, entries = translate(written(tmp_path, file, keys | {misspelt: value}))
        refused = [str(entry) for entry in entries if entry.refused and entry.key == misspelt]
        assert len(refused) == 1 and "not a key that is known here; did you mean" in refused[0], file


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"train_micro_batch_size_per_gpus": "auto"},
            "no key of it is known (train_micro_batch_size_per_gpus); did you",
        ),
        (
            {"hello": 1, "world": 2},
            "no key of it is known (hello, world); translate reads DeepSpeed's JSON, accelerate's",
        ),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": 8}, "looks like a model's config.json"),
        ({"peft_type": "LORA", "r": 8}, "looks like an adapter's adapter_config.json (lora.adapter is its directory)"),
        ({"actor_rollout_ref": {}, "trainer": {}}, "looks like verl's"),
        ({"checkpointer": {}, "metric_logger": {}, "optimizer": {}}, "looks like torchtune's"),
    ],
)
def test_a_file_of_which_nothing_is_known_is_refused_whole(keys, words, tmp_path, capsys):
    for file in ("a.json", "a.yaml"):
        for more in ([], ["--without-refused"]):
            assert main(["translate", str(written(tmp_path, file, keys)), *more]) == 2
            out, err = capsys.readouterr()
            assert not out and words in err and len(err.splitlines()) == 1


# ---- trainers


def settings_of(folder, keys, file="a.yaml"):
    return translate(written(folder, file, keys))


def test_auto_inside_a_trainers_deepspeed_is_the_trainers(tmp_path):
    """Not the default of transformers, which a DeepSpeed JSON by itself has."""
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    written(tmp_path, "ds.json", auto | {"optimizer": optimizer, "zero_optimization": {"stage": 2}})
    mine = {"learning_rate": 3e-4, "weight_decay": 0.1, "max_grad_norm": 0.5, "deepspeed": "some/where/ds.json"}
    for keys in (
        {"model_name_or_path": "a/b", "per_device_train_batch_size": 3, "dataset_name": "c/d"},
        {"model_name_or_path": "a/b", "per_device_train_batch_size": 3, "finetuning_type": "full", "stage": "sft"},
        {"base_model": "a/b", "micro_batch_size": 3},
    ):
        settings, _ = settings_of(tmp_path, keys | mine | {"bf16": True})
        expected = (3e-4, 0.1, 0.5, 3, "zero2", "bf16")
        names = ("optim.learning_rate", "optim.weight_decay", "optim.max_grad_norm")
        names += ("train.per_device_train_batch_size", "parallel.stage", "precision.params")
        assert tuple(settings[name] for name in names) == expected, keys
    settings, entries = settings_of(tmp_path, {"base_model": "a/b", "deepspeed": {"zero_optimization": {"stage": 3}}})
    assert (
        settings["parallel.stage"] == "zero3" and settings["optim.max_grad_norm"] == 0.0
    )  # absent is off in DeepSpeed
    _, entries = settings_of(tmp_path, {"base_model": "a/b", "deepspeed": "gone.json"})
    (gone,) = [str(entry) for entry in entries if entry.refused]
    assert gone.startswith('deepspeed = "gone.json": REFUSED, no such file')


@pytest.mark.parametrize(
    ("keys", "stage", "offload"),
    [
        ({"fsdp": "full_shard auto_wrap"}, "zero3", None),
        ({"fsdp": "shard_grad_op auto_wrap offload"}, "zero2", "cpu"),
        ({"fsdp": ["full_shard", "auto_wrap", "offload"]}, "zero3", "cpu"),
        ({"fsdp": "", "fsdp_config": {"min_num_params": 0}}, "ddp", None),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, "zero2", None),
        ({"fsdp": "hybrid_shard", "fsdp_config": {"fsdp_offload_params": True}}, "zero3", "cpu"),
    ],
)
def test_the_words_of_fsdp(keys, stage, offload, tmp_path):
    settings, entries = settings_of(tmp_path, {"model_name_or_path": "a/b", "dataset_name": "c/d"} | keys)
    assert (settings["parallel.stage"], settings.get("offload.optimizer")) == (stage, offload)
    assert [entry.key for entry in entries if entry.refused] == ["(hybrid shard)"] * ("hybrid" in str(keys))


COMMANDS = {
    "trl sft --model_name_or_path a/b --dataset_name c/d": ("sft", {"model.path": "a/b", "data.train": "c/d"}),
    "trl dpo --model_name_or_path a/b --dataset_name c/d --beta=0.2": ("dpo", {"preference.beta": 0.2}),
    "trl reward --model_name_or_path a/b --dataset_name c/d": ("reward", {"optim.learning_rate": 1e-4}),
    "accelerate launch --num_processes 8 scripts/orpo.py \\\n --model_name_or_path a/b --dataset_name c/d --beta 0.3": (
        "orpo",
        {"preference.beta": 0.3},
    ),
    "X=1\n# a note --with words\ntorchrun --nproc_per_node 8 sft.py --model_name_or_path 'a/b' --no_bf16 --use_peft": (
        None,
        {"lora.r": 16, "precision.params": "fp32"},
    ),
    "llamafactory-cli train --stage dpo --pref_loss simpo --model_name_or_path a --dataset_dir ONLINE --dataset c/d": (
        "simpo",
        {"data.train": "c/d", "lora.r": 8},
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_in_a_shell_script(command, tmp_path):
    method, expected = COMMANDS[command]
    settings, entries = settings_of(tmp_path, f"#!/bin/bash\n{command}\n", "run.sh")
    assert settings.get("method", "sft") == (method or "sft")
    assert {key: settings.get(key) for key in expected} == expected
    assert not [entry for entry in entries if entry.refused]


def test_a_command_names_files_and_its_launchers(tmp_path):
    """--config holds arguments, those of the command count more; the launcher's YAML says how ranks share."""
    written(tmp_path, "sft.yaml", "model_name_or_path: a/b\ndataset_name: c/d\nlearning_rate: 1e-4\n")
    written(tmp_path, "fsdp.yaml", "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n")
    command = "accelerate launch --config_file fsdp.yaml sft.py --config sft.yaml --learning_rate 3e-4\n"
    settings, entries = settings_of(tmp_path, command, "run.sh")
    expected = {"parallel.stage": "zero2", "optim.learning_rate": 3e-4, "model.path": "a/b", "data.train": "c/d"}
    assert {key: settings[key] for key in expected} == expected and not [entry for entry in entries if entry.refused]
    settings, entries = settings_of(tmp_path, "trl sft sft.yaml --output_dir $OUT/run --max_length ${LONG}\n", "run.sh")
    refused = {entry.key: entry.remark for entry in entries if entry.refused}
    assert set(refused) == {"output_dir", "max_length"} and "run.name" not in settings


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo hello\n", "holds no command of a training program with arguments"),
        ("", "holds no command of a training program"),
        (
            "trl sft --a 1\ntrl dpo --a 1\n",
            "holds 2 commands of a training program with arguments (--name value); one is",
        ),
        ("trl sft --config gone.yaml\n", "--config gone.yaml: no such file"),
        ("trl grpo --model_name_or_path a/b\n", "trl grpo has no counterpart"),
        ("trl sft --seed 1 --seed 2\n", "--seed: more than once"),
        ("trl sft --model_name_or_path 'a\n", "not a shell script: No closing quotation"),
        ("python other.py --nobody 1\n", "no key of it is known (nobody)"),
    ],
)
def test_a_script_that_is_refused(script, words, tmp_path, capsys):
    assert main(["translate", str(written(tmp_path, "run.sh", script))]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "expected", "refused"),
    [
        ({"warmup_ratio": 0.1, "warmup_steps": 7}, {"optim.warmup_steps": 7}, []),
        ({"warmup_ratio": 0.1, "lr_scheduler_type": "constant"}, {"optim.warmup_steps": None}, []),
        ({"warmup_ratio": 0.1, "lr_scheduler_type": "constant_with_warmup"}, {"optim.warmup_steps": 0.1}, []),
        ({"max_steps": 9, "num_train_epochs": 2}, {"train.steps": 9, "train.epochs": None}, []),
        ({"adam_beta2": 0.95}, {"optim.betas": [0.9, 0.95]}, []),
        ({"eval_steps": 5}, {"train.eval_steps": None}, []),
        ({"eval_strategy": "steps", "eval_steps": 5}, {"train.eval_steps": 5, "data.eval": "c/d:test"}, []),
        ({"eval_strategy": "steps", "logging_steps": 3}, {"train.eval_steps": 3}, []),
        ({"save_strategy": "no"}, {"train.save_steps": 0}, []),
        ({"fp16": True}, {}, ["fp16"]),
        ({"bf16": False}, {"precision.params": "fp32"}, []),
        ({"optim": "adafactor"}, {}, ["optim"]),
        ({"optim": "paged_adamw_8bit"}, {"optim.name": "adamw_8bit"}, []),
        ({"lora_r": 4}, {"lora.r": None}, []),
        ({"use_peft": True, "lora_target_modules": "all-linear"}, {"lora.target_modules": "all-linear"}, []),
        ({"use_peft": True, "lora_target_modules": ".*proj"}, {}, ["lora_target_modules"]),
        ({"use_peft": True, "lora_dropout": 0.0, "lora_target_parameters": ["mlp.experts.down_proj"]},
         {"lora.target_parameters": ["mlp.experts.down_proj"], "lora.target_modules": []}, []),
        ({"use_peft": True, "lora_dropout": 0.0, "lora_target_modules": "k_proj", "lora_target_parameters": "a.b"},
         {"lora.target_parameters": ["a.b"], "lora.target_modules": ["k_proj"]}, []),
        ({"use_peft": True, "lora_target_parameters": [".*down_proj"]}, {}, ["lora_target_parameters"]),
        ({"gradient_checkpointing": False}, {"activation.checkpointing": None}, []),
        ({"activation_checkpointing_kwargs": {"every_n_layers": 2}, "activation_checkpointing": True},
         {"activation.checkpointing": "every:2"}, []),
        ({"report_to": "tensorboard"}, {"run.report_to": "tensorboard"}, []),
        ({"output_dir": "/a/b c"}, {"run.dir": None}, ["output_dir"]),
        ({"resume_from_checkpoint": "out/checkpoint-5"}, {}, ["resume_from_checkpoint"]),
        ({"assistant_only_loss": True}, {"data.train_on": "assistant"}, []),
        ({}, {"data.train_on": "all", "data.packing": False, "data.max_length": 1024, "train.epochs": 3}, []),
        ({"dataset_config": "main", "dataset_train_split": "train_sft"}, {"data.train": "c/d:main:train_sft"}, []),
        ({"learning_rate": "fast", "per_device_train_batch_size": 1.5, "bf16": "maybe", "seed": True},
         {}, ["learning_rate", "per_device_train_batch_size", "bf16", "seed"]),
    ],
)  # fmt: skip
def test_an_argument_of_a_trainer(keys, expected, refused, tmp_path):
    settings, entries = settings_of(tmp_path, {"model_name_or_path": "a/b", "dataset_name": "c/d"} | keys)
    assert {key: settings.get(key) for key in expected} == expected
    assert [entry.key for entry in entries if entry.refused] == refused
    if not refused:
        parse_recipe(write_recipe(settings, entries, "a.yaml"), "a")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"type": "alpaca"}, {"data.train": "c/d"}),
        ({"type": "chat_template", "field_messages": "turns"}, {"data.columns": {"messages": "turns"}}),
        ({"type": "sharegpt", "field_messages": "turns",
          "message_property_mappings": {"role": "from", "content": "value"}},
         {"data.columns": {"conversations": "turns"}}),
        ({"type": "completion", "field": "body"}, {"data.columns": {"text": "body"}, "data.train_on": "all"}),
        ({"type": {"field_instruction": "q", "field_output": "a"}},
         {"data.columns": {"instruction": "q", "output": "a"}}),
        ({"path": "json", "data_files": ["x.jsonl", "y.json"], "type": "alpaca"},
         {"data.train": ["x.jsonl", "y.json"]}),
        ({"name": "sub", "split": "validation", "type": "alpaca"}, {"data.train": "c/d:sub:validation"}),
        ({"split": "train[:10%]", "type": "alpaca"}, {"data.train": "c/d[:10%]"}),
        ({"type": "input_output"}, None),
        ({"type": "chat_template", "message_property_mappings": {"role": "who", "content": "what"}}, None),
        ({"type": "chat_template", "roles_to_train": ["assistant", "user"]}, None),
        ({"type": "chat_template", "train_on_eos": "all"}, None),
        ({"type": "alpaca", "shards": 4}, None),
    ],
)  # fmt: skip
def test_a_data_set_of_axolotl(row, expected, tmp_path):
    settings, entries = settings_of(tmp_path, {"base_model": "a/b", "datasets": [{"path": "c/d"} | row]})
    assert [entry.key for entry in entries if entry.refused] == ["datasets"] * (expected is None)
    assert {key: settings.get(key) for key in expected or {}} == (expected or {})


def test_data_sets_of_llama_factory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    table = {
        "mine": {"file_name": "mine.json", "columns": {"prompt": "q", "query": None, "response": "a"}},
        "hub": {"hf_hub_url": "c/d", "subset": "main", "split": "validation", "formatting": "sharegpt"},
        "pairs": {
            "file_name": "p.json",
            "ranking": True,
            "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"},
        },
        "seen": {"file_name": "s.json", "columns": {"images": "images"}},
        "tagged": {"file_name": "t.json", "formatting": "sharegpt", "tags": {"role_tag": "who"}},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(table))
    base = {"model_name_or_path": "a/b", "stage": "sft", "finetuning_type": "full", "cutoff_len": 64}
    for keys, expected in (
        ({"dataset": "mine", "max_samples": 5},
         {"data.train": "data/mine.json[:5]", "data.columns": {"instruction": "q", "output": "a"}}),
        ({"dataset": "hub"}, {"data.train": "c/d:main:validation"}),
        ({"dataset": ["hub", "hub"], "eval_dataset": "hub"}, {"data.eval": "c/d:main:validation"}),
        ({"dataset": "pairs", "stage": "dpo"},
         {"data.columns": {"instruction": "q", "chosen": "good", "rejected": "bad"}}),
        ({"dataset": "seen"}, "seen: images has no counterpart"),
        ({"dataset": "tagged"}, "tagged: messages of who and value are not read"),
        ({"dataset": "nobody"}, "nobody is not in dataset_info.json"),
        ({"dataset": "mine", "dataset_dir": "elsewhere"}, "names of elsewhere/dataset_info.json, which is not here"),
    ):  # fmt: skip
        settings, entries = settings_of(tmp_path, base | keys)
        refused = [entry.remark for entry in entries if entry.refused]
        if isinstance(expected, str):
            assert len(refused) == 1 and expected in refused[0]
        else:
            assert not refused and {key: settings.get(key) for key in expected} == expected
