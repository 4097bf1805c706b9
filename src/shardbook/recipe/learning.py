"""The sections about learning: adapters, preferences, a teacher, and the optimizer.

Invariant: as in sections.py.
"""

import re
from typing import Any, Literal

from pydantic import AliasChoices, model_validator

from shardbook.arithmetic import round_up
from shardbook.recipe.sections import Model, Section, key

STACKED_RANK = 8  # the rank of updates of stacked experts is a multiple of it: 16 bytes in bf16


class Lora(Section):
    r: int = key(
        0, "Rank of LoRA's updates (0: the whole model is trained).", ge=0, validation_alias=AliasChoices("r", "lora_r")
    )
    lora_alpha: int | float = key(16, "Updates are scaled by lora_alpha / r.", gt=0)
    lora_dropout: float = key(0.0, "Dropout of the adapters' inputs; other layouts draw other masks.", ge=0, lt=1)
    target_modules: Literal["all-linear"] | list[str] = key(
        "all-linear",
        "The adapted matrices: all-linear (every matrix of a block), or last names: [q_proj, v_proj].",
        validation_alias=AliasChoices("target_modules", "lora_target_modules"),
    )
    target_parameters: list[str] = key(
        [],
        "The adapted stacks of experts, by the ends of their names: [experts.gate_up_proj, experts.down_proj].",
        validation_alias=AliasChoices("target_parameters", "lora_target_parameters"),
    )
    use_rslora: bool = key(False, "Scale by lora_alpha / sqrt(r).")
    use_dora: bool = key(False, "Also train the magnitude of each row of a matrix (DoRA).")
    modules_to_save: list[str] = key([], "Modules to train in full, beside adapters: embed_tokens, lm_head, norm.")
    adapter: str = key("", "A directory, as peft writes it, with the adapter to continue from.")

    @property
    def scaling(self) -> float:
        """The factor by which a LoRA update is multiplied."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)

    @model_validator(mode="after")
    def validate_lora(self) -> "Lora":
        if not self.r and (changed := self.model_dump(exclude_defaults=True)):
            name = sorted(changed)[0]
            raise ValueError(f"r = 0 and {name} is set: nothing is adapted; set lora.r=16, or leave {name} out")
        if self.target_modules == [] and not self.target_parameters:
            raise ValueError("target_modules = []: names nothing; set lora.target_modules=all-linear")
        if self.target_parameters and self.r % STACKED_RANK:
            near = round_up(self.r, STACKED_RANK)
            raise ValueError(
                f"r = {self.r}: must be a multiple of {STACKED_RANK} where target_parameters is set: products of all "
                f"experts take rows of 16 bytes; set lora.r={near}"
            )
        for name in ("use_dora", "lora_dropout"):
            if self.target_parameters and (value := getattr(self, name)):
                raise ValueError(
                    f"{name} = {str(value).lower()}: updates of stacked experts (target_parameters) have none, as in "
                    f"peft; leave lora.{name} out, or lora.target_parameters"
                )
        return self


class Preference(Section):
    beta: float = key(0.1, "How closely the model is held to its reference (orpo: the weight of the odds ratio).", gt=0)
    loss_type: Literal["sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "apo_zero", "apo_down"] = key(
        "sigmoid", "DPO's loss of a pair: sigmoid, hinge, ipo, sigmoid_norm, robust, apo_zero or apo_down."
    )
    label_smoothing: float = key(0.0, "With loss_type robust: assumed share of pairs whose labels are swapped.", ge=0)
    rpo_alpha: float = key(0.0, "Weight of the chosen answers' likelihood, added to DPO's loss (0: off).", ge=0)
    simpo_gamma: float = key(0.5, "Margin that SimPO wants between a pair's rewards.", ge=0)
    precompute_ref_log_probs: bool = key(
        True, "Compute the reference once, before the first step (false: in each step, by the base without adapters)."
    )


class Distill(Section):
    teacher: str = key("", "The model to learn from: a hub id, local directory, or smollm2-135m.")
    teacher_revision: str = key("main", "Branch, tag or commit of teacher, and of its tokenizer, where it is a hub id.")
    temperature: float = key(1.0, "The temperature of both distributions; above 1 it softens them.", gt=0)
    kd_ratio: float = key(0.5, "Weight of the teacher's term in the loss; the data's has the rest.", ge=0, le=1)

    @property
    def model(self) -> Model:
        """The teacher as a model, of which nothing is dropped."""
        return Model(path=self.teacher, revision=self.teacher_revision, disable_dropout=True)


PAIRED = ("dpo", "orpo", "simpo")  # methods whose examples are pairs

# pattern of the names of known optimizers that failed on sharded tensors (torch 2.13) -> why
REFUSED_OPTIMIZERS = {
    "adafactor": "it needs means of whole rows and columns, which no rank has; set optim.name=adamw_8bit",
    "bnb|paged|lion_8bit": "bitsandbytes takes no sharded tensors; set optim.name=adamw_8bit or lion",
    "ademamix": "it went: three moments, which no recipe kept; set optim.name=adamw",
    "4bit": "torchao's 4-bit state takes no shards of unequal length; set optim.name=adamw_8bit",
    "schedule_free": "it has other weights for evaluation than for a step; set optim.name=adamw",
    "optimi|galore|apollo": "its state or its projections need whole matrices; set optim.name=adamw_8bit or muon",
}

# optimizers that look at whole matrices, and that the host runs: rules need no torch (all else: optim/table.py)
WHOLE_MATRICES, HOST_OPTIMIZERS = ("muon",), ("adamw",)


class Optim(Section):
    name: Literal["adamw", "adamw_bf16", "adamw_8bit", "lion", "muon"] = key(
        "adamw",
        "AdamW with moments in precision.master, in bf16 or 8 bits (extra `8bit`); Lion; Muon for matrices.",
    )
    learning_rate: float = key(2e-5, "Peak learning rate.", gt=0)
    weight_decay: float = key(0.0, "Decoupled weight decay of matrices; vectors (norms, biases) have none.", ge=0)
    betas: list[float] = key([0.9, 0.999], "Decay rates of the moments.", min_length=2, max_length=2)
    momentum: float = key(0.95, "Muon's momentum.", ge=0, lt=1)
    eps: float = key(1e-8, "AdamW's epsilon.", gt=0)
    max_grad_norm: float = key(1.0, "Clip the norm of the full gradient to this (0: off).", ge=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key(
        "cosine", "Shape of the learning rate after warm-up."
    )
    warmup_steps: int | float = key(
        0,
        "Steps of linear warm-up; below 1: a share of the run.",
        ge=0,
        validation_alias=AliasChoices("warmup_steps", "warmup_ratio"),
    )

    @model_validator(mode="before")
    @classmethod
    def refuse_known_failures(cls, given: Any) -> Any:
        name = given.get("name") if isinstance(given, dict) else None
        for pattern, why in REFUSED_OPTIMIZERS.items():
            if isinstance(name, str) and re.search(pattern, name, re.IGNORECASE):
                raise ValueError(f"name = {name!r}: {why}")
        return given

    @model_validator(mode="after")
    def validate_numbers(self) -> "Optim":
        if self.warmup_steps != int(self.warmup_steps) and self.warmup_steps > 1:
            raise ValueError(f"warmup_steps = {self.warmup_steps}: a count of steps is whole, a share is below 1")
        if self.name != "muon" and self.momentum != type(self).model_fields["momentum"].default:
            raise ValueError(f"momentum = {self.momentum}: only muon has it; leave it out")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas}: each must be at least 0 and below 1")
        return self
