"""DeepSpeed's JSON: the meaning of its keys.

Sources: DeepSpeed's configuration page (deepspeed.ai/docs/config-json) and the fields of its configuration in 0.19,
each by its name and by its alias. "auto" is filled in by transformers' Trainer, with the defaults of TrainingArguments.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from shardbook.translate.autoep import RULES as AUTOEP
from shardbook.translate.autoep import rules_of
from shardbook.translate.rules import (
    ACCUMULATION,
    BATCH,
    CP_SIZE,
    PP_SIZE,
    STAGE,
    TP_SIZE,
    Entry,
    File,
    Program,
    Refused,
    Result,
    Rule,
    Settings,
    axis,
    choice,
    ignored,
    is_on,
    listed_rules,
    noted,
    off,
    read_section,
    real_number,
    switch,
    whole,
    whole_number,
    words,
)

AUTO = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "lr": 5e-5,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "warmup_max_lr": 5e-5,
    "warmup_num_steps": 0,
    "warmup_min_lr": 0.0,
}
STAGES = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}
TIERS = {"none": None, "cpu": "cpu", "nvme": "nvme"}
PINNED = "memory is pinned, and transfers overlap, always"
FP16 = "fp16 with loss scaling has no counterpart; use bf16 (precision.params=bf16)"


def stage_of(value: Any) -> Result:
    if isinstance(value, bool):
        raise Refused("a stage of ZeRO is a whole number from 0 to 3")
    return choice(STAGE, STAGES, "a stage of ZeRO is a whole number from 0 to 3")(value)


def half_of(value: Any) -> Result:
    if masters := [name for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states") if value.get(name)]:
        raise Refused(f"{masters[0]}: masters are fp32; set precision.master=bf16 and optim.name=adamw_bf16")
    if value.get("enabled") == "auto":
        return {}, "auto: Shardbook's default stays, bf16 on a GPU"
    return ({"precision.params": "bf16"}, "masters stay fp32") if is_enabled(value) else ({}, "")


def fp16_of(value: Any) -> Result:
    if value.get("enabled") != "auto" and is_enabled(value):
        raise Refused(FP16)
    return half_of(value)


def half_inside(value: Any) -> Result:
    """Returns what bf16 says inside another program's file, whose word is meant by "auto"."""
    return ({}, "") if value.get("enabled") == "auto" else half_of(value)


def fp16_inside(value: Any) -> Result:
    return ({}, "") if value.get("enabled") == "auto" else fp16_of(value)


def is_enabled(section: Any) -> bool:
    if (enabled := section.get("enabled", False)) not in (True, False):
        raise Refused(f"enabled = {enabled!r}: must be true or false")
    return bool(enabled)


def printed_of(value: Any) -> Result:
    steps = whole_number(value)
    rare = f"Shardbook logs the loss as rarely, once in {steps} steps: set train.logging_steps=10 to see more of it"
    return {"train.logging_steps": steps}, rare if steps > 10 else ""


def device_of(what: str) -> Rule:
    """Returns the rule of a section that says where `what` (optimizer, params) is kept."""
    known = set(words("device nvme_path pin_memory buffer_count buffer_size max_in_cpu fast_init pipeline_read"))
    known |= {"pipeline_write", "ratio", "cpuadam_cores_perc"}

    def rule(value: Any) -> Result:
        section = value if value is not None else {}
        key = f"offload.{what}"
        settings, _ = choice(key, TIERS, "device must be none, cpu or nvme")(section.get("device") or "none")
        if not settings:
            return {}, ""
        if section.get("ratio", 1) != 1:
            raise Refused(f"ratio {section['ratio']}: all of it or nothing")
        if other := [name for name, on in section.items() if name not in known and on]:
            raise Refused(f"{', '.join(other)}: has no counterpart")
        path = path_of(section.get("nvme_path"))[0] if settings[key] == "nvme" else {}
        return settings | path, PINNED

    return rule


def path_of(value: Any) -> Result:
    return ({"offload.path": value}, "") if value and value != "none" else ({}, "")


def optimizer_of(auto: Settings, value: Any) -> Result:
    if str(value.get("type", "")).lower() not in ("adam", "adamw", "fusedadam"):
        raise Refused(f"{value.get('type')} has no counterpart; optim.name is adamw")
    settings: Settings = {"optim.name": "adamw"}
    names = {"lr": "learning_rate", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
    absent: Settings = {"lr": 1e-3}
    if not auto:  # inside another program's file, whose own values would stay
        absent |= {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    if is_on(value.get("params", {}).get("torch_adam")):
        absent["weight_decay"] = 0.01
    same, remarks = {"adam_w_mode": True, "bias_correction": True}, ["matrices decay, vectors (norms, biases) do not"]
    for name, given in _params(value, auto, remarks, absent).items():
        if name in names:
            read = (lambda betas: [real_number(beta) for beta in betas]) if name == "betas" else real_number
            settings[f"optim.{names[name]}"] = read(given)
        elif name not in ("torch_adam", "fused") and same.get(name) is not given:
            raise Refused(f"params.{name} = {given!r} has no counterpart")
    return settings, "; ".join(remarks)


def scheduler_of(auto: Settings, value: Any) -> Result:
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if value.get("type") not in shapes:
        raise Refused(f"{value.get('type')} has no counterpart; what can be translated: {', '.join(shapes)}")
    settings: Settings = {"optim.lr_scheduler_type": shapes[value["type"]]}
    remarks: list[str] = []
    absent = {"warmup_num_steps": 1000} | ({"warmup_max_lr": 1e-3} if value["type"] != "WarmupCosineLR" else {})
    params = _params(value, auto, remarks, absent)
    for name, given in params.items():
        if name == "warmup_num_steps":
            settings["optim.warmup_steps"] = whole_number(given)
        elif name == "total_num_steps":
            settings["train.steps"] = whole_number(given)
        elif name == "warmup_max_lr":
            settings["optim.learning_rate"] = real_number(given)
        elif name in ("warmup_min_lr", "warmup_min_ratio", "cos_min_ratio"):
            if given:
                remarks.append(f"{name} = {given} becomes 0")
        elif name == "warmup_type":
            remarks += [] if given == "linear" else [f"warm-up is linear in place of {given}"]
        elif (name, given) != ("last_batch_iteration", -1):
            raise Refused(f"params.{name} = {given!r} has no counterpart")
    if "warmup_type" not in params and value["type"] != "WarmupCosineLR":
        remarks.append("warm-up is linear in place of log, DeepSpeed's default")
    return settings, "; ".join(remarks)


def _params(section: Any, auto: Settings, remarks: list[str], absent: Settings) -> Settings:
    """Returns the `params` of an optimizer or scheduler; in the place of "auto" its value, and what DeepSpeed takes for
    those that are `absent`, both of which `remarks` then tell. Without `auto` another file has those values."""
    given = section.get("params", {})
    remarks += [f"{name} is absent: {value} in DeepSpeed" for name, value in absent.items() if name not in given]
    params = absent | given
    for name in [name for name, value in params.items() if value == "auto"]:
        if name in auto:
            params[name] = auto[name]
            remarks.append(f"{name} is auto: {auto[name]} in transformers")
        else:
            del params[name]
            remarks += [f"{name} is auto, so Shardbook's default"] if auto else []
    return params


def secondary_of(value: Any) -> Result:
    if not isinstance(value, int) or value < 1:
        raise Refused("must be a whole number of ranks, at least 1")
    return ({STAGE: "zeropp", "parallel.secondary_shard": value}, "hpZ") if value > 1 else ({}, "")


def replicas_of(value: Any) -> Result:
    shards: Settings = {STAGE: "hsdp", "parallel.dp_shard_size": whole_number(value)}
    return (shards, "MiCS is hybrid shard") if value > 0 else ({}, "")


def stages_of(value: Any) -> Result:
    if value == "auto":
        return {}, "no pipeline: set parallel.pp_size to the num_stages of the script's PipelineModule"
    return axis(PP_SIZE)(value)


def runs_of(value: Any) -> Result:
    """Returns the checkpointing for DeepSpeed's interval, which keeps the first input of each run of layers."""
    if (layers := whole_number(value)) < 0:
        raise Refused("must be a whole number of layers")
    remark = f"the input of each block is kept, not of each run of {layers}" if layers > 1 else ""
    return ({"activation.checkpointing": "full"}, remark) if layers else ({}, "")


def compile_of(value: Any) -> Result:
    if value.get("disable") or value.get("enabled") is False or not value:
        return {}, ""
    if value.get("deepcompile") or value.get("backend", "inductor") != "inductor":
        raise Refused("has no counterpart: train.compile is torch.compile with inductor")
    return {"train.compile": True}, "each block is compiled in place, in torch.compile's default mode"


def tracker_of(value: Any) -> Result:
    if not is_enabled(value):
        return {}, ""
    project = {"run.project": value["project"]} if value.get("project") else {}
    left = [name for name in ("team", "group") if value.get(name)]
    return {"run.report_to": "wandb"} | project, f"set {', '.join(left)} as wandb's own variables" if left else ""


def _zero(rules: dict[str, Rule]) -> dict[str, Rule]:
    return {f"zero_optimization.{name}": rule for name, rule in rules.items()}


# fields of zero_optimization that have an alias: both names are read, as DeepSpeed does
ALIASED = words("""prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
max_reuse_distance module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential""")
ZERO_IGNORED = [
    *ALIASED,
    *(f"stage3_{name}" for name in ALIASED),
    *words("""contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
    allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint sub_group_size
    cpu_offload_use_pin_memory ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment
    memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
    enable_sanity_checks save_muon_momentum_buffer_in_memory compute_grad_norm mics_hierarchical_params_gather
    leaf_module loading_optimizer_states"""),
]
EXPORTED = switch("train.export_dtype", "bf16", remark="the export is always of whole tensors")
ON_CPU = switch("offload.params", "cpu")

RULES: dict[str, Rule] = {
    **listed_rules("deepspeed"),
    **AUTOEP,
    **_zero(dict.fromkeys(ZERO_IGNORED, ignored)),
    "tensorboard": off("set run.report_to=tensorboard"),
    "train_micro_batch_size_per_gpu": whole(BATCH),
    "gradient_accumulation_steps": whole(ACCUMULATION),
    "gradient_clipping": lambda value: ({"optim.max_grad_norm": real_number(value or 0.0)}, ""),
    "optimizer": partial(optimizer_of, AUTO),
    "scheduler": partial(scheduler_of, AUTO),
    "bf16": half_of,
    "bfloat16": half_of,
    "fp16": fp16_of,
    "steps_per_print": printed_of,
    "wandb": tracker_of,
    "compile": compile_of,
    "communication_data_type": choice(
        "precision.reduce",
        {"fp32": "fp32", "bf16": "bf16", "bfp16": "bf16"},
        "gradients are reduced in fp32 or bf16",
    ),
    "data_types.grad_accum_dtype": choice("", {"fp32": None}, "gradients add up in fp32, like the masters"),
    **_zero(
        {
            "stage": stage_of,
            "offload_optimizer": device_of("optimizer"),
            "offload_param": device_of("params"),
            "cpu_offload": switch("offload.optimizer", "cpu"),
            "cpu_offload_params": ON_CPU,
            "cpu_offload_param": ON_CPU,
            "gather_16bit_weights_on_model_save": EXPORTED,
            "stage3_gather_16bit_weights_on_model_save": EXPORTED,
            "stage3_gather_fp16_weights_on_model_save": EXPORTED,
            "zero_quantized_weights": switch("parallel.quantize_weights", 8, None, "qwZ", parallel__stage="zeropp"),
            "zero_quantized_gradients": switch(
                "parallel.quantize_gradients",
                [8, 4],
                None,
                "qgZ, 8 bits inside a node and 4 across",
                parallel__stage="zeropp",
            ),
            "zero_hpz_partition_size": secondary_of,
            "mics_shard_size": replicas_of,
        }
    ),
    "activation_checkpointing.cpu_checkpointing": switch(
        "offload.activations", "cpu", None, "inputs of blocks", activation__checkpointing="full"
    ),
    "tensor_parallel.autotp_size": axis(TP_SIZE),
    "tensor_parallel.tp.tp_size": choice(
        "", {"0": None, "1": None}, "training takes it from tensor_parallel.autotp_size; write it there"
    ),
    "sequence_parallel_size": axis(CP_SIZE),
    "use_data_before_expert_parallelism": noted("ranks that share experts are neighbours"),
    "pipeline.stages": stages_of,
    "pipeline.activation_checkpoint_interval": runs_of,
    "pipeline.partition": choice(
        "",
        {"best": None, "uniform": None, "parameters": None},
        "a split of one's own has no counterpart: blocks are dealt out evenly, the last stage has none more",
    ),
}
RULES_INSIDE = RULES | {
    "optimizer": partial(optimizer_of, {}),
    "scheduler": partial(scheduler_of, {}),
    "bf16": half_inside,
    "bfloat16": half_inside,
    "fp16": fp16_inside,
    "steps_per_print": ignored,  # of its own lines
}
SWITCHES = {"parallel.quantize_weights", "parallel.quantize_gradients", "parallel.secondary_shard"}


def read(file: File, inside: str = "") -> list[Entry]:
    """Returns the entries of a DeepSpeed JSON, with those of absent keys whose default differs from Shardbook's.

    `inside`: the program whose file names this one, and whose values stand in the place of "auto".
    """
    rules = (RULES_INSIDE if inside else RULES) | rules_of(file)
    entries = read_section(file.keys, rules, auto={} if inside else AUTO)
    if "gradient_clipping" not in file.keys:
        entries.append(Entry("(gradient_clipping)", None, {"optim.max_grad_norm": 0.0}, "absent is off in DeepSpeed"))
    if "stage" not in file.section("zero_optimization") and not inside:
        entries.append(Entry("(zero_optimization.stage)", None, {STAGE: "ddp"}, "absent is stage 0 in DeepSpeed"))
    if not any(file.section(name).get("enabled") for name in ("bf16", "bfloat16", "fp16")) and not inside:
        entries.append(Entry("(bf16)", None, {"precision.params": "fp32"}, "absent or off is fp32 in DeepSpeed"))
    entries.sort(key=lambda entry: entry.key == "scheduler")  # its rate is the one that DeepSpeed's steps have
    if str(number := file.section("zero_optimization").get("stage", 3)) != "3":
        why = f"goes with stage 3, not {number}; set zero_optimization.stage to 3, or leave it out"
        entries = [
            replace(entry, settings={}, remark=why, refused=True) if SWITCHES & entry.settings.keys() else entry
            for entry in entries
        ]
    return entries


DEEPSPEED = Program("DeepSpeed's JSON", frozenset(key.partition(".")[0] for key in RULES), read)
