"""accelerate's YAML, as `accelerate config` writes it: the meaning of its keys, and of FSDP's wherever they stand.

Sources: accelerate's guides of FSDP, DeepSpeed and Megatron-LM, and the fields of its plugins in 1.15; earlier
spellings are those of its earlier files.
"""

from dataclasses import replace
from math import prod
from typing import Any

from shardbook.recipe import RecipeError
from shardbook.translate.deepspeed import DEEPSPEED, EXPORTED, PINNED, TIERS, path_of, stage_of
from shardbook.translate.reading import read_keys
from shardbook.translate.rules import (
    ACCUMULATION,
    AXES,
    CP_SIZE,
    EP_SIZE,
    NO_FILE,
    PP_SIZE,
    STAGE,
    TP_SIZE,
    Entry,
    File,
    Program,
    Result,
    Rule,
    axis,
    choice,
    ignored,
    number,
    off,
    only,
    read_section,
    switch,
    whole,
    whole_number,
    words,
)

STRATEGIES = {"full_shard": "zero3", "shard_grad_op": "zero2", "no_shard": "ddp", "hybrid_shard": "hsdp"}
RESHARDING = {"true": "zero3", "false": "zero2"} | {"1": "zero3", "2": "zero2", "3": "ddp", "4": "hsdp"}
STRATEGY = choice(STAGE, STRATEGIES | RESHARDING, "HYBRID_SHARD_ZERO2 and others have no counterpart")
DTYPES = {"no": "fp32", "none": "fp32", "false": "fp32", "bf16": "bf16"}
HALF = "fp16 with loss scaling and fp8 have no counterpart; use bf16 (precision.params is fp32 or bf16)"
AHEAD = "units gathered ahead of the running one"
BLOCKS = "becomes blocks: a model's blocks are gathered one at a time"


def wrap_of(value: Any) -> Result:
    choice("", dict.fromkeys(("transformer_based_wrap", "size_based_wrap", "no_wrap")))(value)
    return {}, BLOCKS * (str(value).lower() in ("size_based_wrap", "no_wrap"))


def least_of(value: Any) -> Result:
    return {}, BLOCKS if whole_number(value or 0) else ""


def policy_of(value: Any) -> Result:
    return choice("", {"bf16": None, "fp32": None, "none": None}, "has no counterpart; precision.params")(value)


def distributed_of(value: Any) -> Result:
    kinds = {"fsdp": None, "deepspeed": None, "megatron_lm": None, "multi_gpu": "ddp", "multi_cpu": "ddp"}
    kinds |= {"no": "ddp", "false": "ddp"}
    settings, _ = choice(STAGE, kinds, "runs on other devices have no counterpart")(value)
    return (
        settings,
        "for accelerate launch keep it MULTI_GPU: Shardbook shards the model itself" if not settings else "",
    )


# the keys of FSDP, without `fsdp_`: accelerate's begin with it, transformers' and axolotl's may
FSDP: dict[str, Rule] = {
    **dict.fromkeys(
        words("""version transformer_layer_cls_to_wrap cpu_ram_efficient_loading sync_module_states use_orig_params
        state_dict_type final_state_dict_type cpu_offload_pin_memory limit_all_gathers xla xla_fsdp_v2
        xla_fsdp_grad_ckpt transformer_cls_names_to_wrap"""),
        ignored,
    ),
    "sharding_strategy": STRATEGY,
    "reshard_after_forward": STRATEGY,
    "auto_wrap_policy": wrap_of,
    "min_num_params": least_of,
    **dict.fromkeys(
        ("backward_prefetch", "backward_prefetch_policy"),
        choice("parallel.backward_prefetch", {"backward_pre": 1, "backward_post": 0, "no_prefetch": 0}, remark=AHEAD),
    ),
    "forward_prefetch": switch("parallel.forward_prefetch", 1, None, AHEAD),
    "activation_checkpointing": switch("activation.checkpointing", "full"),
    "activation_checkpointing_offload": switch(
        "offload.activations", "cpu", None, "inputs of blocks", activation__checkpointing="full"
    ),
    "offload_params": switch("offload.params", "cpu", None, "", offload__optimizer="cpu"),
    "mixed_precision_policy": policy_of,
    "ignored_modules": off(),
}
MEGATRON: dict[str, Rule] = {
    "tp_degree": axis(TP_SIZE),
    "pp_degree": axis(PP_SIZE),
    "context_parallel_size": axis(CP_SIZE),
    "num_micro_batches": whole(ACCUMULATION),
    "gradient_clipping": number("optim.max_grad_norm"),
    "use_distributed_optimizer": choice(STAGE, {"true": "zero1", "false": "ddp"}),
    "recompute_activations": switch(
        "activation.checkpointing", "selective", None, "what is neither a matmul nor attention is recomputed"
    ),
    "recompute_granularity": choice("activation.checkpointing", {"selective": "selective", "full": "full"}),
    "optimizer_cpu_offload": switch("offload.optimizer", "cpu"),
    **dict.fromkeys(
        words("""sequence_parallelism recompute_method recompute_num_layers attention_backend no_load_optim
        no_save_optim overlap_cpu_optimizer_d2h_h2d use_rotary_position_embeddings calculate_per_token_loss
        attention_softmax_in_fp32"""),
        ignored,
    ),
    **dict.fromkeys(
        words("""use_custom_fsdp use_precision_aware_optimizer eod_mask_loss attention_dropout hidden_dropout
        decoder_last_pipeline_num_layers"""),
        off(),
    ),
    "expert_model_parallel_size": axis(EP_SIZE),
    "expert_tensor_parallel_size": choice("", {"1": None}),
}
PARALLEL: dict[str, Rule] = {
    "dp_replicate_size": whole("parallel.dp_replicate_size"),
    "dp_shard_size": whole("parallel.dp_shard_size"),
    "tp_size": axis(TP_SIZE),
    "cp_size": axis(CP_SIZE),
    "sp_size": axis(CP_SIZE),
    # sp_ is what accelerate calls the sequence parallel of DeepSpeed, which earlier files call cp_
    **{
        f"{axis}_{name}": ignored
        for axis in ("cp", "sp")
        for name in words("backend comm_strategy seq_length seq_length_is_variable attn_implementation")
    },
    "tp_enable_async_tp": ignored,
    # of no release so far; a number of ranks beside dp_shard_size there, a part of them here
    "ep_size": only(1, why="accelerate has no such axis; set parallel.ep_size, a part of the ranks that shard"),
}
IN_DEEPSPEED: dict[str, Rule] = {
    "gradient_accumulation_steps": whole(ACCUMULATION),
    "gradient_clipping": number("optim.max_grad_norm"),
    "zero_stage": stage_of,
    "zero3_save_16bit_model": EXPORTED,
    "offload_optimizer_device": choice("offload.optimizer", TIERS, "device must be none, cpu or nvme", PINNED),
    "offload_param_device": choice("offload.params", TIERS, "device must be none, cpu or nvme", PINNED),
    "offload_optimizer_nvme_path": path_of,
    "offload_param_nvme_path": path_of,
    **dict.fromkeys(
        words("""zero3_init_flag deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter
        deepspeed_exclusion_filter deepspeed_moe_layer_cls_names seq_parallel_communication_data_type"""),
        ignored,
    ),
}
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        words("""compute_environment debug enable_cpu_affinity gpu_ids machine_rank main_process_ip main_process_port
        main_training_function num_machines num_processes rdzv_backend rdzv_conf same_network use_cpu tpu_env
        tpu_use_cluster tpu_use_sudo ipex_config mpirun_config commands command_file tpu_name tpu_zone tpu_vm
        num_cpu_threads_per_process use_parallelism_config module no_python cpu quiet tee role log_dir tpu
        downcast_bf16 max_restarts monitor_interval deepspeed_hostfile deepspeed_multinode_launcher
        dynamo_config.dynamo_mode dynamo_config.dynamo_use_dynamic dynamo_config.dynamo_use_fullgraph
        dynamo_config.dynamo_use_regional_compilation"""),
        ignored,
    ),
    "distributed_type": distributed_of,
    "mixed_precision": choice("precision.params", DTYPES, HALF),
    "fp16": off(HALF),  # an earlier spelling
    "fp8_config": off("fp8 has no counterpart; precision.params is fp32 or bf16"),
    **dict.fromkeys(
        ("dynamo_backend", "dynamo_config.dynamo_backend"),
        choice(
            "train.compile",
            {"inductor": True, "no": None, "false": None},
            "has no counterpart: train.compile is torch.compile with inductor",
            "each block is compiled in place, in torch.compile's default mode",
        ),
    ),
    **{f"deepspeed_config.{name}": rule for name, rule in IN_DEEPSPEED.items()},
    **{f"fsdp_config.fsdp_{name}": rule for name, rule in FSDP.items()},
    **{f"megatron_lm_config.megatron_lm_{name}": rule for name, rule in MEGATRON.items()},
    **{
        f"parallelism_config.{prefix}{name}": rule
        for prefix in ("parallelism_config_", "")
        for name, rule in PARALLEL.items()
    },
}


def read(file: File, launches: bool = False) -> list[Entry]:
    """Returns the entries of an accelerate YAML, and of a DeepSpeed JSON that it names. `launches`: it is of a command,
    whose arguments say the dtype where it does not."""
    entries = read_section(file.keys, RULES | {"deepspeed_config.deepspeed_config_file": ignored})
    if named := file.section("deepspeed_config").get("deepspeed_config_file"):
        inside = named_file(file, named, "deepspeed_config.deepspeed_config_file")
        entries = [entry for entry in entries if entry.key != "deepspeed_config.deepspeed_config_file"]
        entries += [inside] if isinstance(inside, Entry) else DEEPSPEED.read(inside)
    program = str(file.keys.get("distributed_type")).upper()
    if program == "DEEPSPEED":  # then accelerate ignores its data-parallel sizes
        for at, entry in enumerate(entries):
            if entry.key.startswith(("parallelism_config.parallelism_config_dp_", "parallelism_config.dp_")):
                entries[at] = replace(entry, settings={}, remark="nothing to set: ZeRO shards over all ranks")
    elif program == "MEGATRON_LM" and not any(entry.key.endswith("use_distributed_optimizer") for entry in entries):
        entries.append(Entry("(use_distributed_optimizer)", None, {STAGE: "ddp"}, "absent is false in accelerate"))
    if program == "DEEPSPEED" and not named and file.section("deepspeed_config").get("zero_stage") is None:
        entries.append(Entry("(zero_stage)", None, {STAGE: "zero2"}, "absent is 2 in accelerate"))
    if program == "FSDP" and not any(STAGE in entry.settings or entry.refused for entry in entries):
        entries.append(Entry("(fsdp_sharding_strategy)", None, {STAGE: "zero3"}, "absent is FULL_SHARD in accelerate"))
    if file.keys.get("mixed_precision") is None and not named and not launches:
        entries.append(Entry("(mixed_precision)", None, {"precision.params": "fp32"}, "absent is no in accelerate"))
    is_hybrid = any(entry.settings.get(STAGE) == "hsdp" for entry in entries)
    if is_hybrid and not any("parallel.dp_shard_size" in entry.settings for entry in entries):
        entries.append(shards_of(file, entries))
    return entries


def launcher_keys(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `accelerate launch` as the keys of its file."""
    keys: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in ("use_fsdp", "use_deepspeed", "use_megatron_lm", "multi_gpu"):
            keys["distributed_type"] = name.removeprefix("use_").upper()
            continue
        sections = {"fsdp_": "fsdp_config", "megatron_lm_": "megatron_lm_config", "dynamo_": "dynamo_config"}
        sections |= {"parallelism_config_": "parallelism_config"}
        section = next((section for start, section in sections.items() if name.startswith(start)), "")
        section = section or "deepspeed_config" * (name in IN_DEEPSPEED or name == "deepspeed_config_file")
        keys[section or name] = keys.get(section, {}) | {name: value} if section else value
    return keys


def named_file(file: File, named: Any, key: str) -> File | Entry:
    """Returns a DeepSpeed JSON that `file` names, or a refused entry where it cannot be read. Raises RecipeError where
    the name is none."""
    if not isinstance(named, str):
        raise RecipeError(f"{file.path}: {key} = {named!r}: must be a path")
    if (path := file.find(named)) is None:
        return Entry(key, named, {}, NO_FILE, refused=True)
    return File(path, read_keys(path))


UNEVEN = "num_processes / num_machines"


def shards_of(file: File, entries: list[Entry]) -> Entry:
    """Returns the entry of the ranks that share a copy under hybrid shard: those inside a machine."""
    ranks, machines = file.keys.get("num_processes"), file.keys.get("num_machines", 1)
    sizes = {axis: entry.settings[axis] for entry in entries for axis in AXES[:2] if axis in entry.settings}
    inside = prod(sizes.values())
    if all(type(count) is int and count > 0 for count in (ranks, machines)) and ranks % (machines * inside) == 0:
        shards = {"parallel.dp_shard_size": ranks // (machines * inside)}
        return Entry("num_processes", ranks, shards, "hsdp shards inside a machine")
    why = "hsdp needs a whole number of shards on each machine: set parallel.dp_shard_size"
    return Entry(UNEVEN, f"{ranks} / {machines}", {}, why, refused=True)


def sharded_by(value: Any) -> Result:
    """Returns the settings of transformers' `fsdp`: words like "full_shard auto_wrap offload", or a list of them."""
    if value is True:
        return {STAGE: "zero3"}, ""
    if value in (None, False, "", []):
        return {}, ""
    settings: dict[str, Any] = {}
    for word in value.replace(",", " ").split() if isinstance(value, str) else value:
        if word == "offload":
            settings |= {"offload.params": "cpu", "offload.optimizer": "cpu"}
        elif word != "auto_wrap":
            settings |= STRATEGY(word)[0]
    return settings, ""


def fsdp_rules(section: str) -> dict[str, Rule]:
    """Returns the rules of a section of FSDP's keys in another program, with or without `fsdp_` before each."""
    return {f"{section}.{prefix}{name}": rule for prefix in ("fsdp_", "") for name, rule in FSDP.items()}


ACCELERATE = Program("accelerate's YAML", frozenset(key.partition(".")[0] for key in RULES), read)
