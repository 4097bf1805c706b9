"""The recipe as a whole: its sections, and what one of them says about another.

Invariant: a recipe that loads has no contradiction inside itself. What needs the machine (world size, files, the
model's own limits) is checked by the module that meets it, with the same error class.
"""

from typing import Any, Literal

from pydantic import model_validator

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

    def outputs(self, vocabulary: int) -> int:
        """Numbers that the head makes of a token, or of a sequence where it scores."""
        return 1 if self.method == "reward" else vocabulary

    @property
    def micro_tokens(self) -> int:
        """Of a rank's micro-batch whose examples are as long as can be."""
        return self.train.per_device_train_batch_size * self.data.max_length * self.sequences

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
    def answers_that_are_written(self) -> "Recipe":
        if self.method == "reward" and self.generate.steps:
            raise ValueError(
                f"generate.steps = {self.generate.steps} and method = 'reward': a reward model writes nothing; leave "
                "[generate] out"
            )
        return self

    @model_validator(mode="after")
    def preferences_that_act(self) -> "Recipe":
        self.preference.check_fits(self.method, self.lora)
        return self

    @model_validator(mode="after")
    def teacher_that_acts(self) -> "Recipe":
        self.distill.check_fits(self.method, self.offload)
        return self

    @model_validator(mode="after")
    def something_to_evaluate(self) -> "Recipe":
        if self.train.eval_steps and not (self.data.eval or self.data.eval_size):
            raise ValueError(f"train.eval_steps = {self.train.eval_steps}: needs data.eval or data.eval_size")
        return self

    @model_validator(mode="after")
    def weights_that_move(self) -> "Recipe":
        if self.precision.master == "bf16" and self.optim.name != "adamw_bf16":
            raise ValueError(
                f"precision.master = 'bf16' and optim.name = {self.optim.name!r}: rounded to the nearest, most bf16 "
                "weights never move at the usual rates; set optim.name=adamw_bf16 (stochastic rounding), or "
                "precision.master=fp32"
            )
        return self

    @model_validator(mode="after")
    def adapters_that_fit(self) -> "Recipe":
        if self.lora.r and self.offload.optimizer != "none":
            raise ValueError(
                f"lora.r = {self.lora.r} and offload.optimizer = {self.offload.optimizer!r}: the state of adapters is "
                "small, and stays on the device; set offload.optimizer=none and offload.params=none"
            )
        is_frozen = self.lora.r or self.method == "distill"
        if self.precision.frozen not in ("auto", self.precision.params) and not is_frozen:
            raise ValueError(
                f"precision.frozen = {self.precision.frozen!r}: nothing is frozen; set lora.r, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def bits_that_are_frozen(self) -> "Recipe":
        if self.model.load_in_4bit and not self.lora.r:
            raise ValueError("model.load_in_4bit = true: four bits cannot be trained; set lora.r=16, or leave it out")
        if self.model.load_in_4bit and self.parallel.quantize_weights:
            raise ValueError(
                f"model.load_in_4bit = true and parallel.quantize_weights = {self.parallel.quantize_weights}: the base "
                "travels in four bits already, and bytes cannot be rounded; leave parallel.quantize_weights out"
            )
        return self

    @model_validator(mode="after")
    def axes_that_compose(self) -> "Recipe":
        """What tensor and context parallel have not been made for."""
        sharding, method = self.parallel, self.method
        sizes = {f"parallel.{axis}_size": getattr(sharding, f"{axis}_size") for axis in ("tp", "cp")}
        asked = " and ".join(f"{key} = {size}" for key, size in sizes.items() if size > 1)
        if not asked:
            return self
        together = sharding.tp_size * sharding.cp_size
        if self.data.max_length % together:
            raise ValueError(
                f"data.max_length = {self.data.max_length} and {asked}: so many ranks share a row's tokens; "
                f"data.max_length must be a multiple of {together}"
            )
        switch = sharding.quantize_weights or sharding.quantize_gradients or sharding.secondary_shard
        both, tensor, context = tuple(sizes), ("parallel.tp_size",), ("parallel.cp_size",)
        for keys, unfit, what, way_out in (
            (both, sharding.stage == "zeropp", "parallel.stage = 'zeropp'", "set parallel.stage=zero3"),
            (
                both,
                switch,
                "a switch of ZeRO++",
                "leave parallel.quantize_weights, quantize_gradients, secondary_shard out",
            ),
            (
                tensor,
                sharding.wrap.startswith("size:"),
                f"parallel.wrap = {sharding.wrap!r}",
                "set parallel.wrap=block",
            ),
            (tensor, self.lora.r, f"lora.r = {self.lora.r}", "leave one of the two out"),
            (tensor, method in ("reward", "distill"), f"method = {method!r}", "leave parallel.tp_size out"),
            (context, method != "sft", f"method = {method!r}", "leave parallel.cp_size out"),
            (both, self.generate.steps, f"generate.steps = {self.generate.steps}", "set generate.steps=0"),
            (context, self.model.attention == "eager", "model.attention = 'eager'", "set model.attention=sdpa"),
            (
                tensor,
                self.offload.optimizer != "none",
                f"offload.optimizer = {self.offload.optimizer!r}",
                "set offload.optimizer=none and offload.params=none",
            ),
            (
                tensor,
                self.optim.name in ("muon", "adamw_8bit", "adamw_bf16"),
                f"optim.name = {self.optim.name!r}, which looks at whole matrices or counts their elements",
                "set optim.name=adamw",
            ),
        ):
            said = " and ".join(f"{key} = {sizes[key]}" for key in keys if sizes[key] > 1)
            if unfit and said:
                raise ValueError(f"{said} and {what}: they do not compose; {way_out}")
        return self

    @model_validator(mode="after")
    def stages_that_compose(self) -> "Recipe":
        """What pipeline parallel has not been made for."""
        sharding, micros = self.parallel, self.train.gradient_accumulation_steps
        said, chunks = f"parallel.pp_size = {sharding.pp_size}", sharding.pipeline_chunks
        schedule = f"parallel.pipeline_schedule = {sharding.pipeline_schedule!r}"
        is_looped = sharding.pipeline_schedule == "interleaved"
        if sharding.pp_size == 1:
            if chunks > 1 or sharding.pipeline_schedule != "1f1b":
                alone = f"parallel.pipeline_chunks = {chunks}" if chunks > 1 else schedule
                raise ValueError(f"{alone}: there is no pipeline; set parallel.pp_size, or leave it out")
            return self
        switch = sharding.quantize_weights or sharding.quantize_gradients or sharding.secondary_shard
        for unfit, what, way_out in (
            (sharding.stage == "zeropp", "parallel.stage = 'zeropp'", "set parallel.stage=zero3"),
            (switch, "a switch of ZeRO++", "leave parallel.quantize_weights, quantize_gradients, secondary_shard out"),
            (sharding.wrap != "block", f"parallel.wrap = {sharding.wrap!r}", "set parallel.wrap=block"),
            (self.lora.r, f"lora.r = {self.lora.r}", "leave one of the two out"),
            (self.method != "sft", f"method = {self.method!r}", "leave parallel.pp_size out"),
            (self.generate.steps, f"generate.steps = {self.generate.steps}", "set generate.steps=0"),
            (self.optim.name == "muon", "optim.name = 'muon'", "set optim.name=adamw"),
            *(
                (tier != "none", f"offload.{place} = {tier!r}", "leave [offload] out")
                for place, tier in (("optimizer", self.offload.optimizer), ("activations", self.offload.activations))
            ),
        ):
            if unfit:
                raise ValueError(f"{said} and {what}: they do not compose; {way_out}")
        if is_looped != (chunks > 1):
            way_out = "set parallel.pipeline_chunks=2" if is_looped else "set parallel.pipeline_schedule=interleaved"
            raise ValueError(f"{schedule} and parallel.pipeline_chunks = {chunks}: {way_out}, or leave both out")
        if is_looped and micros % sharding.pp_size:
            raise ValueError(
                f"{schedule}, {said} and train.gradient_accumulation_steps = {micros}: micro-batches come in groups of "
                f"as many as there are ranks; must be a multiple of {sharding.pp_size}"
            )
        return self

    @property
    def at_rest(self) -> str:
        """Dtype of a rank's shards on its device: with masters on the host, what it computes in."""
        return self.precision.params if self.offload.optimizer != "none" else self.precision.master

    @model_validator(mode="after")
    def state_that_can_leave(self) -> "Recipe":
        offload, kind = self.offload, self.activation.checkpointing
        if offload.optimizer != "none" and self.optim.name != "adamw":
            raise ValueError(
                f"offload.optimizer = {offload.optimizer!r} and optim.name = {self.optim.name!r}: the host runs AdamW "
                "on fp32 masters and moments; set optim.name=adamw and precision.master=fp32"
            )
        if offload.params != "none" and self.parallel.wrap == "none":
            raise ValueError(
                f"offload.params = {offload.params!r} and parallel.wrap = 'none': one unit is everything, and nothing "
                "could be away; set parallel.wrap=block"
            )
        if offload.activations != "none" and kind.partition(":")[0] in ("none", "budget"):
            raise ValueError(
                f"offload.activations = {offload.activations!r} and activation.checkpointing = {kind!r}: inputs of "
                "recomputed blocks leave, and none is; set activation.checkpointing=full, selective or every:<n>"
            )
        return self

    @model_validator(mode="after")
    def budget_is_the_compilers(self) -> "Recipe":
        if self.activation.budget is not None and not self.train.compile:
            raise ValueError(
                f"activation.checkpointing = {self.activation.checkpointing!r}: a budget is met by the compiler; "
                "set train.compile=true, or choose selective or every:<n>"
            )
        return self

    @model_validator(mode="after")
    def whole_blocks(self) -> "Recipe":
        wrap, kind = self.parallel.wrap, self.activation.checkpointing
        if wrap.startswith("size:") and (kind != "none" or self.train.compile):
            other = f"activation.checkpointing = {kind!r}" if kind != "none" else "train.compile = true"
            raise ValueError(
                f"parallel.wrap = {wrap!r} and {other}: blocks are recomputed and compiled whole, a unit inside one "
                "would be gathered again or break its graph; set parallel.wrap=block, or leave the other out"
            )
        return self
