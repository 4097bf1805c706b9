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
    def axes_that_compose(self) -> "Recipe":
        """What tensor, context and pipeline parallel have not been made for."""
        sharding, method, wrap = self.parallel, self.method, self.parallel.wrap
        sizes = {f"parallel.{axis}_size": getattr(sharding, f"{axis}_size") for axis in ("tp", "cp", "pp")}
        tensor, context, pipeline = ([key] for key in sizes)
        inside, every = tensor + context, list(sizes)

        def asked(keys: list[str]) -> str:
            return " and ".join(f"{key} = {sizes[key]}" for key in keys if sizes[key] > 1)

        if self.data.max_length % (together := sharding.tp_size * sharding.cp_size):
            raise ValueError(
                f"data.max_length = {self.data.max_length} and {asked(inside)}: so many ranks share a row's tokens; "
                f"data.max_length must be a multiple of {together}"
            )
        switch = sharding.quantize_weights or sharding.quantize_gradients or sharding.secondary_shard
        switches = "parallel.quantize_weights, quantize_gradients, secondary_shard"
        for keys, unfit, what, way_out in (
            (every, sharding.stage == "zeropp", "parallel.stage = 'zeropp'", "set parallel.stage=zero3"),
            (every, switch, "a switch of ZeRO++", f"leave {switches} out"),
            (tensor, wrap.startswith("size:"), f"parallel.wrap = {wrap!r}", "set parallel.wrap=block"),
            (pipeline, wrap != "block", f"parallel.wrap = {wrap!r}", "set parallel.wrap=block"),
            (tensor + pipeline, self.lora.r, f"lora.r = {self.lora.r}", "leave one of the two out"),
            (tensor, method in ("reward", "distill"), f"method = {method!r}", "leave parallel.tp_size out"),
            (context, method != "sft", f"method = {method!r}", "leave parallel.cp_size out"),
            (pipeline, method != "sft", f"method = {method!r}", "leave parallel.pp_size out"),
            (every, self.generate.steps, f"generate.steps = {self.generate.steps}", "set generate.steps=0"),
            (context, self.model.attention == "eager", "model.attention = 'eager'", "set model.attention=sdpa"),
            (
                tensor,
                self.offload.optimizer != "none",
                f"offload.optimizer = {self.offload.optimizer!r}",
                "set offload.optimizer=none and offload.params=none",
            ),
            *(
                (pipeline, tier != "none", f"offload.{place} = {tier!r}", "leave [offload] out")
                for place, tier in (("optimizer", self.offload.optimizer), ("activations", self.offload.activations))
            ),
            (
                tensor,
                self.optim.name in ("muon", "adamw_8bit", "adamw_bf16"),
                f"optim.name = {self.optim.name!r}, which looks at whole matrices or counts their elements",
                "set optim.name=adamw",
            ),
            (pipeline, self.optim.name == "muon", "optim.name = 'muon'", "set optim.name=adamw"),
        ):
            if unfit and (said := asked(keys)):
                raise ValueError(f"{said} and {what}: they do not compose; {way_out}")
        return self

    @model_validator(mode="after")
    def schedule_that_runs(self) -> "Recipe":
        sharding, micros = self.parallel, self.train.gradient_accumulation_steps
        chunks, is_looped = sharding.pipeline_chunks, sharding.pipeline_schedule == "interleaved"
        schedule = f"parallel.pipeline_schedule = {sharding.pipeline_schedule!r}"
        if sharding.pp_size == 1 and (chunks > 1 or sharding.pipeline_schedule != "1f1b"):
            alone = f"parallel.pipeline_chunks = {chunks}" if chunks > 1 else schedule
            raise ValueError(f"{alone}: there is no pipeline; set parallel.pp_size, or leave it out")
        if is_looped != (chunks > 1):
            way_out = "set parallel.pipeline_chunks=2" if is_looped else "set parallel.pipeline_schedule=interleaved"
            raise ValueError(f"{schedule} and parallel.pipeline_chunks = {chunks}: {way_out}, or leave both out")
        if is_looped and micros % sharding.pp_size:
            raise ValueError(
                f"{schedule}, parallel.pp_size = {sharding.pp_size} and train.gradient_accumulation_steps = {micros}: "
                f"micro-batches come in groups of as many as there are ranks; must be a multiple of {sharding.pp_size}"
            )
        return self

    @model_validator(mode="after")
    def sections_that_agree(self) -> "Recipe":
        """What a key of one section says that another cannot have."""
        self.preference.check_fits(self.method, self.lora)
        self.distill.check_fits(self.method, self.offload)
        model, optim, precision, offload = self.model, self.optim, self.precision, self.offload
        wrap, kind, generate = self.parallel.wrap, self.activation.checkpointing, self.generate.steps
        beside = f"activation.checkpointing = {kind!r}" if kind != "none" else "train.compile = true"
        for unfit, said in (
            (
                self.method == "reward" and generate,
                f"generate.steps = {generate} and method = 'reward': a reward model writes nothing; "
                "leave [generate] out",
            ),
            (
                self.train.eval_steps and not (self.data.eval or self.data.eval_size),
                f"train.eval_steps = {self.train.eval_steps}: needs data.eval or data.eval_size",
            ),
            (
                precision.master == "bf16" and optim.name != "adamw_bf16",
                f"precision.master = 'bf16' and optim.name = {optim.name!r}: rounded to the nearest, most bf16 "
                "weights never move at the usual rates; set optim.name=adamw_bf16 (stochastic rounding), or "
                "precision.master=fp32",
            ),
            (
                self.lora.r and offload.optimizer != "none",
                f"lora.r = {self.lora.r} and offload.optimizer = {offload.optimizer!r}: the state of adapters is "
                "small, and stays on the device; set offload.optimizer=none and offload.params=none",
            ),
            (
                precision.frozen not in ("auto", precision.params) and not (self.lora.r or self.method == "distill"),
                f"precision.frozen = {precision.frozen!r}: nothing is frozen; set lora.r, or leave it out",
            ),
            (
                model.load_in_4bit and not self.lora.r,
                "model.load_in_4bit = true: four bits cannot be trained; set lora.r=16, or leave it out",
            ),
            (
                model.load_in_4bit and self.parallel.quantize_weights,
                f"model.load_in_4bit = true and parallel.quantize_weights = {self.parallel.quantize_weights}: the base "
                "travels in four bits already, and bytes cannot be rounded; leave parallel.quantize_weights out",
            ),
            (
                model.load_in_4bit and self.parallel.secondary_shard,
                f"model.load_in_4bit = true and parallel.secondary_shard = {self.parallel.secondary_shard!r}: torch "
                "keeps no secondary shard of bytes; leave parallel.secondary_shard out",
            ),
            (
                offload.optimizer != "none" and optim.name != "adamw",
                f"offload.optimizer = {offload.optimizer!r} and optim.name = {optim.name!r}: the host runs AdamW "
                "on fp32 masters and moments; set optim.name=adamw and precision.master=fp32",
            ),
            (
                offload.params != "none" and wrap == "none",
                f"offload.params = {offload.params!r} and parallel.wrap = 'none': one unit is everything, and nothing "
                "could be away; set parallel.wrap=block",
            ),
            (
                offload.activations != "none" and kind.partition(":")[0] in ("none", "budget"),
                f"offload.activations = {offload.activations!r} and activation.checkpointing = {kind!r}: inputs of "
                "recomputed blocks leave, and none is; set activation.checkpointing=full, selective or every:<n>",
            ),
            (
                self.activation.budget is not None and not self.train.compile,
                f"activation.checkpointing = {kind!r}: a budget is met by the compiler; set train.compile=true, or "
                "choose selective or every:<n>",
            ),
            (
                wrap.startswith("size:") and (kind != "none" or self.train.compile),
                f"parallel.wrap = {wrap!r} and {beside}: blocks are recomputed and compiled whole, a unit inside one "
                "would be gathered again or break its graph; set parallel.wrap=block, or leave the other out",
            ),
        ):
            if unfit:
                raise ValueError(said)
        return self
