"""Inputs that once became another number, or a traceback: each with what it must become."""

import json

import pytest

from shardbook.cli import main
from shardbook.recipe import parse_recipe
from shardbook.translate import translate
from shardbook.translate.rules import Entry
from shardbook.translate.settle import refuse
from shardbook.translate.write import write_recipe

TRL = {"model_name_or_path": "a/b", "dataset_name": "c/d"}
AXOLOTL = {"base_model": "a/b", "sequence_len": 512}
FACTORY = {"model_name_or_path": "a/b", "stage": "sft", "finetuning_type": "lora", "cutoff_len": 64}


def settings_of(folder, keys, file="a.yaml"):
    (folder / file).write_text(keys if isinstance(keys, str) else json.dumps(keys))
    settings, entries = translate(folder / file)
    parse_recipe(write_recipe(settings, entries, file), file)
    return settings, {entry.key: entry.remark for entry in entries if entry.refused}


BECOMES = {
    "axolotl warms up by itself": (AXOLOTL, {"optim.warmup_steps": 0.03}),
    "a batch of pairs is of pairs": (TRL | {"beta": 0.1}, {"data.packing": False}),
    "dropout is off where answers are compared": (
        TRL | {"beta": 0.1, "use_peft": True, "lora_dropout": 0.1}, {"lora.lora_dropout": 0.0}),
    "unless it is kept": (
        TRL | {"beta": 0.1, "use_peft": True, "lora_dropout": 0.1, "disable_dropout": False},
        {"lora.lora_dropout": 0.1}),
    "arguments that all have are of none": (
        {"model_name_or_path": "a/b", "learning_rate": 1e-4, "num_train_epochs": 2, "bf16": True, "output_dir": "x"},
        {"lora.r": None, "optim.lr_scheduler_type": "linear", "train.per_device_train_batch_size": 8,
         "activation.checkpointing": None}),
    "four bits of LLaMA-Factory": (
        FACTORY | {"quantization_bit": 4}, {"model.load_in_4bit": True, "model.bnb_4bit_use_double_quant": True}),
    "a DPO file in a folder of ORPO": (
        TRL | {"beta": 0.1, "loss_type": "sigmoid", "output_dir": "out/orpo"}, {"method": "dpo"}),
    "an ORPO file": (TRL | {"beta": 0.1, "output_dir": "out/zephyr-orpo"}, {"method": "orpo"}),
    "Muon": (FACTORY | {"use_muon": True, "optim": "adamw_torch"}, {"optim.name": "muon"}),
    "neat packing packs": (FACTORY | {"neat_packing": True, "packing": False}, {"data.packing": True}),
    "axolotl's own beta": (AXOLOTL | {"rl": "orpo", "rl_beta": 0.1, "orpo_alpha": 0.5}, {"preference.beta": 0.1}),
    "accelerate's ZeRO": ({"distributed_type": "DEEPSPEED", "deepspeed_config": {}},
                          {"parallel.stage": "zero2", "precision.params": "fp32"}),
    "a loss of pairs counts for pairs": (FACTORY | {"pref_loss": "hinge"}, {"preference.loss_type": None}),
    "axolotl's length": ({"base_model": "a/b"}, {"data.max_length": 512}),
    "0.0 is off": (TRL | {"neftune_noise_alpha": 0.0, "label_smoothing_factor": 0.0}, {}),
    "AdamW in bf16": (FACTORY | {"pure_bf16": True, "optim": "adamw_torch", "bf16": False},
                      {"optim.name": "adamw_bf16", "precision.master": "bf16", "precision.params": "bf16"}),
    "a batch in DeepSpeed's JSON": (
        TRL | {"per_device_train_batch_size": 4, "deepspeed": {"train_batch_size": 32}},
        {"train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 1}),
    "FSDP that keeps its units": (
        {"distributed_type": "FSDP", "fsdp_config": {
            "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True,
            "fsdp_auto_wrap_policy": "NO_WRAP"}},
        {"parallel.stage": "zero2", "offload.params": None, "offload.optimizer": "cpu"}),
    "DeepSpeed's own lines": (
        TRL | {"logging_steps": 3, "deepspeed": {"steps_per_print": 2000, "zero_optimization": {"stage": 2}}},
        {"train.logging_steps": 3}),
    "answers as text, in a conversation": (
        AXOLOTL | {"rl": "dpo", "datasets": [{"path": "c/d", "type": "chatml.intel"}]},
        {"data.columns": {"instruction": "question"}}),
    "answers by other names": (
        AXOLOTL | {"rl": "dpo", "datasets": [{"path": "c/d", "type": "llama3.argilla"}]},
        {"data.columns": {"chosen": "chosen_response", "rejected": "rejected_response"}}),
    "OpenOrca": (
        AXOLOTL | {"datasets": [{"path": "c/d", "type": "alpaca_w_system.load_open_orca"}]},
        {"data.columns": {"instruction": "question", "output": "response", "system": "system_prompt"}}),
    "a system prompt": (
        AXOLOTL | {"datasets": [{"path": "c/d", "type": {"system_prompt": "Hi", "field_instruction": "q"}}]},
        {"data.system": "Hi", "data.columns": {"instruction": "q"}}),
    "experts beside shards, which axolotl counts apart": (
        AXOLOTL | {
            "plugins": ["axolotl.integrations.expert_parallel.ExpertParallelPlugin"], "expert_parallel_size": 2,
            "dp_shard_size": 2, "expert_parallel_backend": "deep_ep", "experts_implementation": "grouped_mm",
            "expert_parallel_token_capacity": None, "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": True}},
        {"parallel.ep_size": 2, "parallel.dp_shard_size": 4, "parallel.stage": "zero3"}),
    "experts beside shards in replicas": (
        AXOLOTL | {"expert_parallel_size": 2, "dp_shard_size": 2, "dp_replicate_size": 2,
                   "fsdp_config": {"fsdp_version": 2}},
        {"parallel.ep_size": 2, "parallel.dp_shard_size": 4, "parallel.dp_replicate_size": 2,
         "parallel.stage": "hsdp"}),
    "experts alone": (
        AXOLOTL | {"expert_parallel_size": 4},
        {"parallel.ep_size": 4, "parallel.dp_shard_size": None, "parallel.stage": "ddp"}),
    "a file has no split": (TRL | {"dataset_name": "data/x.jsonl", "eval_strategy": "steps"},
                            {"data.train": "data/x.jsonl", "data.eval": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", BECOMES)
def test_a_number_is_the_other_programs(name, tmp_path):
    keys, expected = BECOMES[name]
    settings, refused = settings_of(tmp_path, keys)
    assert {key: settings.get(key) for key in expected} == expected and not refused


REFUSED = {
    "tokens that are dropped": (
        AXOLOTL | {"expert_parallel_size": 2, "expert_parallel_token_capacity": 1024},
        ["expert_parallel_token_capacity"]),
    "bf16 masters": ({"train_batch_size": "auto", "bf16": {"enabled": True, "bf16_optimizer_states": True}}, ["bf16"]),
    "no length": (TRL | {"max_length": None}, ["max_length"]),
    "rows in order": (TRL | {"train_sampling_strategy": "sequential"}, ["train_sampling_strategy"]),
    "documents that are split": (TRL | {"packing": True, "packing_strategy": "wrapped"}, ["packing_strategy"]),
    "batches that are split": (TRL | {"accelerator_config": {"split_batches": True}}, ["accelerator_config"]),
    "another mean": (TRL | {"average_tokens_across_devices": False}, ["average_tokens_across_devices"]),
    "rows that are dropped": (AXOLOTL | {"min_sample_len": 9}, ["min_sample_len"]),
    "another config": (AXOLOTL | {"base_model_config": "c/d"}, ["base_model_config"]),
    "padding that is trained": (FACTORY | {"ignore_pad_token_for_loss": False}, ["ignore_pad_token_for_loss"]),
    "an adapter on an adapter": (FACTORY | {"create_new_adapter": True}, ["create_new_adapter"]),
    "a mix without shares": (FACTORY | {"mix_strategy": "interleave_under"}, ["mix_strategy"]),
    "fp4": (FACTORY | {"quantization_bit": 4, "quantization_type": "fp4"}, ["quantization_bit"]),
    "which tokens are trained": (
        AXOLOTL | {"datasets": [{"path": "c/d", "type": "chat_template", "train_on_eot": "all"}]}, ["datasets"]),
    "texts beside conversations": (
        AXOLOTL | {"datasets": [{"path": "c/d", "type": "alpaca"}, {"path": "e", "type": "completion"}]}, ["datasets"]),
    "held-out rows of another shape": (
        AXOLOTL | {"datasets": [{"path": "c/d", "type": {"field_instruction": "q", "field_output": "a"}}],
                   "test_datasets": [{"path": "e/f", "type": "completion", "field": "body"}]}, ["test_datasets"]),
    "a slice from behind": (TRL | {"dataset_train_split": "train[-100:]"}, ["dataset_name"]),
    "a slice of one of two": (TRL | {"dataset_train_split": "train[:10%]+train[90%:]"}, ["dataset_name"]),
    "fewer than no rows": (FACTORY | {"dataset_dir": "ONLINE", "dataset": "c/d", "max_samples": -1}, ["dataset"]),
    "a warm-up of the whole run": (TRL | {"warmup_ratio": 1.0}, ["warmup_ratio"]),
    "no number inside of a list": (AXOLOTL | {"chat_template_kwargs": {"a": [None]}}, ["chat_template_kwargs"]),
    "a part that is nothing": (
        TRL | {"dataset_mixture": {"datasets": [{"id": "c/d", "weight": 0.0}]}}, ["dataset_mixture"]),
    "rows of no size": (TRL | {"per_device_train_batch_size": 0}, ["per_device_train_batch_size"]),
    "an adapter without a rank": (AXOLOTL | {"adapter": "lora"}, ["(lora_r)"]),
    "a loss that is not known": (TRL | {"beta": 0.1, "loss_type": "exo_pair"}, ["loss_type"]),
    "a loss with labels smoothed": (TRL | {"beta": 0.1, "label_smoothing": 0.1}, ["label_smoothing"]),
    "four bits without adapters": (TRL | {"load_in_4bit": True}, ["load_in_4bit"]),
    "bf16 with an optimizer of 8 bits": (FACTORY | {"pure_bf16": True, "optim": "adamw_8bit"}, ["optim"]),
    "likelihood in ORPO": (AXOLOTL | {"rl": "orpo", "rpo_alpha": 0.5}, ["rpo_alpha"]),
    "endless": (TRL | {"max_steps": 10**400}, ["max_steps"]),
    "no word of FSDP": (TRL | {"fsdp": 5}, ["fsdp"]),
    "a word for a number": (
        TRL | {"gradient_checkpointing_kwargs": {"every_n_layers": "x"}, "gradient_checkpointing": True},
        ["gradient_checkpointing"]),
    "a table of numbers": (FACTORY | {"dataset_dir": {"x": 5}, "dataset": "x"}, ["dataset"]),
    "a list of ranks": (FACTORY | {"lora_rank": [8]}, ["lora_rank"]),
    "no rows": ({"train_micro_batch_size_per_gpu": 0, "gradient_accumulation_steps": 1, "train_batch_size": 4},
                ["train_batch_size", "train_micro_batch_size_per_gpu"]),
    "an argument of no value": (AXOLOTL | {"chat_template_kwargs": {"date": None}}, ["chat_template_kwargs"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(name, tmp_path):
    keys, expected = REFUSED[name]
    file = "a.json" if "train_micro_batch_size_per_gpu" in keys or "bf16" in keys else "a.yaml"
    _, refused = settings_of(tmp_path, keys, file)
    assert sorted(refused) == sorted(expected)


def test_what_yaml_reads_as_a_day_is_kept(tmp_path):
    text = "base_model: a/b\nchat_template_kwargs: {date: 2024-01-01}\nwandb_project: 2024-05-01\n"
    settings, refused = settings_of(tmp_path, text)
    assert (
        str(settings["data.chat_template_kwargs"]["date"]) == "2024-01-01" and settings["run.project"] == "2024-05-01"
    )
    assert not refused


def test_a_number_that_is_none_is_refused(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("base_model: a/b\nlearning_rate: .nan\n")
    assert main(["translate", str(tmp_path / "a.yaml")]) == 2
    assert ".nan: not a finite number" in capsys.readouterr().err


def test_an_optimizer_of_deepspeed_has_its_own_defaults(tmp_path):
    """transformers fills in what says auto, and leaves what is absent to DeepSpeed."""
    inside = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 2}}
    settings, _ = settings_of(tmp_path, TRL | {"weight_decay": 0.1, "adam_beta2": 0.95, "deepspeed": inside})
    assert settings["optim.weight_decay"] == 0.0 and settings["optim.betas"] == [0.9, 0.999]
    inside["optimizer"]["params"]["torch_adam"] = True
    settings, _ = settings_of(tmp_path, TRL | {"deepspeed": inside})
    assert settings["optim.weight_decay"] == 0.01  # of torch.optim.AdamW


SCRIPTS = {
    "torchrun sft.py $ARGS --model_name_or_path a/b": "$ARGS: a variable of the shell",
    "axolotl train config.yml other --learning-rate 1e-5": "other: not --name value",
    "python kto.py --model_name_or_path a/b --dataset_name c/d": "kto.py has no counterpart",
    "python train_grpo.py --model_name_or_path a/b --max_prompt_length 9": "train_grpo.py has no counterpart",
    "ACCELERATE_MIXED_PRECISION=fp16 trl sft --model_name_or_path a/b": "ACCELERATE_MIXED_PRECISION=fp16: a variable",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_hides_something_is_refused(script, tmp_path, capsys):
    (tmp_path / "run.sh").write_text(script + "\n")
    assert main(["translate", str(tmp_path / "run.sh")]) == 2
    assert SCRIPTS[script] in capsys.readouterr().err


SFT = "sft.py --model_name_or_path a/b --dataset_name c/d"
COMMANDS = {
    f"accelerate launch --use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP {SFT}": (
        {"parallel.stage": "zero3"}, []),
    "accelerate launch --config_file fsdp.yaml -m axolotl.cli.train ax.yml": (
        {"parallel.stage": "zero3", "precision.params": "bf16"}, []),
    f"python -m accelerate.commands.launch --config_file fsdp.yaml {SFT}": ({"parallel.stage": "zero3"}, []),
    f"srun --nodes 2 accelerate launch --num_cpu_threads_per_process 4 {SFT}": ({"parallel.stage": "ddp"}, []),
    "accelerate launch --mixed_precision bf16 train.py --model_name_or_path a/b --data_path x.json": (
        {"precision.params": "bf16"}, []),
    "accelerate launch --num_processes 8 -m axolotl.cli.train ax.yml": ({"precision.params": None}, []),
    f"accelerate launch --config_file ds.yaml {SFT} --max_grad_norm 0.3 --weight_decay 0.1": (
        {"optim.max_grad_norm": 0.0, "optim.weight_decay": 0.0, "parallel.stage": "zero2"}, []),
    f"accelerate launch --config_file empty.yaml --use_deepspeed --zero_stage 3 {SFT}": (
        {"parallel.stage": "zero3"}, []),
    f"LR=1e-4;\npython {SFT} --learning_rate $LR --max_steps 7": (
        {"optim.learning_rate": 1e-4, "train.steps": 7}, []),
    f"python {SFT} --run_name a#b --max_steps 7  # a note": ({"train.steps": 7}, []),
    f"python {SFT} --use_peft --lora_target_modules q_proj v_proj 2>&1 | tee log": (
        {"lora.target_modules": ["q_proj", "v_proj"]}, []),
    f"python {SFT} --max_steps 100 2>&1 | tee log": ({"train.steps": 100}, []),
    f"LR=1e-4\nif [ $1 = big ]; then LR=2e-4; fi\npython {SFT} --learning_rate $LR": ({}, ["learning_rate"]),
    f"LR=1e-4\nfor LR in 2e-4 3e-4; do\npython {SFT} --learning_rate $LR\ndone": ({}, ["learning_rate"]),
    f"python {SFT} --dataset_train_split $SPLIT": ({"data.train": "c/d"}, ["dataset_train_split"]),
    f"python {SFT} --use_peft $PEFT": ({"lora.r": None}, ["use_peft"]),
    f"python {SFT} --system_prompt 'Be brief. # really: 1:30' --seed 010": (
        {"data.system": "Be brief. # really: 1:30", "train.seed": 10}, []),
    f"python {SFT} --no_cuda": ({}, []),
    f"pip install trl\npython {SFT} --seed 3": ({"train.seed": 3}, []),
    "/opt/conda/bin/trl sft --model_name_or_path a/b --dataset_name c/d": ({"model.path": "a/b"}, []),
    "ARGS='--use_peft'\nexport M=a/b\ntorchrun sft.py $ARGS --model_name_or_path ${M} --dataset_name c/d": (
        {"lora.r": 16, "model.path": "a/b"}, []),
    "M=a/b\nM=c/d\ntrl sft --model_name_or_path $M --dataset_name c/d": ({}, ["model_name_or_path"]),
    "accelerate launch -m axolotl.cli.train --base_model a/b --sequence_len 64": ({"model.path": "a/b"}, []),
    "trl sft --model_name_or_path a/b --dataset_name c/d --max_steps $STEPS": ({}, ["max_steps"]),
    'trl sft --model_name_or_path a/b --dataset_name "$@"': ({"data.train": None}, ["dataset_name"]),
    "llamafactory-cli train --model_name_or_path a/b --stage sft --lora_rank $RANK": ({}, ["lora_rank"]),
    "trl sft --model_name_or_path a/b --dataset_name c/d; echo done > log.txt": ({"data.train": "c/d"}, []),
    "trl sft --model_name_or_path a/b --dataset_name c/d >log.txt 2>&1": ({"data.train": "c/d"}, []),
    "trl sft --model_name_or_path a/b --dataset_name c/d --run_name '' --seed 7": ({"train.seed": 7}, []),
    'echo "two\nlines"\ntrl sft --model_name_or_path a/b --dataset_name c/d': ({"data.train": "c/d"}, []),
    "trl sft --accelerate_config zero3 --num_processes 8 --model_name_or_path a/b --dataset_name c/d": (
        {"parallel.stage": "zero3"}, []),
    "python reward_modeling.py --model_name_or_path a/b --dataset_name c/d": ({"method": "reward"}, []),
    "torchrun --nproc_per_node=4 train.py --model_name_or_path a/b --data_path ./alpaca.json --bf16 True "
    "--fsdp 'full_shard auto_wrap' --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --tf32 True": (
        {"lora.r": None, "parallel.stage": "zero3", "precision.params": "bf16", "data.train": "./alpaca.json"}, []),
    "accelerate launch --mixed_precision fp16 --use_deepspeed --zero_stage 3 --gradient_clipping 0.5 sft.py "
    "--model_name_or_path a/b --dataset_name c/d": (
        {"parallel.stage": "zero3", "optim.max_grad_norm": 0.5}, ["mixed_precision"]),
    "deepspeed --num_gpus 8 train.py --deepspeed ds.json --model_name_or_path a/b --data_path x.json": (
        {"parallel.stage": "zero2", "data.train": "x.json"}, []),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command, tmp_path):
    inside = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    for file, keys in {
        "ds.json": inside | ({} if "ds.yaml" in command else {"gradient_clipping": "auto"}),
        "ds.yaml": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
        "fsdp.yaml": {"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2}},
        "empty.yaml": {"distributed_type": "DEEPSPEED", "deepspeed_config": None},
        "ax.yml": AXOLOTL | {"bf16": "auto"},
    }.items():
        (tmp_path / file).write_text(json.dumps(keys))
    expected, names = COMMANDS[command]
    settings, refused = settings_of(tmp_path, f"#!/bin/bash\n{command}\n", "run.sh")
    assert {key: settings.get(key) for key in expected} == expected and sorted(refused) == names


def test_arguments_count_more_than_their_launchers_file(tmp_path):
    (tmp_path / "acc.yaml").write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: 'no'\n"
        "deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 1}\n"
    )
    command = "accelerate launch --config_file acc.yaml sft.py --model_name_or_path a/b --dataset_name c/d"
    settings, refused = settings_of(tmp_path, f"{command} --bf16 true --gradient_accumulation_steps 8\n", "run.sh")
    assert (settings["precision.params"], settings["train.gradient_accumulation_steps"]) == ("bf16", 8) and not refused
    assert settings["parallel.stage"] == "zero3"


def test_a_command_of_llama_factory_with_a_file(tmp_path):
    (tmp_path / "c.yml").write_text(json.dumps(FACTORY | {"learning_rate": 1e-4}))
    settings, refused = settings_of(tmp_path, "llamafactory-cli train c.yml learning_rate=1e-5\n", "run.sh")
    assert settings["optim.learning_rate"] == 1e-5 and settings["lora.r"] == 8 and not refused


def test_a_recipe_without_data_does_not_train_on_other_data(tmp_path, capsys):
    """What is not in the file, or was refused, is empty in the recipe, which a run then names."""
    (tmp_path / "a.yaml").write_text(json.dumps(AXOLOTL | {"datasets": [{"path": "c/d", "type": "input_output"}]}))
    out = tmp_path / "mine.toml"
    assert main(["translate", str(tmp_path / "a.yaml"), "--without-refused", "--out", str(out)]) == 0
    assert main(["train", str(out), "model.path=smollm2-135m", "--dry-run"]) == 2
    assert "data.train = ''" in capsys.readouterr().err
    assert main(["train", str(out), "data.train=chitchat", "model.path=", "--dry-run"]) == 2
    assert "model.path = ''" in capsys.readouterr().err


def test_a_setting_that_gives_way_says_to_what(tmp_path):
    (tmp_path / "a.yaml").write_text(json.dumps(TRL | {"torch_dtype": "bfloat16", "bf16": False}))
    _, entries = translate(tmp_path / "a.yaml")
    lines = {entry.key: str(entry) for entry in entries}
    assert lines["torch_dtype"] == 'torch_dtype = "bfloat16": precision.params is set by bf16'
    assert lines["bf16"].startswith('bf16 = false: precision.params = "fp32"')


@pytest.mark.parametrize(
    ("out", "words"),
    [("x.yaml", "a recipe's file ends in .toml"), ("x", "ends in .toml"), ("no/x.toml", "no such directory")],
)
def test_a_place_that_cannot_be_written_is_refused_first(out, words, tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(json.dumps(TRL))
    assert main(["translate", str(tmp_path / "a.yaml"), "--out", str(tmp_path / out)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and words in lines[0]


def test_a_key_that_is_refused_sets_nothing_at_all(tmp_path):
    """Also not what is right of it, unless another key says the same."""
    settings = {"optim.name": "adamw_bf16", "precision.master": "bf16", "precision.params": "bf16"}
    entries = [Entry("pure_bf16", True, dict(settings)), Entry("bf16", True, {"precision.params": "bf16"})]
    refuse(settings, entries, {"precision.master"}, "why")
    assert settings == {"precision.params": "bf16"} and [entry.refused for entry in entries] == [True, False]
    fsdp = {"fsdp": "full_shard", "fsdp_config": {"offload_params": True}}  # two settings, and one contradicts LoRA
    (tmp_path / "a.yaml").write_text(json.dumps(TRL | fsdp | {"use_peft": True}))
    settings, entries = translate(tmp_path / "a.yaml")
    assert [entry.key for entry in entries if entry.refused] == ["fsdp_config.offload_params"]
    assert not [key for key in settings if key.startswith("offload.")]
