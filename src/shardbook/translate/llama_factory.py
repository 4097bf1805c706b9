"""LLaMA-Factory's YAML: the meaning of the arguments that are its own.

Sources: the arguments of LLaMA-Factory 0.9.5 (hparams) and its README of data for dataset_info.json.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardbook.recipe import RecipeError, first_line
from shardbook.recipe.learning import PAIRED
from shardbook.translate.layout import read_layout, without_layout
from shardbook.translate.reading import read_keys
from shardbook.translate.rules import (
    INSTEAD,
    WRONG,
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
    whole_number,
)
from shardbook.translate.sources import checked, columns_of, listed, one_or_list, source_of
from shardbook.translate.trainer import DEFAULTS, optimizer_of, saved_modules_of, targets_of, trainer_rules, when
from shardbook.translate.trl import dropout_of

LOSSES = {"sigmoid": None, "orpo": None, "simpo": None, "hinge": "hinge", "ipo": "ipo"}
MIXED = ("interleave_under", "interleave_over")
STAGES = {"pt": "sft", "sft": "sft", "rm": "reward", "dpo": "dpo"}


def method_of(file: File) -> str:
    """Returns the method. Raises RecipeError where a recipe has none for the stage, or the file trains nothing."""
    stage = str(file.keys.get("stage", "sft")).lower()
    if stage not in STAGES:
        raise RecipeError(f"{file.path}: trains by stage = {stage}, which has no counterpart; {INSTEAD}")
    if file.keys.get("export_dir"):
        raise RecipeError(f"{file.path}: exports a model; shardbook export does so, of a run")
    if file.keys.get("do_train") is False or not is_on(file.keys.get("do_train", True)):
        raise RecipeError(f"{file.path}: do_train = false: trains nothing; shardbook eval scores a model on rows")
    loss = str(file.keys.get("pref_loss", "sigmoid"))
    return loss if stage == "dpo" and loss in ("orpo", "simpo") else STAGES[stage]


def packing_of(value: Any) -> Result:
    return switch("data.packing", True, False, "documents do not see each other")(value)


def optim_beside_pure(value: Any) -> Result:
    """Returns nothing to set for AdamW, which pure_bf16 makes adamw_bf16."""
    if optimizer_of(value)[0] != {"optim.name": "adamw"}:
        raise Refused("beside pure_bf16 the optimizer is AdamW in bf16")
    return {}, ""


def tuned_by(value: Any) -> Result:
    return choice("", {"lora": None, "full": None}, "parts of a model that are trained have no counterpart but LoRA")(
        value
    )


def bits_of(file: File) -> Rule:
    """Returns the rule of quantization_bit, with what its neighbours say of the four bits."""

    def rule(value: Any) -> Result:
        settings, _ = choice("model.load_in_4bit", {"4": True, "none": None})(value)
        if settings:
            only("nf4", why="the four-bit format is nf4")(file.keys.get("quantization_type"))
            settings["model.bnb_4bit_use_double_quant"] = is_on(file.keys.get("double_quantization", True))
        return settings, "scales are quantised too" if settings.get("model.bnb_4bit_use_double_quant") else ""

    return rule


def adapter_of(value: Any) -> Result:
    if len(names := listed(value or [])) > 1:
        raise Refused("one adapter is continued from; add the others to the model's weights first")
    return ({"lora.adapter": names[0]}, "") if names else ({}, "")


def alpha_of(file: File) -> Rule:
    def rule(value: Any) -> Result:
        return scalar("lora.lora_alpha")(2 * whole_number(file.keys.get("lora_rank") or 8) if value is None else value)

    return rule


def mixed_by(file: File) -> Rule:
    """Returns the rule of interleave_probs, the shares of data sets."""

    def rule(value: Any) -> Result:
        if value is None or not str(file.keys.get("mix_strategy", "concat")).startswith("interleave"):
            return {}, ""
        return {"data.weights": [real_number(share) for share in listed(value)]}, "shares of an epoch's documents"

    return rule


def read_data(file: File, method: str) -> list[Entry]:
    """Returns the entries of `dataset` and `eval_dataset`, which are names in dataset_info.json."""
    entries, columns = [], dict[str, str]()
    for key, setting in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        if not is_on(file.keys.get(key)):
            continue
        try:
            parts = [_source(file, name, method) for name in listed(file.keys[key])]
            for _, names in parts:
                if any(columns.get(field, column) != column for field, column in names.items()):
                    raise Refused("its data sets name a field differently: rename the columns of one")
                columns |= names
            rows = f"[:{whole_number(count)}]" if (count := file.keys.get("max_samples")) else ""
            settings = {setting: one_or_list([checked(f"{source}{rows}") for source, _ in parts])}
            entries.append(Entry(key, file.keys[key], settings | columns_of(columns)))
        except (*WRONG, AttributeError) as error:
            entries.append(Entry(key, file.keys[key], {}, first_line(error), refused=True))
    return entries


def _source(file: File, name: str, method: str) -> tuple[str, dict[str, str]]:
    """Returns a data set's source, and its columns by field. Raises Refused."""
    folder = file.keys.get("dataset_dir", "data")
    if isinstance(folder, dict):
        table: dict[str, Any] = folder
    elif folder == "ONLINE":
        return name, {}
    elif (path := file.find(f"{folder}/dataset_info.json")) is not None:
        table, folder = read_keys(path), str(path.parent)
    else:
        raise Refused(f"names of {folder}/dataset_info.json, which is not here: set data.train to a file or a hub id")
    if (row := table.get(name)) is None:
        raise Refused(f"{name} is not in dataset_info.json: set data.train to a file or a hub id")
    known = {
        "hf_hub_url",
        "ms_hub_url",
        "om_hub_url",
        "file_name",
        "formatting",
        "ranking",
        "split",
        "subset",
        "columns",
    }
    if other := [key for key, given in row.items() if key not in known | {"tags"} and given]:
        raise Refused(f"{name}: {', '.join(other)} of dataset_info.json has no counterpart")
    if "hf_hub_url" in row:
        source = source_of(row["hf_hub_url"], row.get("split"), row.get("subset"))
    elif "file_name" in row:
        source = f"{folder}/{row['file_name']}"
    else:
        raise Refused(f"{name} is of another hub: set data.train to a file")
    return source, _columns(name, row, method)


def _columns(name: str, row: dict[str, Any], method: str) -> dict[str, str]:
    given, tags = row.get("columns") or {}, row.get("tags") or {}
    if media := [key for key in ("images", "videos", "audios", "kto_tag") if given.get(key)]:
        raise Refused(f"{name}: {', '.join(media)} has no counterpart")
    fields = {"system": "system", "tools": "tools", "chosen": "chosen", "rejected": "rejected"}
    if str(row.get("formatting", "alpaca")) == "alpaca":
        fields |= {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
        if given.get("prompt") == "text":
            fields["prompt"] = "text"
    else:
        names = (tags.get("role_tag", "from"), tags.get("content_tag", "value"))
        if names not in (("from", "value"), ("role", "content")):
            raise Refused(f"{name}: messages of {names[0]} and {names[1]} are not read; from and value are")
        fields["messages"] = "conversations" if names[0] == "from" else "messages"
        if given.get("messages") == "conversations":  # read by itself, whatever its messages' keys
            fields["messages"] = "conversations"
        elif method in PAIRED and fields["messages"] == "messages":  # beside answers they are the prompt
            fields["messages"] = "prompt"
    return {fields[key]: column for key, column in given.items() if column and fields[key] != column}


def rules_of(file: File, method: str) -> dict[str, Rule]:
    has_lora = str(file.keys.get("finetuning_type", "lora")) == "lora"
    is_paired = method in PAIRED
    pure = {"precision__params": "bf16", "optim__name": "adamw_bf16"}
    return {
        **trainer_rules(file),
        **listed_rules("llama_factory"),
        "stage": ignored,
        "finetuning_type": tuned_by,
        "adapter_name_or_path": adapter_of,
        "quantization_bit": bits_of(file),
        "quantization_method": only("bnb", "bitsandbytes", "BNB"),
        **when(
            has_lora,
            {
                "lora_rank": whole("lora.r"),
                "lora_alpha": alpha_of(file),
                "lora_dropout": dropout_of("sft" if method == "reward" else method, True),
                "lora_target": targets_of,
                "additional_target": saved_modules_of,
                "use_rslora": switch("lora.use_rslora", True),
                "use_dora": switch("lora.use_dora", True),
            },
        ),
        "use_muon": switch("optim.name", "muon"),
        **({"optim": ignored} if file.is_on("use_muon") else {}),
        **({"optim": optim_beside_pure, "bf16": ignored} if file.is_on("pure_bf16") else {}),
        "pure_bf16": switch("precision.master", "bf16", None, "rounded stochastically", **pure),
        "train_from_scratch": switch("model.init", "random"),
        "disable_gradient_checkpointing": switch("activation.checkpointing", "none", "full"),
        "use_unsloth_gc": switch("offload.activations", "cpu", None, "inputs", activation__checkpointing="full"),
        "template": noted("the tokenizer's own chat template is used: where it has none, set data.chat_template"),
        "default_system": text("data.system"),
        "enable_thinking": lambda value: (
            ({"data.chat_template_kwargs": {"enable_thinking": is_on(value)}}, "") if value is not None else ({}, "")
        ),
        "dataset": ignored,  # read by read_data
        "eval_dataset": ignored,
        "moe_aux_loss_coef": number("train.router_aux_loss_coef") if method == "sft" else off(),
        "cutoff_len": whole("data.max_length"),
        "train_on_prompt": switch("data.train_on", "all"),
        "mask_history": switch("data.train_on", "last"),
        "mix_strategy": only("concat", *MIXED * bool(file.keys.get("interleave_probs"))),
        "interleave_probs": mixed_by(file),
        "max_samples": noted("the first rows of each source, a slice behind its name"),
        "val_size": scalar("data.eval_size"),
        "packing": ignored if file.is_on("neat_packing") else packing_of,
        "neat_packing": switch("data.packing", True),
        "ignore_pad_token_for_loss": only(True, why="padding is not trained"),
        **when(is_paired, {"pref_beta": number("preference.beta"), "simpo_gamma": number("preference.simpo_gamma")}),
        "pref_ftx": number("preference.rpo_alpha") if method == "dpo" else off(),
        "pref_loss": choice("preference.loss_type", LOSSES) if file.keys.get("stage") == "dpo" else ignored,
        "fp8": off("fp8 has no counterpart; precision.params is fp32 or bf16"),
    }


def read(file: File, program: str = "", launcher: Sequence[Entry] = ()) -> list[Entry]:
    """Returns the entries of LLaMA-Factory's arguments. Raises RecipeError for a stage without counterpart."""
    method = method_of(file)
    rules = rules_of(file, method)
    keys = {key: value for key, value in file.keys.items() if key not in DATA}
    entries = without_layout(read_section(keys, rules))
    entries += read_data(file, method)
    if method != "sft":
        settings = {"method": method}
        entries.append(Entry("(stage, pref_loss)", None, settings, f"stage = {json.dumps(file.keys.get('stage'))}"))
    if file.keys.get("stage") == "pt":
        entries.append(Entry("(stage)", None, {"data.train_on": "all"}, "pt trains each token of a text"))
        entries.append(
            Entry("(cutoff_len)", None, {}, "texts are not joined and sliced: what is longer is cut, and counted")
        )
    entries += read_layout(file, "LLaMA-Factory", launcher)
    defaults: dict[str, Any] = DEFAULTS | {
        "cutoff_len": 2048,
        "disable_gradient_checkpointing": False,
        "packing": file.keys.get("stage") == "pt" or is_on(file.keys.get("neat_packing")),
    }
    if str(file.keys.get("finetuning_type", "lora")) == "lora":
        rank = file.keys.get("lora_rank") or 8
        defaults |= {"lora_rank": 8} | ({"lora_alpha": 2 * rank} if isinstance(rank, int) else {})
    return entries + absent_entries(file.keys, defaults, rules, [*launcher, *entries], "LLaMA-Factory")


DATA = ("dataset", "eval_dataset")


LLAMA_FACTORY = Program("LLaMA-Factory's YAML", frozenset(rules_of(File(Path(), {}), "sft")), read)
