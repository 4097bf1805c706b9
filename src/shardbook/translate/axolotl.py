"""axolotl's YAML: the meaning of its keys.

Source: axolotl's configuration reference and its schema in 0.19, with earlier spellings of its examples.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardbook.recipe import RecipeError
from shardbook.recipe.learning import PAIRED
from shardbook.translate.axolotl_data import datasets_of, held_out_of, pretrained_on
from shardbook.translate.deepspeed import FP16
from shardbook.translate.layout import read_layout, without_layout
from shardbook.translate.rules import (
    ACCUMULATION,
    BATCH,
    CP_SIZE,
    EP_SIZE,
    INSTEAD,
    TP_SIZE,
    Entry,
    File,
    Program,
    Refused,
    Result,
    Rule,
    absent_entries,
    axis,
    choice,
    ignored,
    is_on,
    listed_rules,
    noted,
    number,
    off,
    only,
    read_section,
    scalar,
    switch,
    text,
    whole,
    whole_number,
    words,
)
from shardbook.translate.trainer import (
    SCHEDULES,
    chat_kwargs_of,
    epochs_of,
    half_of,
    interval_of,
    optimizer_of,
    saved_modules_of,
    stacks_of,
    targets_of,
    trainer_rules,
    when,
)
from shardbook.translate.trl import dropout_of, likelihood_of

METHODS = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "simpo": "simpo"}


def method_of(file: File) -> str:
    """Returns the method. Raises RecipeError where it is one that a recipe has not."""
    rl = file.keys.get("rl")
    if is_on(rl) and str(rl).lower() not in METHODS:
        raise RecipeError(f"{file.path}: rl = {rl}, which has no counterpart; {INSTEAD}")
    return METHODS[str(rl).lower()] if is_on(rl) else "reward" if file.is_on("reward_model") else "sft"


def adapter_of(value: Any) -> Result:
    return choice("", {"lora": None, "qlora": None, "none": None, "": None})(value)


def batch_of(file: File) -> Rule:
    """Returns the rule of batch_size, rows of a step on each rank, of which micro_batch_size makes the accumulation."""

    def rule(value: Any) -> Result:
        if value is None or file.keys.get("gradient_accumulation_steps") is not None:
            return {}, ""
        rows, micro = whole_number(value), whole_number(file.keys.get("micro_batch_size") or 1)
        if rows % micro:
            raise Refused(f"{rows} rows are no whole number of micro-batches of {micro}")
        return {ACCUMULATION: rows // micro}, ""

    return rule


def per_epoch(what: str) -> Rule:
    return noted(f"a number an epoch has no counterpart: set train.{what}_steps")


def plugins_of(value: Any) -> Result:
    """Returns nothing to set for plugins that are kernels, or whose keys have rules."""
    known = ("liger", "cut_cross", "kernels", "expert_parallel")
    if other := [name for name in value or [] if not any(kind in name for kind in known)]:
        raise Refused(f"{', '.join(other)} has no counterpart")
    return {}, ""


def shards_of(file: File) -> Rule:
    """Returns the rule of dp_shard_size, which counts no ranks that share experts there, and counts them here."""

    def rule(value: Any) -> Result:
        if value is None:
            return {}, ""
        experts = max(whole_number(file.keys.get("expert_parallel_size") or 1), 1)
        remark = "times expert_parallel_size: ranks that share experts shard the rest too" * (experts > 1)
        return {"parallel.dp_shard_size": whole_number(value) * experts}, remark

    return rule


def hub_of(value: Any) -> Result:
    return ({"train.push_to_hub": True, "train.hub_model_id": value}, "") if value else ({}, "")


def template_of(value: Any) -> Result:
    if value and not str(value).endswith((".jinja", ".jinja2")):
        raise Refused("a template is a file here: write it to one, and set data.chat_template")
    return ({"data.chat_template": value}, "") if value else ({}, "")


def special_of(value: Any) -> Result:
    """Returns a remark for tokens that a file names, which most name as the tokenizer has them."""
    named = [name for name, token in (value or {}).items() if name != "pad_token" and token]
    return {}, f"not set: the tokenizer has {', '.join(named)} already, or it cannot be trained by" if named else ""


def longer_of(value: Any) -> Result:
    if str(value).lower() == "truncate":
        return {}, ""
    return {}, "rows longer than data.max_length are cut and counted, not dropped"


def rules_of(file: File, method: str) -> dict[str, Rule]:
    is_paired = method in PAIRED
    lora: dict[str, Rule] = {
        "lora_r": whole("lora.r"),
        "lora_alpha": scalar("lora.lora_alpha"),
        "lora_dropout": dropout_of(method, True),
        "lora_target_linear": switch("lora.target_modules", "all-linear"),
        "lora_target_modules": ignored if file.is_on("lora_target_linear") else targets_of,
        "lora_target_parameters": stacks_of(any(map(file.is_on, ("lora_target_linear", "lora_target_modules")))),
        "lora_modules_to_save": saved_modules_of,
        "lora_model_dir": text("lora.adapter"),
        "peft_use_rslora": switch("lora.use_rslora", True),
        "peft_use_dora": switch("lora.use_dora", True),
    }
    beta = number("preference.beta") if is_paired else ignored
    return {
        **trainer_rules(file),
        **listed_rules("axolotl"),
        "base_model": text("model.path"),
        "revision_of_model": text("model.revision"),
        "tokenizer_config": text("model.tokenizer"),
        "adapter": adapter_of,
        **when(file.is_on("adapter"), lora),
        "load_in_4bit": switch("model.load_in_4bit", True)
        if file.is_on("adapter")
        else off("four bits need an adapter"),
        "quantize_moe_experts": ignored if file.is_on("load_in_4bit") else off("four bits are model.load_in_4bit"),
        "rl": ignored,
        "reward_model": ignored,
        "rl_beta": beta,
        "dpo_beta": beta,
        "orpo_alpha": beta if file.keys.get("rl_beta") is None else ignored,
        "base_model_config": only(file.keys.get("base_model"), why="a model's config is its own"),
        "loss_watchdog_threshold": noted("only a loss that is not finite ends a run"),
        "simpo_gamma": number("preference.simpo_gamma"),
        "cpo_alpha": only(0, 0.0),
        "rpo_alpha": number("preference.rpo_alpha"),
        "dpo_loss_type": lambda value: choice(
            "preference.loss_type", {name: name for name in words("sigmoid hinge ipo robust apo_zero apo_down")}
        )(value[0] if isinstance(value, list) and len(value) == 1 else value),
        "datasets": datasets_of("data.train", is_paired),
        "test_datasets": held_out_of(file.keys.get("datasets"), is_paired),
        "pretraining_dataset": pretrained_on,
        "val_set_size": scalar("data.eval_size"),
        "dataset_processes": whole("data.num_proc"),
        "chat_template": noted("the tokenizer's own is used: where it has none, set data.chat_template"),
        "chat_template_jinja": template_of,
        "chat_template_kwargs": chat_kwargs_of,
        "default_system_message": text("data.system"),
        "eot_tokens": noted("a template's own end of a turn is trained, and exported as a stop"),
        "special_tokens": special_of,
        "sequence_len": whole("data.max_length"),
        "excess_length_strategy": longer_of,
        "sample_packing": switch("data.packing", True, False),
        "train_on_inputs": switch("data.train_on", "all"),
        "micro_batch_size": whole(BATCH),
        "batch_size": batch_of(file),
        "num_epochs": epochs_of(file),
        "optimizer": optimizer_of,
        "lr_scheduler": choice("optim.lr_scheduler_type", SCHEDULES),
        "bfloat16": half_of,
        "float16": off(FP16),
        "float32": ignored,
        "activation_offloading": lambda value: switch(
            "offload.activations", "cpu", None, "inputs of blocks", activation__checkpointing="full"
        )(value in (True, "legacy") or value),
        "save_steps": interval_of(file, "save", "steps"),
        "eval_steps": interval_of(file, "eval", "steps"),
        "evals_per_epoch": per_epoch("eval"),
        "saves_per_epoch": per_epoch("save"),
        "plugins": plugins_of,
        "wandb_project": lambda value: (
            ({"run.report_to": "wandb", "run.project": str(value)}, "") if is_on(value) else ({}, "")
        ),
        "use_wandb": switch("run.report_to", "wandb"),
        "wandb_name": noted("the run is named by run.name"),
        "use_tensorboard": switch("run.report_to", "tensorboard"),
        "hub_model_id": hub_of,
        "dp_shard_size": shards_of(file),
        "dp_replicate_size": whole("parallel.dp_replicate_size"),
        "tensor_parallel_size": axis(TP_SIZE),
        "context_parallel_size": axis(CP_SIZE),
        "sequence_parallel_degree": axis(CP_SIZE),
        "expert_parallel_size": axis(EP_SIZE),
        "expert_parallel_token_capacity": off("no token is dropped: leave it out"),
    }


DEFAULTS: dict[str, Any] = {
    "lr_scheduler": "cosine",
    "sample_packing": False,
    "sequence_len": 512,
    "num_epochs": 1.0,
    "warmup_ratio": 0.03,
    "micro_batch_size": 1,
}


def read(file: File, program: str = "", launcher: Sequence[Entry] = ()) -> list[Entry]:
    """Returns the entries of axolotl's keys. Raises RecipeError for a method without counterpart."""
    method = method_of(file)
    rules = rules_of(file, method)
    entries = without_layout(read_section(file.keys, rules))
    if method != "sft":
        key = "rl" if method != "reward" else "reward_model"
        loss = {"preference.loss_type": "ipo"} if file.keys.get("rl") == "ipo" else {}
        entries.append(Entry(f"({key})", None, {"method": method} | loss, f"{key} = {file.keys[key]}"))
    entries += likelihood_of(file, method)
    if file.keys.get("adapter") == "qlora" or (file.is_on("adapter") and file.is_on("load_in_4bit")):
        bits = {"model.load_in_4bit": True, "model.bnb_4bit_use_double_quant": True}
        entries.append(Entry("(adapter)", None, bits, "axolotl quantises the scales too"))
    is_sharded = any("parallel.dp_shard_size" in entry.settings for entry in entries)
    entries += read_layout(file, "axolotl", launcher, fsdp_alone=True, is_laid_out=is_sharded)
    if not any(entry.settings.get("run.report_to") for entry in entries):
        entries.append(Entry("(wandb_project)", None, {"run.report_to": "none"}, "no tracker is named"))
    if file.is_on("adapter") and file.keys.get("lora_r") is None and not file.keys.get("lora_model_dir"):
        entries.append(Entry("(lora_r)", None, {}, "an adapter needs a rank: set lora.r", refused=True))
    if not any(file.keys.get(name) for name in ("save_steps", "save_strategy", "saves_per_epoch")):
        entries.append(Entry("(save_strategy)", None, {}, "absent is each epoch in axolotl: set train.save_steps"))
    if file.keys.get("excess_length_strategy") is None:
        entries.append(Entry("(excess_length_strategy)", None, {}, longer_of(None)[1]))
    if file.keys.get("warmup_steps") is None and file.keys.get("warmup_ratio") is None:
        entries.append(Entry("(warmup_steps)", None, {}, "axolotl's own warm-up is of 100 steps at most"))
    defaults = DEFAULTS | ({"warmup_ratio": None} if file.keys.get("warmup_steps") is not None else {})
    return entries + absent_entries(file.keys, defaults, rules, entries, "axolotl")


AXOLOTL = Program("axolotl's YAML", frozenset(rules_of(File(Path(), {}), "sft")), read)
