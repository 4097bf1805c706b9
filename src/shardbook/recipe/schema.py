"""The recipe as a whole: its sections, and numbers of a run that follow from several of them.

Invariant: a recipe that loads has no contradiction inside itself (refusals.py). A contradiction with the machine
(world size, files, the model's own limits) is found by the module that meets it, with the same error class.
"""

from typing import Any, Literal

from pydantic import model_validator

from shardbook.recipe.data import Data
from shardbook.recipe.learning import PAIRED, Distill, Lora, Optim, Preference
from shardbook.recipe.refusals import conflicts, refuse
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
        "sft", "The loss: sft; distill (with a teacher); for pairs dpo, orpo, simpo, or reward (a score of answers)."
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
        """The number of sequences in an example: two in a pair, else one."""
        return 2 if self.method in (*PAIRED, "reward") else 1

    @property
    def forwards_per_micro(self) -> int:
        """The number of forwards of a micro-batch: two where each step asks the reference anew."""
        return 1 + (not self.preference.precompute_ref_log_probs)

    @property
    def recomputes_logits(self) -> bool:
        """True where backward recomputes the logits: each loss has a grad_output of its own, known only then."""
        return self.method in PAIRED

    def outputs(self, vocabulary: int) -> int:
        """Returns the width of the head: `vocabulary` logits for a token; with reward one score for a sequence."""
        return 1 if self.method == "reward" else vocabulary

    @property
    def micro_tokens(self) -> int:
        """The number of tokens in a rank's micro-batch whose sequences all have data.max_length."""
        return self.train.per_device_train_batch_size * self.data.max_length * self.sequences

    @property
    def saves_behind(self) -> bool:
        """True where checkpoints are written in a thread: an offloaded optimizer fills the host's memory already."""
        asked = self.train.async_save
        return asked in (True, "wait") or (asked == "auto" and self.offload.optimizer == "none")

    @property
    def at_rest(self) -> str:
        """The dtype of a rank's shards on its device: the masters' dtype, or the dtype of compute where masters are
        offloaded."""
        return self.precision.params if self.offload.optimizer != "none" else self.precision.master

    @model_validator(mode="before")
    @classmethod
    def refuse_kto(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("method") == "kto":
            raise ValueError(
                "method = 'kto': its loss depends on the whole batch, so every layout would train another model; "
                "with pairs set method=dpo and preference.loss_type=apo_zero"
            )
        return given

    @model_validator(mode="after")
    def validate_composition(self) -> "Recipe":
        """Raises for all contradictions."""
        refuse(conflicts(self))
        return self
