"""The sections of a recipe: every key with its type, default, limits and one line of help.

Invariant: a section that loads has no unknown key, no wrong type and no contradiction inside itself.
"""

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator


class RecipeError(ValueError):
    """The recipe, the command line, an argument or something they name is wrong. One line; a command exits with 2."""


def nearest(word: str, known: list[str]) -> str:
    """Returns `; did you mean x?` for the known spelling nearest to `word`, or an empty string where none is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


CHECKPOINTINGS = r"^(none|full|selective|every:[1-9]\d*|budget:(0(\.\d+)?|1(\.0+)?))$"
NAMES = r"^(\w[\w.-]{0,99})?$"
FORMS = {  # the values that a pattern allows, for people
    CHECKPOINTINGS: ["none", "full", "selective", "every:<whole number>", "budget:<0.0 to 1.0>"],
}

TRACKERS = ["wandb", "tensorboard", "trackio", "mlflow", "swanlab", "aim", "none"]  # tried offline (docs/trackers.md)

TIERS = ("none", "cpu", "nvme")  # storage tiers, each further from the device: the device, host memory, a disk


def key(default: Any, help: str, **limits: Any) -> Any:
    return Field(default, description=help, **limits)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Model(Section):
    path: str = key(
        "smollm2-135m",
        "Hub id, local directory, smollm2-135m (embedded in the extra `demo`), or smollm2-moe (the same with experts).",
    )
    revision: str = key("main", "Branch, tag or commit, where path is a hub id.")
    tokenizer: str = key("", "Hub id or directory of the tokenizer; empty: the model's own.")
    init: Literal["pretrained", "random"] = key(
        "pretrained", "Where weights come from; random needs only a config.json and is for benchmarks."
    )
    attention: Literal["auto", "varlen", "flex", "sdpa", "eager"] = key(
        "auto",
        "Attention kernel: varlen or flex (GPU, without dense masks), sdpa or eager; auto: the first that can run.",
    )
    disable_dropout: bool = key(
        False, "Set each dropout and jitter of the model's config to 0; without, a config with one above 0 is refused."
    )
    load_in_4bit: bool = key(False, "Keep the matrices of blocks, frozen under lora.r, in four bits, NF4 (QLoRA).")
    bnb_4bit_use_double_quant: bool = key(
        False,
        "Store load_in_4bit's scales in 8 bits and one fp32 a row, not in fp32 for each 64 numbers.",
        validation_alias=AliasChoices("bnb_4bit_use_double_quant", "use_bnb_nested_quant"),
    )

    @model_validator(mode="after")
    def validate_bits(self) -> "Model":
        if self.bnb_4bit_use_double_quant and not self.load_in_4bit:
            raise ValueError("bnb_4bit_use_double_quant = true: nothing is in 4 bits; set model.load_in_4bit=true")
        return self


class Parallel(Section):
    stage: str = key("zero3", "The ZeRO stage, what a rank keeps: ddp, zero1, zero2, zero3 (or fsdp), hsdp, zeropp.")
    dp_replicate_size: int = key(
        -1, "Number of copies of the model (ddp, hsdp); -1: all ranks that the other axes leave.", ge=-1
    )
    dp_shard_size: int = key(
        -1, "Ranks that shard one copy (zero1, zero2, zero3, hsdp, zeropp); -1: all that the other axes leave.", ge=-1
    )
    cp_size: int = key(
        1, "Context-parallel size (Ulysses): neighbouring ranks that split each row's tokens; 1: off.", ge=1
    )
    tp_size: int = key(
        1, "Tensor-parallel size: neighbouring ranks that split matrices, and tokens between them; 1: off.", ge=1
    )
    ep_size: int = key(
        1, "Expert-parallel size: neighbouring data ranks that share the experts of each block; 1: off.", ge=1
    )
    pp_size: int = key(
        1, "Pipeline-parallel size: the number of ranks over which a model's layers are split, in order; 1: off.", ge=1
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = key(
        "1f1b", "Order of micro-batches along pp: gpipe, 1f1b, or interleaved (pipeline_chunks)."
    )
    pipeline_chunks: int = key(
        1, "Chunks of layers on each rank along pp, with interleaved; N of them make the bubble N times smaller.", ge=1
    )
    reshard_min_params: int = key(
        0, "With zero3, hsdp or zeropp: units of fewer parameters stay gathered through a step, as in zero2.", ge=0
    )
    forward_prefetch: int = key(
        -1, "Units gathered ahead of the running one in forward; -1: each as it is reached.", ge=-1
    )
    backward_prefetch: int = key(-1, "Units gathered ahead of the running one in backward; -1: one block.", ge=-1)
    quantize_weights: Literal[0, 8, 4] = key(
        0, "ZeRO++ qwZ: bits of weights on the wire in forward (0: not quantised)."
    )
    quantize_gradients: list[Literal[8, 4]] = key(
        [], "ZeRO++ qgZ: bits of gradients on the wire, inside a node and across; [8, 4] ([]: off)."
    )
    secondary_shard: Annotated[int, Field(ge=0)] | Literal["node"] = key(
        0, "ZeRO++ hpZ: backward gathers among N ranks (a node to quantize_gradients), or a node's (0: among all)."
    )

    @property
    def row_ranks(self) -> int:
        """The number of ranks that share each row: tp x cp."""
        return self.tp_size * self.cp_size

    @property
    def micro_batch_ranks(self) -> int:
        """The number of ranks that share one micro-batch: tp x cp x pp."""
        return self.row_ranks * self.pp_size


class Precision(Section):
    params: Literal["auto", "fp32", "bf16"] = key(
        "auto", "Compute and all-gather dtype; auto: bf16 on a GPU, fp32 on a CPU."
    )
    reduce: Literal["fp32", "bf16"] = key("fp32", "Dtype in which gradients are summed across ranks.")
    master: Literal["fp32", "bf16"] = key(
        "fp32", "Dtype of the sharded weights and their gradients; bf16 needs optim.name=adamw_bf16."
    )

    frozen: Literal["auto", "fp32", "bf16"] = key(
        "auto", "Dtype in which weights that are not trained are stored (LoRA's base); auto: as params."
    )

    def on(self, device_type: str) -> "Precision":
        """Returns this section with `auto` replaced by its meaning on `device_type` (`cuda`, `cpu`)."""
        params = self.params if self.params != "auto" else "bf16" if device_type == "cuda" else "fp32"
        return self.model_copy(update={"params": params, "frozen": params if self.frozen == "auto" else self.frozen})


class Activation(Section):
    checkpointing: str = key(
        "none",
        "Recompute in backward: none, full, every:<n> (one block in n), selective (not matmuls), or budget:<0..1>.",
        pattern=CHECKPOINTINGS,
    )

    @property
    def kind(self) -> str:
        """Returns `none`, `full`, `selective`, `every` or `budget`."""
        return self.checkpointing.partition(":")[0]

    @property
    def every(self) -> int:
        """Returns n where backward recomputes one block in n, from the first on; 0 where it recomputes none."""
        return 0 if self.kind in ("none", "budget") else int(self.checkpointing.partition(":")[2] or 1)

    def recomputed(self, blocks: Iterable[int]) -> list[int]:
        """Returns the numbers in `blocks` of the blocks that backward recomputes."""
        return [number for number in blocks if self.every and number % self.every == 0]

    @property
    def budget(self) -> float | None:
        """The share of `budget:<0..1>`, else None."""
        return float(self.checkpointing.partition(":")[2]) if self.kind == "budget" else None


class Offload(Section):
    optimizer: Literal["none", "cpu", "nvme"] = key(
        "none", "Where masters and moments are: none (the device); with cpu or nvme (path) AdamW runs on the host."
    )
    params: Literal["none", "cpu", "nvme"] = key(
        "none", "Where a unit's shard is while it is not needed (zero3, hsdp, zeropp): none (the device), cpu, or nvme."
    )
    activations: Literal["none", "cpu"] = key(
        "none", "Where inputs of recomputed blocks are kept for backward: none (the device) or cpu."
    )
    path: str = key("", "Directory on the disk that nvme uses; nothing is left in it.")

    @model_validator(mode="after")
    def validate_tiers(self) -> "Offload":
        if TIERS.index(self.params) > TIERS.index(self.optimizer):
            raise ValueError(
                f"params = {self.params!r}: lies further out than optimizer = {self.optimizer!r}, from whose masters "
                f"shards are made; set offload.optimizer={self.params}"
            )
        if ("nvme" in (self.optimizer, self.params)) != bool(self.path):
            why = "needs a directory on a disk" if not self.path else "no tier is nvme; leave it out, or choose one"
            raise ValueError(f"path = {self.path!r}: {why}")
        return self


class Train(Section):
    steps: int = key(0, "Optimizer steps (0: by epochs).", ge=0)
    epochs: int | float = key(
        0, "Passes over the training rows; the next pass fills up the last step (0: by steps).", ge=0
    )
    per_device_train_batch_size: int = key(1, "Rows in a micro-batch of one rank.", ge=1)
    gradient_accumulation_steps: int = key(1, "Micro-batches of one rank in an optimizer step.", ge=1)
    eval_steps: int = key(0, "Evaluate every N steps (0: only before the first and after the last).", ge=0)
    save_steps: int = key(0, "Write a checkpoint every N steps and after the last (0: only when preempted).", ge=0)
    async_save: bool | Literal["auto", "wait"] = key(
        "auto",
        "Save beside steps; wait: the next one waits for the copy; "
        "auto: if the optimizer is on the device and memory suffices.",
    )
    save_total_limit: int = key(0, "Keep this many newest checkpoints (0: all).", ge=0)
    logging_steps: int = key(1, "Log every N steps, each its own loss, not a mean (0: off).", ge=0)
    check_steps: int = key(
        0, "Every N steps run a micro-batch twice and compare bits, to find a GPU that computes wrongly (0: off).", ge=0
    )
    resume_from_checkpoint: str = key("", "A checkpoint directory to start from when this run has none of its own.")
    seed: int = key(42, "Seed of data order and random weights.", ge=0, lt=2**63)
    profile_steps: list[int] = key(
        [],
        "First and last step to profile, [10, 12]: each rank's trace (.json.gz) and GPU memory, in profile/ of a run.",
    )
    compile: bool = key(False, "torch.compile each block in place.")
    deterministic: bool = key(
        False,
        "On a GPU: use kernels that give the same bits each time, as on a CPU. Slower; how much is not yet measured.",
    )
    router_aux_loss_coef: float = key(
        0.0, "Weight of the auxiliary loss that balances experts, over the tokens of all ranks (0: none).", ge=0
    )
    router_bias_update_rate: float = key(
        0.0, "By how much a step moves biases of routers, for the choice of experts, towards balance (0: off).", ge=0
    )
    freeze_router: bool = key(False, "Keep the routers of a mixture of experts as they are.")
    loss_chunk_tokens: int = key(1024, "Largest number of trained tokens whose logits exist at once (0: all).", ge=0)
    export: bool = key(True, "At the end write Hugging Face safetensors to export/ of the run directory.")
    export_dtype: Literal["fp32", "bf16"] = key("fp32", "Dtype of the exported weights.")
    push_to_hub: bool = key(False, "At the end push the export and a model card to train.hub_model_id; needs a token.")
    hub_model_id: str = key("", "The repository on the Hub to push to, name/model. It is made, private.")

    @model_validator(mode="after")
    def validate_steps(self) -> "Train":
        if bool(self.steps) == bool(self.epochs):
            raise ValueError(f"steps = {self.steps} and epochs = {self.epochs}: set exactly one of the two above 0")
        asked = self.profile_steps
        if asked and not (len(asked) == 2 and 1 <= asked[0] <= asked[1] <= (self.steps or asked[1])):
            most = f", at most steps = {self.steps}" if self.steps else ""
            raise ValueError(f"profile_steps = {asked}: must be two steps, the first and the last, from 1{most}")
        if self.push_to_hub != bool(self.hub_model_id) or (self.push_to_hub and not self.export):
            given = f"push_to_hub = {str(self.push_to_hub).lower()}, hub_model_id = {self.hub_model_id!r}"
            given += f" and export = {str(self.export).lower()}"
            raise ValueError(f"{given}: set all three, or neither of the first two")
        return self


class Generate(Section):
    steps: int = key(0, "Generate samples every N steps, before the first and after the last (0: off).", ge=0)
    samples: int = key(4, "Prompts: held-out rows (else training rows) up to their first trained answer.", ge=1)
    max_new_tokens: int = key(64, "Longest continuation in tokens; prompt and continuation fit data.max_length.", ge=1)
    temperature: float = key(0.0, "Sampling temperature (0: greedy, the likeliest token).", ge=0)
    prompts: list[str] = key([], "Your own user messages instead of rows; plain text without a chat template.")

    @model_validator(mode="after")
    def validate_generate(self) -> "Generate":
        is_off = "steps" in self.model_fields_set  # said so: as behind a recipe that generates
        if not (self.steps or is_off) and (changed := sorted(self.model_dump(exclude_defaults=True))):
            raise ValueError(
                f"steps = 0 and {changed[0]} is set: nothing is generated; set generate.steps=100, or leave "
                f"{changed[0]} out"
            )
        if self.prompts and self.samples != type(self).model_fields["samples"].default:
            raise ValueError(f"prompts and samples = {self.samples}: each prompt is one sample; leave samples out")
        if not all(prompt.strip() for prompt in self.prompts):
            raise ValueError(f"prompts = {self.prompts}: one of them is empty")
        return self

    @property
    def count(self) -> int:
        """The number of samples that all ranks together generate at one step."""
        return len(self.prompts) or self.samples


class Hardware(Section):
    memory_gb: int | float = key(
        0, "GB (10^9 bytes) of weights, gradients and optimizer state, all ranks together (0: not known).", ge=0
    )


class Run(Section):
    name: str = key("", "Directory of the run; the same name continues it. Empty: recipe name and time.", pattern=NAMES)
    dir: str = key("runs", "Where run directories are made.")
    report_to: str | list[str] = key(
        "wandb", "Trackers: wandb (offline without a key), tensorboard, trackio, mlflow, swanlab, aim, or none."
    )
    project: str = key("shardbook", "The trackers' project name.")
    group: str = key("", "Group of the run in the trackers: a comparison's name, or your own.")
    checkpoint_fallback: bool = key(
        True, "Where the newest checkpoint is damaged, go on from the newest whole one (false: end with 2)."
    )
    lost_seconds: int | float = key(
        120, "End the run when a rank sends no heartbeat for this time (0: off, the run waits for a lost node).", ge=0
    )
    hang_seconds: int | float = key(
        300, "End the run when a rank makes no progress for this time; first step and files apart (0: off).", ge=0
    )

    @model_validator(mode="after")
    def validate_trackers(self) -> "Run":
        if "none" in self.report_to and self.report_to not in ("none", ["none"]):
            raise ValueError(f"report_to = {self.report_to!r}: none must be the only one")
        for tracker in [self.report_to] if isinstance(self.report_to, str) else self.report_to:
            if tracker not in TRACKERS:
                raise ValueError(
                    f"report_to = {tracker!r}: must be of {', '.join(TRACKERS)}{nearest(tracker, TRACKERS)}"
                )
        return self
