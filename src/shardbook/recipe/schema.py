"""The recipe as a whole: its sections, and what of a run follows from several of them.

Invariant: a recipe that loads has no contradiction inside itself (compose.py). What needs the machine (world size,
files, the model's own limits) is checked by the module that meets it, with the same error class.
"""

from typing import Any, Literal

from pydantic import ValidationInfo, model_validator

from shardbook.recipe.compose import conflicts, refuse
from shardbook.recipe.learning import PAIRED, Distill, Lora, Optim, Preference
from shardbook.recipe.rows import Data
from shardbook.recipe.sections import (
    Activation,
    Generate,
    Hardware,
    Model,
    Offload,
    Parallel,
    Precision,
    Run,
    Section,
    Train,
    key,
)


class Recipe(Section):
    method: Literal["sft", "dpo", "orpo", "simpo", "reward", "distill"] = key(
        "sft",
        "What is minimised: sft; distill, beside a teacher; of pairs dpo, orpo, simpo, or reward: a score of answers.",
    )
    model: Model = Model()
    lora: Lora = Lora()
    preference: Preference = Preference()
    distill: Distill = Distill()
    data: Data = Data()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    activation: Activation = Activation()
    offload: Offload = Offload()
    optim: Optim = Optim()
    train: Train
    generate: Generate = Generate()
    hardware: Hardware = Hardware()
    run: Run = Run()

    @property
    def sequences(self) -> int:
        """That an example holds: a pair has two."""
        return 2 if self.method in (*PAIRED, "reward") else 1

    @property
    def forwards(self) -> int:
        """Passes of a micro-batch: one before the others asks the reference, where that was not asked once for all."""
        return 1 + (not self.preference.precompute_ref_log_probs)

    @property
    def remakes_logits(self) -> bool:
        """Whether the head makes its logits in backward again: each loss has a slope of its own, known only then."""
        return self.method in PAIRED

    def outputs(self, vocabulary: int) -> int:
        """Numbers that the head makes of a token, or of a sequence where it scores."""
        return 1 if self.method == "reward" else vocabulary

    @property
    def micro_tokens(self) -> int:
        """Of a rank's micro-batch whose examples are as long as can be."""
        return self.train.per_device_train_batch_size * self.data.max_length * self.sequences

    @property
    def at_rest(self) -> str:
        """Dtype of a rank's shards on its device: with masters on the host, what it computes in."""
        return self.precision.params if self.offload.optimizer != "none" else self.precision.master

    @model_validator(mode="before")
    @classmethod
    def known_to_differ(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("method") == "kto":
            raise ValueError(
                "method = 'kto': its loss is of a whole batch, so every layout would train another model; "
                "with pairs set method=dpo and preference.loss_type=apo_zero"
            )
        return given

    @model_validator(mode="after")
    def keys_that_compose(self, info: ValidationInfo) -> "Recipe":
        """Raises for all contradictions, but for those of sections in the validation's context."""
        refuse(found for found in conflicts(self) if not found.rule.sections & set(info.context or ()))
        return self
