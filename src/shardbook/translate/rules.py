"""What each key of a DeepSpeed JSON and of an accelerate YAML means in a recipe: two tables of rules.

A rule turns a value into settings and a remark, or raises Refused. A rule on a section takes all of it that no longer
name has a rule of its own.
Sources: DeepSpeed's configuration page (deepspeed.ai/docs/config-json), accelerate's FSDP and DeepSpeed usage guides.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Settings = dict[str, Any]  # by section.key of a recipe


class Refused(Exception):
    """What this key asks for has no counterpart; the message says why, and what there is."""


Rule = Callable[[Any], tuple[Settings, str]]


def to(*keys: str, said: str = "", convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    return lambda value: ({key: convert(value) for key in keys}, said)


def free(why: str) -> Rule:
    return lambda value: ({}, why)


def off(why: str) -> Rule:
    """Fine as long as it is off: false, 0, nothing, or a section that is not enabled."""

    def rule(value: Any) -> tuple[Settings, str]:
        section = value if isinstance(value, dict) else {}
        if not value or value in ("none", "no") or section.get("enabled", True) is False:
            return {}, "off"
        if section.get("device") in ("none", None) and "device" in section:
            return {}, "off"
        raise Refused(why)

    return rule


def alone(why: str) -> Rule:
    """A number of ranks: fine where it is one."""

    def rule(value: Any) -> tuple[Settings, str]:
        if int(value) > 1:
            raise Refused(why)
        return {}, "off"

    return rule


def pick(choices: dict[Any, Settings], why: str, said: str = "") -> Rule:
    """One of `choices`, spelled in any case."""

    def rule(value: Any) -> tuple[Settings, str]:
        key = value.lower() if isinstance(value, str) else value
        if key not in choices:
            raise Refused(f"{why}; what can be translated: {', '.join(str(choice) for choice in choices)}")
        return choices[key], said if choices[key] or key is not False else "off"

    return rule


REMARKS = tomllib.loads(Path(__file__).with_name("remarks.toml").read_text())
HALF = "fp16 with loss scaling has no counterpart; use bf16 (precision.params=bf16)"
STAGE = "parallel.stage"
ZERO_STAGES = {0: {STAGE: "ddp"}, 1: {STAGE: "zero1"}, 2: {STAGE: "zero2"}, 3: {STAGE: "zero3"}}
WRAPS = {"transformer_based_wrap": {}, "no_wrap": {"parallel.wrap": "none"}, "size_based_wrap": {}}
STRATEGIES: dict[Any, Settings] = {
    "full_shard": {STAGE: "zero3"},
    "shard_grad_op": {STAGE: "zero2"},
    "no_shard": {STAGE: "ddp"},
    "hybrid_shard": {STAGE: "hsdp"},
}
STRATEGIES |= {number: STRATEGIES[name] for number, name in enumerate(list(STRATEGIES), start=1)}
STRATEGIES |= {str(number): STRATEGIES[number] for number in range(1, 5)}
RESHARDS: dict[Any, Settings] = STRATEGIES | {True: {STAGE: "zero3"}, False: {STAGE: "zero2"}}
RESHARDS |= {"true": RESHARDS[True], "false": RESHARDS[False]}


def remarks(program: str) -> dict[str, Rule]:
    """The rules of remarks.toml for the keys of `program`."""
    kinds = {"free": free, "off": off, "alone": alone}
    found = ((kinds[kind](why), keys) for kind, reasons in REMARKS[program].items() for why, keys in reasons.items())
    return {key: rule for rule, keys in found for key in keys}


def precision_of(value: Any) -> tuple[Settings, str]:
    if value in ("no", None, False):
        return {"precision.params": "fp32"}, ""
    if value == "bf16":
        return {"precision.params": "bf16"}, ""
    raise Refused(HALF if value == "fp16" else f"{value} has no counterpart; precision.params is fp32 or bf16")


def half_of(value: Any) -> tuple[Settings, str]:
    if not value.get("enabled", False):
        return {}, "off"
    if value["enabled"] == "auto":
        return {}, "auto: Shardbook's default stays, bf16 on a GPU"
    raise Refused(HALF)


def brain_of(value: Any) -> tuple[Settings, str]:
    if value.get("enabled", False) == "auto":
        return {}, "auto: Shardbook's default stays, bf16 on a GPU"
    return ({"precision.params": "bf16"}, "masters stay fp32") if value.get("enabled", False) else ({}, "off")


def optimizer_of(value: Any) -> tuple[Settings, str]:
    if str(value.get("type", "")).lower() not in ("adam", "adamw", "fusedadam"):
        raise Refused(f"{value.get('type')} has no counterpart; optim.name is adamw")
    settings: Settings = {"optim.name": "adamw"}
    names = {"lr": "learning_rate", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
    left = []
    for name, given in value.get("params", {}).items():
        if given == "auto":
            left.append(name)
        elif name in names:
            settings[f"optim.{names[name]}"] = [float(x) for x in given] if name == "betas" else float(given)
        elif (name, given) not in (("adam_w_mode", True), ("bias_correction", True)) and name not in (
            "torch_adam",
            "fused",
        ):
            raise Refused(f"params.{name} = {given!r} has no counterpart")
    said = "matrices decay, vectors (norms, biases) do not"
    return settings, said + (f"; auto, so Shardbook's defaults: {', '.join(left)}" if left else "")


def scheduler_of(value: Any) -> tuple[Settings, str]:
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if value.get("type") not in shapes:
        raise Refused(f"{value.get('type')} has no counterpart; what can be translated: {', '.join(shapes)}")
    settings: Settings = {"optim.lr_scheduler_type": shapes[value["type"]]}
    said = []
    for name, given in value.get("params", {}).items():
        if given == "auto":
            said.append(f"{name} is auto, so Shardbook's default")
        elif name == "warmup_num_steps":
            settings["optim.warmup_steps"] = int(given)
        elif name == "total_num_steps":
            settings["train.steps"] = int(given)
        elif name == "warmup_max_lr":
            settings["optim.learning_rate"] = float(given)
        elif name in ("warmup_min_lr", "warmup_min_ratio", "cos_min_ratio"):
            if given:
                said.append(f"{name} = {given} becomes 0")
        elif name == "warmup_type":
            said += [] if given == "linear" else [f"warm-up is linear in place of {given}"]
        elif (name, given) != ("last_batch_iteration", -1):
            raise Refused(f"params.{name} = {given!r} has no counterpart")
    if "warmup_type" not in value.get("params", {}) and value["type"] != "WarmupCosineLR":
        said.append("warm-up is linear in place of log, DeepSpeed's default")
    return settings, "; ".join(said)


def secondary_of(value: Any) -> tuple[Settings, str]:
    if not isinstance(value, int) or value < 1:
        raise Refused("must be a whole number of ranks, at least 1")
    return ({STAGE: "zeropp", "parallel.secondary_shard": value}, "hpZ") if value > 1 else ({}, "off")


def tracker_of(value: Any) -> tuple[Settings, str]:
    if not value.get("enabled", False):
        return {}, "off"
    project = {"run.project": value["project"]} if value.get("project") else {}
    left = [name for name in ("team", "group") if value.get(name)]
    return {"run.report_to": "wandb"} | project, f"set {', '.join(left)} as wandb's own variables" if left else ""


def compiler_of(value: Any) -> tuple[Settings, str]:
    backend = str(value.get("dynamo_backend", "no")).lower()
    if backend == "no":
        return {}, "off"
    if backend != "inductor":
        raise Refused(f"dynamo_backend {backend} has no counterpart; train.compile is torch.compile with inductor")
    return {"train.compile": True}, "each block is compiled in place, in torch.compile's default mode"


ACCUMULATION, CLIPPING = to("train.gradient_accumulation_steps", convert=int), to("optim.max_grad_norm", convert=float)
SAVES_16_BIT = pick(
    {True: {"train.export_dtype": "bf16"}, False: {}}, "true or false", "the export is always of whole tensors"
)
DEEPSPEED: dict[str, Rule] = remarks("deepspeed") | {
    "train_micro_batch_size_per_gpu": to("train.per_device_train_batch_size", convert=int),
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": CLIPPING,
    "steps_per_print": to("train.logging_steps", convert=int),
    "optimizer": optimizer_of,
    "scheduler": scheduler_of,
    "fp16": half_of,
    "bf16": brain_of,
    "communication_data_type": pick(
        {
            "fp32": {"precision.reduce": "fp32"},
            "bf16": {"precision.reduce": "bf16"},
            "bfp16": {"precision.reduce": "bf16"},
        },
        "gradients are reduced in fp32 or bf16",
    ),
    "data_types.grad_accum_dtype": pick({"fp32": {}}, "gradients add up in fp32, like the masters"),
    "zero_optimization.stage": pick(ZERO_STAGES, "a stage of ZeRO is a whole number from 0 to 3"),
    "zero_optimization.zero_hpz_partition_size": secondary_of,
    "zero_optimization.zero_quantized_weights": pick(
        {True: {STAGE: "zeropp", "parallel.quantize_weights": 8}, False: {}}, "true or false", "qwZ"
    ),
    "zero_optimization.zero_quantized_gradients": pick(
        {True: {STAGE: "zeropp", "parallel.quantize_gradients": [8, 4]}, False: {}},
        "true or false",
        "qgZ, 8 bits inside a node and 4 across",
    ),
    "zero_optimization.mics_shard_size": lambda value: (
        ({STAGE: "hsdp", "parallel.dp_shard_size": int(value)}, "MiCS is hybrid shard") if value > 0 else ({}, "off")
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": SAVES_16_BIT,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": SAVES_16_BIT,
    "wandb": tracker_of,
}
FSDP: dict[str, Rule] = remarks("fsdp") | {
    "fsdp_sharding_strategy": pick(STRATEGIES, "HYBRID_SHARD_ZERO2 and others have no counterpart"),
    "fsdp_reshard_after_forward": pick(RESHARDS, "others have no counterpart"),
    "fsdp_auto_wrap_policy": pick(WRAPS, "parallel.wrap is block, none or size:<n>", "by block, unless said otherwise"),
    "fsdp_min_num_params": lambda value: ({"parallel.wrap": f"size:{int(value)}"} if int(value) else {}, ""),
    "fsdp_backward_prefetch": pick(
        {
            "backward_pre": {"parallel.backward_prefetch": 1},
            "backward_post": {"parallel.backward_prefetch": 0},
            "no_prefetch": {"parallel.backward_prefetch": 0},
        },
        "others have no counterpart",
        "units gathered ahead of the running one",
    ),
    "fsdp_forward_prefetch": pick({True: {"parallel.forward_prefetch": 1}, False: {}}, "true or false"),
    "fsdp_activation_checkpointing": pick({True: {"activation.checkpointing": "full"}, False: {}}, "true or false"),
}
FSDP["fsdp_backward_prefetch_policy"] = FSDP["fsdp_backward_prefetch"]
OWN_STAGE = pick(
    {"fsdp": {}, "deepspeed": {}, "multi_gpu": {STAGE: "ddp"}, "multi_cpu": {STAGE: "ddp"}, "no": {STAGE: "ddp"}},
    "runs on other devices or through Megatron have no counterpart",
    "for accelerate launch keep it MULTI_GPU: Shardbook shards the model itself",
)
ACCELERATE: dict[str, Rule] = remarks("accelerate") | {
    "distributed_type": OWN_STAGE,
    "mixed_precision": precision_of,
    "dynamo_config": compiler_of,
    **{f"fsdp_config.{name}": rule for name, rule in FSDP.items()},
    "deepspeed_config.zero_stage": pick(ZERO_STAGES, "a stage of ZeRO is a whole number from 0 to 3"),
    "deepspeed_config.gradient_accumulation_steps": ACCUMULATION,
    "deepspeed_config.gradient_clipping": CLIPPING,
    "deepspeed_config.zero3_save_16bit_model": SAVES_16_BIT,
    **{
        f"parallelism_config.parallelism_config_{axis}_size": to(f"parallel.{axis}_size", convert=int)
        for axis in ("dp_replicate", "dp_shard")
    },
}
