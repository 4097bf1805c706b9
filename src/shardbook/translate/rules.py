"""The meaning of each key of a DeepSpeed JSON and of an accelerate YAML in a recipe: keys.toml, read as rules.

A rule turns a value into settings and a remark, or raises Refused. A rule on a section covers each of its keys that has
no rule of its own.
Sources: DeepSpeed's configuration page (deepspeed.ai/docs/config-json), accelerate's FSDP and DeepSpeed usage guides.
"""

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Settings = dict[str, Any]  # by section.key of a recipe


class Refused(Exception):
    """The error of a value without a counterpart in a recipe; its message says why, and what there is instead."""


Rule = Callable[[Any], tuple[Settings, str]]
KEYS = tomllib.loads(Path(__file__).with_name("keys.toml").read_text())
AUTO = KEYS["auto"]  # by the last part of a key
STAGE = "parallel.stage"
AXES = TP_SIZE, CP_SIZE, PP_SIZE = "parallel.tp_size", "parallel.cp_size", "parallel.pp_size"
ON, OFF = ("true", "on", "yes", "1"), ("false", "off", "no", "none", "0")
OF_AXES = {
    TP_SIZE: "neighbouring ranks; between matrices they split tokens too",
    CP_SIZE: "neighbouring ranks; inside attention slices are exchanged for heads (Ulysses)",
    PP_SIZE: "blocks are dealt out evenly, micro-batches run in 1f1b",
}


def whole_number(value: Any) -> int:
    if isinstance(value, bool) or int(value) != float(value):
        raise Refused("must be a whole number")
    return int(value)


def is_enabled(section: Any) -> bool:
    if (enabled := section.get("enabled", False)) not in (True, False):
        raise Refused(f"enabled = {enabled!r}: must be true or false")
    return bool(enabled)


def off(why: str, value: Any) -> tuple[Settings, str]:
    """Raises Refused unless `value` is off: false, 0, nothing, or a section that is not enabled or on no device."""
    section = value if isinstance(value, dict) else {}
    is_off = not value or value in ("none", "no") or section.get("enabled", True) is False
    if is_off or section.get("device", "not said") in ("none", None):
        return {}, "off"
    raise Refused(why)


def axis(key: str, value: Any) -> tuple[Settings, str]:
    """Returns the setting for the number of ranks along an axis inside the model: 1 is off, and 0 in DeepSpeed."""
    if (ranks := whole_number(value)) < 0:
        raise Refused("must be a whole number of ranks")
    return ({key: ranks}, OF_AXES[key]) if ranks > 1 else ({}, "off")


def one_of(name: str, value: Any) -> tuple[Settings, str]:
    """Returns the settings of one value of the map `name`, in any case. Raises Refused for another."""
    row, word = KEYS["values"][name], str(value).lower()
    choices = row["to"]
    if word not in choices and "true" in choices:
        word = "true" if word in ON else "false" if word in OFF else word
    if word not in choices:
        why = row.get("refused", "true or false")
        raise Refused(f"{why}; what can be translated: {', '.join(choices)}")
    settings = {row["key"]: choices[word]} | row.get("beside", {}) if choices[word] != "" else {}
    return settings, row.get("said", "") if settings or word not in OFF else "off"


def device(what: str, value: Any) -> tuple[Settings, str]:
    """Returns the storage tier of `what` (optimizer, params), from a section. Raises Refused."""
    same = {"device", "nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init"}
    same |= {"pipeline_read", "pipeline_write", "ratio"}
    settings, said = one_of(f"{what}_device", value.get("device") or "none")
    if not settings:
        return settings, said
    if value.get("ratio", 1) != 1:
        raise Refused(f"ratio {value['ratio']}: all of it or nothing")
    if other := [name for name in value if name not in same]:
        raise Refused(f"{', '.join(other)}: has no counterpart")
    return settings | (path_of(value.get("nvme_path"))[0] if "nvme" in settings.values() else {}), said


def path_of(value: Any) -> tuple[Settings, str]:
    return ({"offload.path": value}, "") if value and value != "none" else ({}, "off")


def half_of(value: Any) -> tuple[Settings, str]:
    if value.get("enabled") == "auto":
        return {}, "auto: Shardbook's default stays, bf16 on a GPU"
    return ({"precision.params": "bf16"}, "masters stay fp32") if is_enabled(value) else ({}, "off")


def fp16_of(value: Any) -> tuple[Settings, str]:
    if value.get("enabled") != "auto" and is_enabled(value):
        raise Refused("fp16 with loss scaling has no counterpart; use bf16 (precision.params=bf16)")
    return half_of(value)


def printed_of(value: Any) -> tuple[Settings, str]:
    steps = whole_number(value)
    rare = f"Shardbook logs the loss as rarely, once in {steps} steps: set train.logging_steps=10 to see more of it"
    return {"train.logging_steps": steps}, rare if steps > 10 else ""


def params_of(section: Any, said: list[str], absent: Settings) -> Settings:
    """Returns the `params` of an optimizer or scheduler; in the place of "auto" its value, and what DeepSpeed takes for
    those that are `absent`, which `said` tells both."""
    given = section.get("params", {})
    said += [f"{name} is absent: {value} in DeepSpeed" for name, value in absent.items() if name not in given]
    params = absent | given
    for name in [name for name, given in params.items() if given == "auto"]:
        if name in AUTO:
            params[name] = AUTO[name]
            said.append(f"{name} is auto: {AUTO[name]} in transformers")
        else:
            del params[name]
            said.append(f"{name} is auto, so Shardbook's default")
    return params


def optimizer_of(value: Any) -> tuple[Settings, str]:
    if str(value.get("type", "")).lower() not in ("adam", "adamw", "fusedadam"):
        raise Refused(f"{value.get('type')} has no counterpart; optim.name is adamw")
    settings: Settings = {"optim.name": "adamw"}
    names = {"lr": "learning_rate", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
    same, said = (("adam_w_mode", True), ("bias_correction", True)), ["matrices decay, vectors (norms, biases) do not"]
    for name, given in params_of(value, said, {"lr": 1e-3}).items():
        if name in names:
            settings[f"optim.{names[name]}"] = [float(x) for x in given] if name == "betas" else float(given)
        elif name not in ("torch_adam", "fused") and (name, given) not in same:
            raise Refused(f"params.{name} = {given!r} has no counterpart")
    return settings, "; ".join(said)


def scheduler_of(value: Any) -> tuple[Settings, str]:
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if value.get("type") not in shapes:
        raise Refused(f"{value.get('type')} has no counterpart; what can be translated: {', '.join(shapes)}")
    settings: Settings = {"optim.lr_scheduler_type": shapes[value["type"]]}
    said: list[str] = []
    absent = {"warmup_num_steps": 1000} | ({"warmup_max_lr": 1e-3} if value["type"] != "WarmupCosineLR" else {})
    params = params_of(value, said, absent)
    for name, given in params.items():
        if name == "warmup_num_steps":
            settings["optim.warmup_steps"] = whole_number(given)
        elif name == "total_num_steps":
            settings["train.steps"] = whole_number(given)
        elif name == "warmup_max_lr":
            settings["optim.learning_rate"] = float(given)
        elif name in ("warmup_min_lr", "warmup_min_ratio", "cos_min_ratio"):
            if given:
                said.append(f"{name} = {given} becomes 0")
        elif name == "warmup_type":
            said += [] if given == "linear" else [f"warm-up is linear in place of {given}"]
        elif (name, given) != ("last_batch_iteration", -1):
            raise Refused(f"params.{name} = {given!r} has no counterpart")
    if "warmup_type" not in params and value["type"] != "WarmupCosineLR":
        said.append("warm-up is linear in place of log, DeepSpeed's default")
    return settings, "; ".join(said)


def secondary_of(value: Any) -> tuple[Settings, str]:
    if not isinstance(value, int) or value < 1:
        raise Refused("must be a whole number of ranks, at least 1")
    return ({STAGE: "zeropp", "parallel.secondary_shard": value}, "hpZ") if value > 1 else ({}, "off")


def replicas_of(value: Any) -> tuple[Settings, str]:
    shards: Settings = {STAGE: "hsdp", "parallel.dp_shard_size": whole_number(value)}
    return (shards, "MiCS is hybrid shard") if value > 0 else ({}, "off")


def runs_of(value: Any) -> tuple[Settings, str]:
    """Returns the checkpointing for DeepSpeed's interval, which keeps the first input of each run of layers."""
    if whole_number(value) < 0:
        raise Refused("must be a whole number of layers")
    said = f"the input of each block is kept, not of each run of {value}" if whole_number(value) > 1 else ""
    return ({"activation.checkpointing": "full"}, said) if whole_number(value) else ({}, "off")


def tracker_of(value: Any) -> tuple[Settings, str]:
    if not is_enabled(value):
        return {}, "off"
    project = {"run.project": value["project"]} if value.get("project") else {}
    left = [name for name in ("team", "group") if value.get(name)]
    return {"run.report_to": "wandb"} | project, f"set {', '.join(left)} as wandb's own variables" if left else ""


def wrap_of(value: Any) -> tuple[Settings, str]:
    return {"parallel.wrap": f"size:{whole_number(value)}"} if whole_number(value) else {}, ""


KINDS: dict[str, Callable[[str, Any], tuple[Settings, str]]] = {
    "free": lambda why, value: ({}, why),
    "whole": lambda key, value: ({key: whole_number(value)}, ""),
    "number": lambda key, value: ({key: float(value)}, ""),
    **{each.__name__: each for each in (off, axis, one_of, device)},
}


def rules_of(program: str) -> dict[str, Rule]:
    """Returns the rules of keys.toml for the keys of `program`."""
    found: dict[str, Rule] = {}
    for kind, rows in KEYS[program].items():
        for what, keys in rows.items():
            found |= dict.fromkeys(keys, globals()[what] if kind == "by" else partial(KINDS[kind], what))
    return found


DEEPSPEED = rules_of("deepspeed")
ACCELERATE = rules_of("accelerate") | {f"fsdp_config.{name}": rule for name, rule in rules_of("fsdp").items()}
