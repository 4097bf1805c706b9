"""TRL's arguments, as a YAML for `trl sft --config` or as a command: the meaning of those that are its own.

Sources: the documentation of SFTConfig, DPOConfig, RewardConfig, ORPOConfig, CPOConfig, ModelConfig and ScriptArguments
in TRL 1.16; earlier spellings, and the words of the alignment handbook and open-r1, whose files are read too.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardbook.recipe import RecipeError
from shardbook.recipe.learning import PAIRED
from shardbook.translate.layout import read_layout, without_layout
from shardbook.translate.rules import (
    INSTEAD,
    STAGE,
    Entry,
    File,
    Program,
    Refused,
    Result,
    Rule,
    absent_entries,
    choice,
    ignored,
    is_on,
    listed_rules,
    noted,
    number,
    off,
    only,
    read_section,
    real_number,
    scalar,
    switch,
    text,
    whole,
    words,
)
from shardbook.translate.sources import columns_of, is_of_hub, listed, one_or_list, source_of
from shardbook.translate.trainer import DEFAULTS, saved_modules_of, stacks_of, targets_of, trainer_rules, when

METHODS = {"sft": "sft", "dpo": "dpo", "reward": "reward", "orpo": "orpo", "cpo": "simpo"}
UNKNOWN = {
    "GRPO": ("num_generations", "reward_funcs", "reward_weights", "num_iterations", "use_vllm", "vllm_mode"),
    "KTO": ("desirable_weight", "undesirable_weight"),
    "online methods": ("reward_model_path", "judge", "missing_eos_penalty", "kl_coef", "num_ppo_epochs"),
    "distillation": ("teacher_model_name_or_path", "lmbda", "seq_kd"),
}
OTHERS = set(words("kto grpo rloo ppo gkd xpo nash online prm bco distillation"))  # scripts that train by them
OF_ORPO = {"beta", "max_prompt_length", "max_completion_length"}
# what `trl --accelerate_config` calls its own files
OWN_CONFIGS = {"fsdp1": "zero3", "fsdp2": "zero3", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3"}
OWN_CONFIGS |= {"multi_gpu": "ddp", "single_gpu": "ddp"}
# of the names of a pair's losses, those that only a file of pairs has
OF_PAIRS = words("""beta loss_type max_prompt_length max_completion_length precompute_ref_log_probs rpo_alpha
label_smoothing reference_free simpo_gamma cpo_alpha ref_model_name_or_path force_use_ref_model""")


def loss_of(method: str) -> Rule:
    """Returns the rule of loss_type, which names another thing for each method."""

    def rule(value: Any) -> Result:
        losses = [value] if isinstance(value, str) or value is None else list(value)
        if len(losses) != 1:
            raise Refused("a sum of losses has no counterpart")
        if method in ("sft", "reward"):
            return only("nll", "chunked_nll")(losses[0])
        if method in ("simpo", "orpo"):
            return only("simpo", "sigmoid" if method == "orpo" else "simpo")(losses[0])
        return ({"preference.loss_type": losses[0]}, "") if losses[0] is not None else ({}, "")

    return rule


def dropout_of(method: str, is_disabled: Any) -> Rule:
    """Returns the rule of lora_dropout, which TRL sets to 0 where answers are compared."""
    if method == "sft" or not is_on(is_disabled):
        return number("lora.lora_dropout")
    return lambda value: ({"lora.lora_dropout": 0.0}, "dropout is off where answers are compared (disable_dropout)")


def length_of(value: Any) -> Result:
    if value is None:
        raise Refused("rows of any length have no counterpart: set data.max_length")
    return whole("data.max_length")(value)


def datasets_of(file: File) -> Rule:
    """Returns the rule of dataset_name, with its split; held-out rows only where they are evaluated."""

    def rule(value: Any) -> Result:
        sources = {
            "data.train": source_of(value, file.keys.get("dataset_train_split"), file.keys.get("dataset_config"))
        }
        if is_evaluated(file) and is_of_hub(value):
            sources["data.eval"] = source_of(
                value, file.keys.get("dataset_test_split", "test"), file.keys.get("dataset_config")
            )
        return sources, ""

    return rule


def mixer_of(file: File) -> Rule:
    """Returns the rule of the alignment handbook's mixer: hub ids with the share of each that is read."""

    def rule(value: Any) -> Result:
        if parts := [name for name, share in value.items() if real_number(share) != 1]:
            raise Refused(f"a part of {parts[0]} has no counterpart: set data.train, and data.weights for shares")
        splits = listed(file.keys.get("dataset_splits") or ["train", "test"])
        held = [split for split in splits if "test" in split]
        named = {split: [source_of(name, split) for name in value] for split in splits}
        sources = {"data.train": one_or_list([name for split in splits if split not in held for name in named[split]])}
        if held and is_evaluated(file):
            sources["data.eval"] = one_or_list([name for split in held for name in named[split]])
        return sources, ""

    return rule


def mixture_of(file: File) -> Rule:
    """Returns the rule of `datasets`, and of the alignment handbook's newer `dataset_mixture`."""

    def rule(value: Any) -> Result:
        rows = value.get("datasets", []) if isinstance(value, dict) else value
        held = value.get("test_split_size") if isinstance(value, dict) else file.keys.get("test_split_size")
        sources: list[Any] = []
        weights: list[float] = []
        for row in rows or []:
            known = {"path", "id", "name", "config", "split", "data_files", "columns", "weight", "fraction", "data_dir"}
            if other := [name for name, given in row.items() if name not in known and given]:
                raise Refused(f"{', '.join(other)} of a data set: has no counterpart")
            if row.get("data_dir"):
                raise Refused(f"the directory {row['data_dir']} of {row.get('path')} has no counterpart")
            path = row.get("data_files") or row.get("path") or row.get("id")
            subset = row.get("config") or (row.get("name") if not row.get("data_files") else None)
            sources += [path] if isinstance(path, list) else [source_of(path, row.get("split"), subset)]
            shares = [row[name] for name in ("weight", "fraction") if row.get(name) is not None]
            weights += map(real_number, shares[:1])
        if set(weights) - {1.0}:
            raise Refused("a part of a data set has no counterpart: set data.train, and data.weights for shares")
        return {"data.train": one_or_list(sources)} | ({"data.eval_size": held} if held else {}), ""

    return rule


def template_of(value: Any) -> Result:
    if value and str(value).endswith((".jinja", ".jinja2")):
        return {"data.chat_template": value}, ""
    if value:
        raise Refused("a template is a file here: write it to one, and set data.chat_template")
    return {}, ""


def text_field_of(value: Any) -> Result:
    return columns_of({"text": value} if value not in ("messages", "conversations") else {}), ""


def is_evaluated(file: File) -> bool:
    strategy = file.keys.get("eval_strategy", file.keys.get("evaluation_strategy"))
    return is_on(strategy)


def is_trl_script(name: str) -> bool:
    """Returns whether a script has the name of one of TRL's, or of a way to train that TRL has."""
    return any(part in METHODS or part in OTHERS for part in _parts(name))


def _parts(name: str) -> list[str]:
    return re.split(r"[^a-z]+", name.lower().removesuffix(".py"))


def method_of(file: File, program: str) -> tuple[str, Entry | None]:
    """Returns the method, and the entry that tells where it is not in the command. Raises RecipeError where it is one
    that a recipe has not."""
    for name, signs in UNKNOWN.items():
        if present := [sign for sign in signs if file.keys.get(sign) is not None]:
            raise RecipeError(
                f"{file.path}: trains by {name} ({', '.join(present)}), which has no counterpart; {INSTEAD}"
            )
    named = next((part for part in _parts(program) if part in METHODS or part in OTHERS), "")
    if program.startswith("trl ") or named:
        if named not in METHODS:
            raise RecipeError(f"{file.path}: {program} has no counterpart; {INSTEAD}")
        if named == "cpo" and file.keys.get("loss_type") != "simpo":
            raise RecipeError(f"{file.path}: trains by CPO, which has no counterpart; {INSTEAD}")
        return METHODS[named], None
    pairs = [sign for sign in OF_PAIRS if file.keys.get(sign) is not None]
    if set(pairs) - {"loss_type"}:
        why = f"{', '.join(pairs)}: it trains pairs"
        if file.keys.get("loss_type") == "simpo":
            return "simpo", Entry("(trainer)", None, {"method": "simpo"}, why)
        if set(pairs) <= OF_ORPO and (name := _orpo_in(file)):
            return "orpo", Entry("(trainer)", None, {"method": "orpo"}, f"{why}, and {name} names ORPO")
        return "dpo", Entry("(trainer)", None, {"method": "dpo"}, f"{why}; for ORPO set method=orpo")
    return "sft", Entry("(trainer)", None, {}, "the file does not name it: SFT; for others set method")


def _orpo_in(file: File) -> str:
    """Returns the name that says what the keys do not, since ORPO has none that DPO has not; else nothing."""
    names = {"the file's name": file.path.name, "its folder": file.path.resolve().parent.name}
    names |= {key: str(file.keys.get(key)) for key in ("output_dir", "hub_model_id", "run_name")}
    return next((what for what, name in names.items() if "orpo" in _parts(name)), "")


def trained_of(file: File, method: str) -> Entry | None:
    """Returns the entry of the tokens that are trained: TRL trains all of a conversation's unless told otherwise."""
    if method != "sft" or is_on(file.keys.get("completion_only_loss")) or is_on(file.keys.get("assistant_only_loss")):
        return None
    why = "absent is all tokens of a conversation in TRL (of prompt and completion the completion: train_on=assistant)"
    return Entry("(assistant_only_loss)", None, {"data.train_on": "all"}, why)


def rules_of(file: File, method: str) -> dict[str, Rule]:
    has_lora = is_on(file.keys.get("use_peft"))
    is_paired = method in PAIRED
    return {
        **trainer_rules(file),
        **listed_rules("trl"),
        "use_peft": ignored,
        **when(
            has_lora,
            {
                "lora_r": whole("lora.r"),
                "lora_alpha": scalar("lora.lora_alpha"),
                "lora_dropout": dropout_of(method, file.keys.get("disable_dropout", True)),
                "lora_target_modules": targets_of,
                "lora_target_parameters": stacks_of(bool(file.keys.get("lora_target_modules"))),
                "lora_modules_to_save": saved_modules_of,
                "use_rslora": switch("lora.use_rslora", True),
                "use_dora": switch("lora.use_dora", True),
            },
        ),
        "load_in_4bit": switch("model.load_in_4bit", True),
        **when(
            is_on(file.keys.get("load_in_4bit")),
            {
                "bnb_4bit_quant_type": choice("", {"nf4": None}),
                "use_bnb_nested_quant": switch("model.bnb_4bit_use_double_quant", True),
                "bnb_4bit_use_double_quant": switch("model.bnb_4bit_use_double_quant", True),
            },
        ),
        "dataset_name": datasets_of(file),
        "dataset_train_split": ignored,
        "dataset_config": ignored if file.keys.get("dataset_name") else off(),
        "dataset_mixer": mixer_of(file),
        "dataset_mixture": mixture_of(file),
        "datasets": mixture_of(file),
        "dataset_text_field": text_field_of,
        "text_column": text_field_of,
        "chat_template": template_of,
        "chat_template_path": template_of,
        "system_prompt": text("data.system"),
        "eos_token": noted("a template's own end of a turn is trained, and exported as a stop"),
        "pad_token": ignored,
        "packing_strategy": only("bfd", "bfd_requeue", "ffd", why="documents are cut at data.max_length, not split"),
        "env": noted("set them in the environment"),
        "accelerate_config": choice(STAGE, OWN_CONFIGS),
        **dict.fromkeys(words("num_processes num_machines machine_rank main_process_ip main_process_port"), ignored),
        "max_length": length_of,
        "max_seq_length": whole("data.max_length"),
        "max_prompt_length": noted("a pair is cut at data.max_length as a whole"),
        "max_completion_length": noted("a pair is cut at data.max_length as a whole"),
        "max_target_length": noted("a pair is cut at data.max_length as a whole"),
        "truncation_mode": only("keep_start", why="what is longer than data.max_length loses its end"),
        "packing": switch("data.packing", True, False),
        "assistant_only_loss": switch("data.train_on", "assistant"),
        "completion_only_loss": switch("data.train_on", "assistant"),
        "activation_offloading": switch(
            "offload.activations", "cpu", None, "inputs of blocks", activation__checkpointing="full"
        ),
        "loss_type": loss_of(method),
        **when(is_paired, {"beta": number("preference.beta")}),
        "rpo_alpha": number("preference.rpo_alpha"),
        "label_smoothing": number("preference.label_smoothing"),
        "simpo_gamma": number("preference.simpo_gamma"),
        "cpo_alpha": only(0, 0.0),
        "f_divergence_type": only("reverse_kl", "FDivergenceType.REVERSE_KL"),
        **dict.fromkeys(
            words("f_alpha_divergence_coef discopop_tau ref_model_mixup_alpha ref_model_sync_steps"), ignored
        ),
        "ref_model_name_or_path": only(file.keys.get("model_name_or_path"), why="the reference is the model itself"),
    }


def likelihood_of(file: File, method: str) -> list[Entry]:
    """Returns the refused entry of the likelihood that TRL adds to SimPO's loss where cpo_alpha is absent."""
    if method != "simpo" or file.keys.get("cpo_alpha") is not None:
        return []
    why = "absent is 1.0 in TRL, a likelihood added to SimPO's loss, which has no counterpart: write cpo_alpha: 0"
    return [Entry("(cpo_alpha)", None, {}, why, refused=True)]


RATES = {"sft": 2e-5, "reward": 1e-4}


def read(file: File, program: str = "", launcher: Sequence[Entry] = ()) -> list[Entry]:
    """Returns the entries of TRL's arguments. `program` is the command or script, where the file is one; `launcher`,
    the entries of what launches it. Raises RecipeError for a method without counterpart."""
    method, trainer_entry = method_of(file, program)
    rules = rules_of(file, method)
    entries = without_layout(read_section(file.keys, rules))
    entries += [trainer_entry] if trainer_entry else []
    if method != "sft" and not trainer_entry:
        entries.append(Entry("(command)", None, {"method": method}, program))
    entries += read_layout(file, "TRL", launcher, is_laid_out=file.is_on("accelerate_config"))
    defaults: dict[str, Any] = DEFAULTS | {
        "learning_rate": RATES.get(method, 1e-6),
        "gradient_checkpointing": True,
        "bf16": True,
        "max_length": 1024,
        "packing": False,
    }
    if "max_length" in file.keys:  # also where it is none
        del defaults["max_length"]
    if method == "reward":
        entries.append(Entry("(max_length)", None, {}, "pairs that are longer are cut, not dropped"))
    if is_on(file.keys.get("use_peft")):
        defaults |= {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
    if (trained := trained_of(file, method)) is not None:
        entries.append(trained)
    entries += likelihood_of(file, method)
    return entries + absent_entries(file.keys, defaults, rules, entries, "TRL")


TRL = Program("TRL's arguments", frozenset(rules_of(File(Path(), {}), "sft")), read)
