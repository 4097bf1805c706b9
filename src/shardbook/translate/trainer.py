"""transformers' TrainingArguments, which TRL, LLaMA-Factory and axolotl share: the meaning of their fields.

Source: transformers' documentation of TrainingArguments, of 4.4x and 5.x.
"""

import json
import re
from typing import Any

from shardbook.translate.deepspeed import FP16
from shardbook.translate.rules import (
    ACCUMULATION,
    BATCH,
    OFF,
    ON,
    File,
    Refused,
    Result,
    Rule,
    choice,
    ignored,
    is_on,
    listed_rules,
    noted,
    number,
    off,
    only,
    real_number,
    switch,
    text,
    whole,
    whole_number,
    words,
)
from shardbook.translate.sources import listed

ADAMW = words("""adamw adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_torch_npu_fused paged_adamw
paged_adamw_32bit adamw_anyprecision""")
ADAMW_8BIT = words("adamw_8bit adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit ao_adamw_8bit")
OPTIMIZERS = {
    **dict.fromkeys(ADAMW, "adamw"),
    **dict.fromkeys(ADAMW_8BIT, "adamw_8bit"),
    **dict.fromkeys(words("lion lion_32bit paged_lion_32bit"), "lion"),
    "muon": "muon",
}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
REMOTE = "a model's code from elsewhere is not run: it must be one of transformers"
EACH_EPOCH = "once an epoch has no counterpart: set train.{}_steps to the steps of an epoch"
LAYOUTS = words("deepspeed fsdp fsdp_config parallelism_config")  # read by read_layout


def beta_of(file: File) -> Rule:
    """Returns the rule of each of Adam's two betas, which a recipe has in one list."""

    def rule(value: Any) -> Result:
        given = (file.keys.get("adam_beta1"), file.keys.get("adam_beta2"))
        betas = [
            real_number(default if beta is None else beta) for beta, default in zip(given, (0.9, 0.999), strict=True)
        ]
        return ({"optim.betas": betas}, "") if value is not None else ({}, "")

    return rule


def steps_of(value: Any) -> Result:
    steps = whole_number(-1 if value is None else value)
    return ({"train.steps": steps}, "") if steps > 0 else ({}, "")


def epochs_of(file: File) -> Rule:
    """Returns the rule of the number of epochs, which max_steps replaces."""

    def rule(value: Any) -> Result:
        if value is None or steps_of(file.keys.get("max_steps"))[0]:
            return {}, ""
        epochs = real_number(value)
        return {"train.epochs": int(epochs) if epochs == int(epochs) else epochs}, ""

    return rule


def warmup_of(file: File) -> Rule:
    """Returns the rule of warmup_steps and warmup_ratio, of which the steps count where they are above 0."""

    def rule(value: Any) -> Result:
        if value is None or "constant" in (file.keys.get("lr_scheduler_type"), file.keys.get("lr_scheduler")):
            # which warms nothing up
            return {}, ""
        given = file.keys.get("warmup_steps"), file.keys.get("warmup_ratio")
        steps, ratio = (real_number(value if given == (None, None) else one or 0) for one in given)
        warmup = steps if steps > 0 else ratio
        if steps <= 0 and ratio >= 1:
            raise Refused("a share of the run is below 1")
        return {"optim.warmup_steps": int(warmup) if warmup == int(warmup) else warmup}, ""

    return rule


def interval_of(file: File, what: str, default: Any) -> Rule:
    """Returns the rule of `eval_steps` or `save_steps`, which count only where the strategy is by steps."""
    names = ("eval_strategy", "evaluation_strategy") if what == "eval" else ("save_strategy",)

    def rule(value: Any) -> Result:
        strategy = next((file.keys[name] for name in names if name in file.keys), default)
        if str(strategy).lower() != "steps" or value is None:
            return {}, ""
        if isinstance(value, float) and 0 < value < 1:
            return {}, f"a share of the run has no counterpart: set train.{what}_steps"
        return {f"train.{what}_steps": whole_number(value)}, ""

    return rule


def strategy_of(file: File, what: str) -> Rule:
    """Returns the rule of `eval_strategy` or `save_strategy`."""

    def rule(value: Any) -> Result:
        word = str(value).lower()
        if word in ("epoch", "best"):
            once = what == "save" and str(file.keys.get("num_train_epochs", file.keys.get("num_epochs"))) in (
                "1",
                "1.0",
            )
            return {}, "" if once else EACH_EPOCH.format(what)
        if word not in ("steps", *OFF):
            raise Refused("must be no, steps or epoch")
        if word == "steps" and what == "eval" and file.keys.get("eval_steps") is None:
            return {"train.eval_steps": whole_number(file.keys.get("logging_steps") or 500)}, ""
        return ({"train.save_steps": 0}, "") if what == "save" and word in OFF else ({}, "")

    return rule


def logging_of(value: Any) -> Result:
    if isinstance(value, float) and value < 1:
        return {}, "a share of the run has no counterpart: set train.logging_steps"
    return ({"train.logging_steps": whole_number(value)}, "") if value is not None else ({}, "")


def half_of(value: Any) -> Result:
    if str(value).lower() in ("full", "auto"):  # axolotl's
        return ({"precision.params": "bf16"}, "masters stay fp32") if str(value).lower() == "full" else ({}, "")
    return switch("precision.params", "bf16", "fp32", "masters stay fp32")(value)


def dtype_of(value: Any) -> Result:
    word = str(value).lower().removeprefix("torch.")
    if word in ("bfloat16", "bf16"):
        return {"precision.params": "bf16"}, "masters stay fp32"
    if word in ("float16", "fp16", "half"):
        raise Refused(FP16)
    return only("float32", "fp32", "auto", "None", why="must be a dtype")(word if value is not None else None)


def checkpointing_of(file: File) -> Rule:
    """Returns the rule of gradient_checkpointing, and of those of its arguments that say what is recomputed."""
    kwargs = file.section("activation_checkpointing_kwargs") | file.section("gradient_checkpointing_kwargs")

    def rule(value: Any) -> Result:
        word = str(value).lower()
        if word == "offload_disk":
            raise Refused("inputs of blocks go to the host's memory, not to a disk; offload.activations=cpu")
        is_offloaded = word in ("offload", "unsloth") or is_on(kwargs.get("offload"))
        layers = whole_number(kwargs.get("every_n_layers") or 1)
        recomputed = "full" if layers == 1 else f"every:{layers}"
        settings, _ = switch("activation.checkpointing", recomputed)(word in ("offload", "unsloth") or value)
        if settings and is_offloaded:
            return settings | {"offload.activations": "cpu"}, "inputs of blocks"
        return settings, ""

    return rule


def optimizer_of(value: Any) -> Result:
    word = str(getattr(value, "value", value)).lower().removeprefix("optimizernames.")
    settings, _ = choice("optim.name", OPTIMIZERS, "has no counterpart; optim.name is adamw, adamw_8bit, lion or muon")(
        word
    )
    return settings, {"adamw_8bit": "needs the extra 8bit"}.get(settings["optim.name"], "")


def report_to_of(value: Any) -> Result:
    trackers = value if isinstance(value, list) else [value]
    if value is None or "all" in trackers:
        return {}, "wandb, the default" if value else ""
    named = [str(tracker).lower() for tracker in trackers if is_on(tracker)]
    return {"run.report_to": named[0] if len(named) == 1 else named if named else "none"}, ""


def accelerator_of(value: Any) -> Result:
    """Returns nothing to set for accelerate's own words, but for those that make other batches."""
    if changed := [name for name in ("split_batches", "use_configured_state") if is_on((value or {}).get(name))]:
        raise Refused(f"{changed[0]} has no counterpart: train.per_device_train_batch_size is of one rank")
    return {}, ""


def chat_kwargs_of(value: Any) -> Result:
    if value and "null" in re.findall(r'"[^"]*"|\w+', json.dumps(value, default=str)):
        raise Refused("one of them has no value")
    return ({"data.chat_template_kwargs": value}, "") if value else ({}, "")


def output_of(value: Any) -> Result:
    """Returns the run's directory, and its name in it."""
    path = str(value).rstrip("/").removeprefix("./")
    folder, _, name = path.rpartition("/")
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise Refused("its last part cannot name a run (letters, digits, . _ -): set run.dir and run.name")
    return {
        "run.dir": folder or ("/" if path.startswith("/") else "."),
        "run.name": name,
    }, "the same name continues a run"


def resumed_of(value: Any) -> Result:
    if str(value).lower() in (*ON, *OFF):
        return {}, ""
    raise Refused("a checkpoint of another program is not read; the same command continues a run of Shardbook's")


def hub_of(file: File) -> Rule:
    def rule(value: Any) -> Result:
        if not is_on(value):
            return {}, ""
        if not file.keys.get("hub_model_id"):
            raise Refused("needs the name of a repository: set train.hub_model_id beside train.push_to_hub=true")
        return {"train.push_to_hub": True}, ""

    return rule


def targets_of(value: Any) -> Result:
    if value is None or value in ("all", "all-linear", ["all-linear"], ["all"]):
        return ({"lora.target_modules": "all-linear"}, "") if value is not None else ({}, "")
    names = listed(value)
    if any(not re.fullmatch(r"\w+", name.rpartition(".")[2]) for name in names):
        raise Refused("a pattern has no counterpart: name the matrices, as [q_proj, v_proj]")
    return {"lora.target_modules": [name.rpartition(".")[2] for name in names]}, ""


def stacks_of(has_modules: bool) -> Rule:
    """`has_modules`: modules are named beside; where none are, peft adapts the stacks alone."""

    def rule(value: Any) -> Result:
        if not (names := listed(value) if is_on(value) else []):
            return {}, ""
        if any(not re.fullmatch(r"[\w.]+", name) for name in names):
            raise Refused("a pattern has no counterpart: name the stacks, as [experts.gate_up_proj, experts.down_proj]")
        alone: dict[str, Any] = {} if has_modules else {"lora.target_modules": []}
        return {"lora.target_parameters": names} | alone, ""

    return rule


def saved_modules_of(value: Any) -> Result:
    return ({"lora.modules_to_save": listed(value)}, "") if is_on(value) else ({}, "")


def when(is_so: bool, rules: dict[str, Rule]) -> dict[str, Rule]:
    """Returns the rules, or those of keys that count for nothing where not `is_so`."""
    return rules if is_so else dict.fromkeys(rules, ignored)


def trainer_rules(file: File) -> dict[str, Rule]:
    """Returns the rules of TrainingArguments. Some read other keys of the file beside their own."""
    return {
        **listed_rules("trainer"),
        **dict.fromkeys(LAYOUTS, ignored),
        "model_name_or_path": text("model.path"),
        "model_revision": text("model.revision"),
        "tokenizer_name": text("model.tokenizer"),
        "tokenizer_name_or_path": text("model.tokenizer"),
        "trust_remote_code": noted(REMOTE),
        "torch_dtype": dtype_of,
        "dtype": dtype_of,
        "learning_rate": number("optim.learning_rate"),
        "weight_decay": number("optim.weight_decay"),
        "adam_beta1": beta_of(file),
        "adam_beta2": beta_of(file),
        "adam_epsilon": number("optim.eps"),
        "max_grad_norm": number("optim.max_grad_norm"),
        "optim": optimizer_of,
        "lr_scheduler_type": choice("optim.lr_scheduler_type", SCHEDULES),
        "warmup_steps": warmup_of(file),
        "warmup_ratio": warmup_of(file),
        "num_train_epochs": epochs_of(file),
        "max_steps": steps_of,
        "per_device_train_batch_size": whole(BATCH),
        "gradient_accumulation_steps": whole(ACCUMULATION),
        "logging_steps": logging_of,
        "logging_strategy": only("steps", "no", why="set train.logging_steps"),
        "eval_steps": interval_of(file, "eval", "no"),
        "eval_strategy": strategy_of(file, "eval"),
        "evaluation_strategy": strategy_of(file, "eval"),
        "save_steps": interval_of(file, "save", "steps"),
        "save_strategy": strategy_of(file, "save"),
        "save_total_limit": whole("train.save_total_limit"),
        "seed": whole("train.seed"),
        "data_seed": lambda value: only(None, file.keys.get("seed", 42), why="there is one seed, train.seed")(value),
        "bf16": half_of,
        "fp16": off(FP16),
        "gradient_checkpointing": checkpointing_of(file),
        "activation_checkpointing": checkpointing_of(file),  # what transformers 5 calls it
        "activation_checkpointing_kwargs": ignored,
        "torch_compile": switch("train.compile", True),
        "torch_compile_backend": only("inductor", why="train.compile is torch.compile with inductor"),
        "full_determinism": switch("train.deterministic", True),
        "train_sampling_strategy": only("random", why="rows come in random order"),
        "average_tokens_across_devices": only(True, why="a step's loss is divided by all of its tokens"),
        "accelerator_config": accelerator_of,
        "report_to": report_to_of,
        "run_name": noted("the run is named by run.name"),
        "output_dir": output_of,
        "resume_from_checkpoint": resumed_of,
        "push_to_hub": hub_of(file),
        "hub_model_id": text("train.hub_model_id") if file.is_on("push_to_hub") else ignored,
        "wandb_project": text("run.project"),
        "wandb_entity": noted("set WANDB_ENTITY, wandb's own variable"),
        "wandb_run_group": text("run.group"),
        "dataset_num_proc": whole("data.num_proc"),
        "preprocessing_num_workers": whole("data.num_proc"),
    }


# of transformers 5, where they differ from a recipe's
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "save_steps": 500,
    "bf16": False,
}
