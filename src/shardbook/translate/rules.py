"""The meaning of each key of a DeepSpeed JSON and of an accelerate YAML in a recipe: two tables of rules.

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
    """A key's value has no counterpart; the message says why, and what there is."""


Rule = Callable[[Any], tuple[Settings, str]]


def to(key: str, convert: Callable[[Any], Any]) -> Rule:
    return lambda value: ({key: convert(value)}, "")


OFF = ("false", "off", "no", "none", "0")


def when(settings: Settings, said: str = "") -> Rule:
    """Returns a rule that makes `settings` where a key is on, also in quotes, as YAML often has it."""
    return lambda value: (settings, said) if value and str(value).lower() not in OFF else ({}, "off")


def whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != float(value):
        raise Refused("must be a whole number")
    return int(value)


def free(why: str, value: Any) -> tuple[Settings, str]:
    return {}, why


def off(why: str, value: Any) -> tuple[Settings, str]:
    """Raises Refused unless `value` is off: false, 0, nothing, or a section that is not enabled or on no device."""
    section = value if isinstance(value, dict) else {}
    is_off = not value or value in ("none", "no") or section.get("enabled", True) is False
    if is_off or section.get("device", "not said") in ("none", None):
        return {}, "off"
    raise Refused(why)


def pick(choices: dict[str, Settings], why: str, said: str, value: Any) -> tuple[Settings, str]:
    """Returns the settings of one of `choices`, by the text of `value` in any case. Raises Refused for another."""
    key = str(value).lower()
    if key not in choices:
        raise Refused(f"{why}; what can be translated: {', '.join(choices)}")
    return choices[key], said if choices[key] or key not in OFF else "off"


STAGE = "parallel.stage"
AXES = TP_SIZE, CP_SIZE, PP_SIZE = "parallel.tp_size", "parallel.cp_size", "parallel.pp_size"


def tables(program: str) -> dict[str, Rule]:
    """Returns the rules of remarks.toml and choices.toml for the keys of `program`."""
    remarks, choices = (
        tomllib.loads(Path(__file__).with_name(name).read_text())[program] for name in ("remarks.toml", "choices.toml")
    )
    kinds = {"free": free, "off": off}
    found = [(partial(kinds[kind], why), keys) for kind, reasons in remarks.items() for why, keys in reasons.items()]
    found += [(partial(pick, row["sets"], row["refused"], row.get("said", "")), row["keys"]) for row in choices]
    return {key: rule for rule, keys in found for key in keys}


def half_of(name: str, value: Any) -> tuple[Settings, str]:
    enabled = value.get("enabled", False)
    if enabled == "auto":
        return {}, "auto: Shardbook's default stays, bf16 on a GPU"
    if enabled and name == "fp16":
        raise Refused("fp16 with loss scaling has no counterpart; use bf16 (precision.params=bf16)")
    return ({"precision.params": "bf16"}, "masters stay fp32") if enabled else ({}, "off")


def optimizer_of(value: Any) -> tuple[Settings, str]:
    if str(value.get("type", "")).lower() not in ("adam", "adamw", "fusedadam"):
        raise Refused(f"{value.get('type')} has no counterpart; optim.name is adamw")
    settings: Settings = {"optim.name": "adamw"}
    names = {"lr": "learning_rate", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
    same, left = (("adam_w_mode", True), ("bias_correction", True)), []
    for name, given in value.get("params", {}).items():
        if given == "auto":
            left.append(name)
        elif name in names:
            settings[f"optim.{names[name]}"] = [float(x) for x in given] if name == "betas" else float(given)
        elif name not in ("torch_adam", "fused") and (name, given) not in same:
            raise Refused(f"params.{name} = {given!r} has no counterpart")
    said = "matrices decay, vectors (norms, biases) do not"
    return settings, said + (f"; auto, so Shardbook's defaults: {', '.join(left)}" if left else "")


def scheduler_of(value: Any) -> tuple[Settings, str]:
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if value.get("type") not in shapes:
        raise Refused(f"{value.get('type')} has no counterpart; what can be translated: {', '.join(shapes)}")
    settings: Settings = {"optim.lr_scheduler_type": shapes[value["type"]]}
    said, params = [], value.get("params", {})
    for name, given in params.items():
        if given == "auto":
            said.append(f"{name} is auto, so Shardbook's default")
        elif name == "warmup_num_steps":
            settings["optim.warmup_steps"] = whole(given)
        elif name == "total_num_steps":
            settings["train.steps"] = whole(given)
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


def axis_of(key: str, said: str, value: Any) -> tuple[Settings, str]:
    """Returns the setting for the number of ranks along an axis inside the model: 1 is off, and 0 in DeepSpeed."""
    if whole(value) < 0:
        raise Refused("must be a whole number of ranks")
    return ({key: whole(value)}, said) if whole(value) > 1 else ({}, "off")


alike_of = partial(axis_of, TP_SIZE, "neighbouring ranks; between matrices they split tokens too")
slices_of = partial(axis_of, CP_SIZE, "neighbouring ranks; inside attention slices are exchanged for heads (Ulysses)")
stages_of = partial(axis_of, PP_SIZE, "blocks are dealt out evenly, micro-batches run in 1f1b")


def runs_of(value: Any) -> tuple[Settings, str]:
    """Returns checkpointing for DeepSpeed's interval: the layers of a run, of which only the first input is kept."""
    if whole(value) < 0:
        raise Refused("must be a whole number of layers")
    said = f"the input of each block is kept, not of each run of {value}" if whole(value) > 1 else ""
    return ({"activation.checkpointing": "full"}, said) if whole(value) else ({}, "off")


def tracker_of(value: Any) -> tuple[Settings, str]:
    if not value.get("enabled", False):
        return {}, "off"
    project = {"run.project": value["project"]} if value.get("project") else {}
    left = [name for name in ("team", "group") if value.get(name)]
    return {"run.report_to": "wandb"} | project, f"set {', '.join(left)} as wandb's own variables" if left else ""


def tier_of(what: str, value: Any) -> tuple[Settings, str]:
    """Returns the storage tier of `what` (optimizer, params), from a section or a device's name. Raises Refused."""
    same = {"device", "nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init"}
    same |= {"pipeline_read", "pipeline_write", "ratio"}
    section = value if isinstance(value, dict) else {"device": value}
    device = str(section.get("device") or "none").lower()
    if device == "none":
        return {}, "off"
    if device not in ("cpu", "nvme"):
        raise Refused("device must be none, cpu or nvme")
    if section.get("ratio", 1) != 1:
        raise Refused(f"ratio {section['ratio']}: all of it or nothing")
    if other := [name for name in section if name not in same]:
        raise Refused(f"{', '.join(other)}: has no counterpart")
    path = {"offload.path": section["nvme_path"]} if section.get("nvme_path") and device == "nvme" else {}
    return {f"offload.{what}": device} | path, "memory is pinned, and transfers overlap, always"


def path_of(value: Any) -> tuple[Settings, str]:
    return ({"offload.path": value}, "") if value and value != "none" else ({}, "off")


INPUTS = {"offload.activations": "cpu", "activation.checkpointing": "full"}
ACCUMULATION = to("train.gradient_accumulation_steps", whole)
CLIPPING = to("optim.max_grad_norm", float)
DEEPSPEED: dict[str, Rule] = tables("deepspeed") | {
    "train_micro_batch_size_per_gpu": to("train.per_device_train_batch_size", whole),
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": CLIPPING,
    "steps_per_print": to("train.logging_steps", whole),
    "optimizer": optimizer_of,
    "scheduler": scheduler_of,
    "fp16": partial(half_of, "fp16"),
    "bf16": partial(half_of, "bf16"),
    "zero_optimization.zero_hpz_partition_size": secondary_of,
    "zero_optimization.mics_shard_size": lambda value: (
        ({STAGE: "hsdp", "parallel.dp_shard_size": whole(value)}, "MiCS is hybrid shard") if value > 0 else ({}, "off")
    ),
    "zero_optimization.offload_optimizer": partial(tier_of, "optimizer"),
    "zero_optimization.offload_param": partial(tier_of, "params"),
    "zero_optimization.cpu_offload": when({"offload.optimizer": "cpu"}),
    "zero_optimization.cpu_offload_params": when({"offload.params": "cpu"}),
    "tensor_parallel.autotp_size": alike_of,
    "sequence_parallel_size": slices_of,
    "pipeline.stages": stages_of,
    "pipeline.activation_checkpoint_interval": runs_of,
    "activation_checkpointing.cpu_checkpointing": when(INPUTS, "inputs of blocks"),
    "wandb": tracker_of,
}
FSDP: dict[str, Rule] = tables("fsdp") | {
    "fsdp_offload_params": when({"offload.optimizer": "cpu", "offload.params": "cpu"}),
    "fsdp_min_num_params": lambda value: ({"parallel.wrap": f"size:{whole(value)}"} if whole(value) else {}, ""),
}
ACCELERATE: dict[str, Rule] = tables("accelerate") | {
    **{f"fsdp_config.{name}": rule for name, rule in FSDP.items()},
    "deepspeed_config.gradient_accumulation_steps": ACCUMULATION,
    "deepspeed_config.offload_optimizer_device": partial(tier_of, "optimizer"),
    "deepspeed_config.offload_param_device": partial(tier_of, "params"),
    "deepspeed_config.offload_optimizer_nvme_path": path_of,
    "deepspeed_config.offload_param_nvme_path": path_of,
    "deepspeed_config.gradient_clipping": CLIPPING,
    "parallelism_config.parallelism_config_dp_replicate_size": to("parallel.dp_replicate_size", whole),
    "parallelism_config.parallelism_config_dp_shard_size": to("parallel.dp_shard_size", whole),
    "parallelism_config.parallelism_config_tp_size": alike_of,
    "parallelism_config.parallelism_config_cp_size": slices_of,
    "parallelism_config.parallelism_config_sp_size": slices_of,
    "megatron_lm_config.megatron_lm_tp_degree": alike_of,
    "megatron_lm_config.megatron_lm_pp_degree": stages_of,
    "megatron_lm_config.megatron_lm_num_micro_batches": ACCUMULATION,
    "megatron_lm_config.megatron_lm_gradient_clipping": CLIPPING,
}
