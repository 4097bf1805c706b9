"""Contradictions between keys, incompatible ones: one table of rules, which a recipe checks when it loads. Plan,
translate, comparisons, the library and the docs' matrix check the same table.

Invariant: each contradiction between keys that shows without a machine, model or file is one row of RULES and is stated
nowhere else, except contradictions inside one section, which its own validator finds. All rows that a recipe breaks are
reported, once no key and no section is wrong by itself.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from shardbook.recipe.learning import HOST_OPTIMIZERS, PAIRED, WHOLE_MATRICES, Distill, Preference
from shardbook.recipe.sections import Parallel, RecipeError
from shardbook.recipe.stages import STAGES, SWITCHES, find_stage, stages_where


@dataclass(frozen=True)
class Rule:
    """One of `keys` contradicts one of `others` (empty: `keys` are refused by themselves) where all of `given` holds.

    Each of the three has patterns separated by spaces: `key=a|b`, `key!=a|b`; a value that ends in * matches every
    value with that beginning. The message names the keys and others that match, with their values, and not `given`.
    `why` and `way_out` may name a field of the recipe, or of its stage, in braces.
    """

    keys: str
    others: str
    why: str
    way_out: str
    given: str = ""
    when: Callable[[Any], object] = lambda recipe: True  # a condition that takes arithmetic

    @property
    def sections(self) -> set[str]:
        """The sections whose keys the rule reads; `method`, which is in none, counts as one."""
        return {key.partition(".")[0] for key in self.reads}

    @property
    def reads(self) -> set[str]:
        """The keys that the rule reads."""
        return {key for side in self.sides for key, _ in side}

    @cached_property
    def sides(self) -> list[list["Pattern"]]:
        return [[_read(text) for text in side.split(" ") if side] for side in (self.keys, self.others, self.given)]

    def find(self, recipe: Any, read: Callable[[str], str]) -> "Conflict | None":
        """Returns the conflict where `recipe` breaks this rule, else None. `read` gives the value of a key as text."""
        keys, others, given = self.sides
        if not (named := [key for key, fits in keys if fits(read(key))]):
            return None
        beside = [key for key, fits in others if fits(read(key))]
        if (others and not beside) or not all(fits(read(key)) for key, fits in given) or not self.when(recipe):
            return None
        words = vars(recipe) | {"stage": find_stage(recipe.parallel.stage)}
        named += beside
        shown = [f"{key} = {_show(attrgetter(key)(recipe))}" for key in named]
        shown = list(filter(None, (", ".join(shown[:-1]), shown[-1])))
        why, way_out = self.why.format(**words), self.way_out.format(**words)
        line = f"{' and '.join(shown)}: {'; '.join(filter(None, (why, way_out)))}"
        return Conflict(self, tuple(named), line, why, way_out)


Pattern = tuple[str, Callable[[str], bool]]  # a key, and a test of its value's text


@dataclass(frozen=True)
class Conflict:
    """A rule that a recipe breaks."""

    rule: Rule
    keys: tuple[str, ...]  # the keys that contradict; one that only the way out names is not among them
    text: str  # `parallel.tp_size = 2 and lora.r = 4: <why>; <way out>`
    why: str
    way_out: str


def conflicts(recipe: Any, rules: Sequence[Rule] = ()) -> list[Conflict]:
    """Returns a conflict for each rule that `recipe` breaks, in order. Raises RecipeError for an unknown stage."""
    find_stage(recipe.parallel.stage)
    read = cache(lambda key: str(attrgetter(key)(recipe)))  # each key once: a plan checks thousands of recipes
    return [conflict for rule in rules or RULES if (conflict := rule.find(recipe, read))]


def refuse(conflicts: Iterable[Conflict]) -> None:
    """Raises one RecipeError that states all conflicts in `conflicts`; none where it is empty."""
    if line := "; ".join(conflict.text for conflict in conflicts):
        raise RecipeError(line)


def check_parallel(parallel: Parallel) -> None:
    """Raises RecipeError where keys of a `[parallel]` outside any recipe contradict each other."""
    refuse(conflicts(SimpleNamespace(parallel=parallel), OF_PARALLEL))


def with_settings(recipe: Any, settings: dict[str, Any]) -> Any:
    """Returns `recipe` with `settings` (by section.key), unchecked: `conflicts` then names its contradictions."""
    parts: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if section:
            value = parts.get(section, getattr(recipe, section)).model_copy(update={name: value})
        parts[section or name] = value
    return recipe.model_copy(update=parts)


def _read(text: str) -> Pattern:
    key, _, values = text.partition("=")
    words, starts = frozenset(values.split("|")), tuple(word[:-1] for word in values.split("|") if word.endswith("*"))
    if key.endswith("!"):
        return key[:-1], lambda value: value not in words and not value.startswith(starts)
    return key, lambda value: value in words or value.startswith(starts)


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "0" if value == 0 else repr(value)


TP, CP, PP = "parallel.tp_size!=1", "parallel.cp_size!=1", "parallel.pp_size!=1"
EP = "parallel.ep_size!=1"
AXES = f"{TP} {CP} {EP} {PP}"
STATE, LORA = "offload.optimizer!=none", "lora.r!=0"
QWZ, QGZ, HPZ = "parallel.quantize_weights!=0", "parallel.quantize_gradients!=[]", "parallel.secondary_shard!=0"
UNQUANTISED = "parallel.quantize_weights=0 parallel.quantize_gradients=[]"
GATHERED = f"parallel.stage={stages_where(lambda row: not row.reshard_after_forward)}"
UNSHARDED = f"parallel.stage={stages_where(lambda row: not row.shards)}"
WITHOUT_SWITCHES = f"parallel.stage={stages_where(lambda row: row.switches == 'no')}"
RESHARDING = " or ".join(name for name, row in STAGES.items() if row.reshard_after_forward)
APART = "they do not compose, because "
INTERLEAVED = "parallel.pipeline_schedule=interleaved"

OF_ONE_METHOD = (("preference", "dpo", Preference.model_fields), ("distill", "distill", Distill.model_fields))
OF_OTHERS = {"beta": PAIRED, "simpo_gamma": ("simpo",)}

# fmt: off
RULES = (
    # [parallel] by itself: the stage, and keys that have no effect under it
    Rule("parallel.dp_replicate_size=0 parallel.dp_shard_size=0", "", "must be at least 1, or -1 for the rest", ""),
    *(Rule(f"parallel.{axis}_size!=-1|0|1", "", "stage {parallel.stage} has no such axis",
           "leave it out, or set parallel.stage=hsdp",
           given=f"parallel.stage={stages_where(lambda row, axis=axis: axis not in row.axes)}")
      for axis in ("dp_replicate", "dp_shard")),
    Rule("parallel.stage=hsdp", "", "set at least one of parallel.dp_replicate_size and parallel.dp_shard_size", "",
         "parallel.dp_replicate_size=-1 parallel.dp_shard_size=-1"),
    Rule("parallel.reshard_min_params!=0", "",
         "{stage.name} keeps every parameter gathered through a step",
         f"leave it out, or set parallel.stage to {RESHARDING}", given=GATHERED),
    Rule("parallel.backward_prefetch!=-1", "", "{stage.name} gathers nothing in backward",
         f"leave it out, or set parallel.stage to {RESHARDING}", given=GATHERED),
    Rule("parallel.forward_prefetch!=-1", "", "{stage.name} gathers nothing",
         "leave it out, or choose a stage that shards", given=UNSHARDED),
    Rule(f"{QWZ} {QGZ} {HPZ}", "", "{stage.name} does not have it", "set parallel.stage to zeropp or hsdp",
         given=WITHOUT_SWITCHES),
    Rule("parallel.stage=zeropp", "", "zeropp with none of its switches is zero3",
         "set parallel.quantize_weights=8, parallel.quantize_gradients=[8,4] or parallel.secondary_shard=node, or "
         "parallel.stage=zero3", given=f"{UNQUANTISED} parallel.secondary_shard=0"),
    Rule(QGZ, "", "two numbers, bits inside a node and across, like [8, 4]", "",
         when=lambda recipe: len(recipe.parallel.quantize_gradients) != 2),
    # the pipeline schedule
    Rule("parallel.pipeline_chunks!=1 parallel.pipeline_schedule!=1f1b", "", "there is no pipeline",
         "set parallel.pp_size, or leave it out", given="parallel.pp_size=1"),
    Rule(INTERLEAVED, "parallel.pipeline_chunks=1", "it needs several chunks of layers on each rank",
         "set parallel.pipeline_chunks=2, or leave both out", given=PP),
    Rule("parallel.pipeline_schedule!=interleaved", "parallel.pipeline_chunks!=1", "only interleaved has chunks",
         "set parallel.pipeline_schedule=interleaved, or leave both out", given=PP),
    Rule(f"{INTERLEAVED} {PP}", "train.gradient_accumulation_steps=*",
         "micro-batches come in groups of pp_size", "must be a multiple of {parallel.pp_size}",
         f"{INTERLEAVED} {PP}", lambda recipe: recipe.train.gradient_accumulation_steps % recipe.parallel.pp_size),
    Rule(f"{INTERLEAVED} {PP}", "data.packing=False",
         "rows of a new length may load a kernel in mid-step, and two stages can then wait for each other",
         "set data.packing=true, or leave pipeline_schedule and pipeline_chunks out",
         f"{INTERLEAVED} {PP}", lambda recipe: recipe.train.gradient_accumulation_steps > recipe.parallel.pp_size),
    # tensor, context and pipeline parallel
    Rule("data.max_length=*", f"{TP} {CP}", "the ranks along tp and cp share a row's tokens evenly",
         "data.max_length must be a multiple of {parallel.row_ranks}",
         when=lambda recipe: recipe.data.max_length % recipe.parallel.row_ranks),
    Rule(AXES, "parallel.stage=zeropp", f"{APART}it has groups inside a part of the mesh", "set parallel.stage=zero3"),
    Rule(AXES, f"{QWZ} {QGZ} {HPZ}", f"{APART}a switch of ZeRO++ has groups inside a part of the mesh",
         f"leave parallel.{', '.join(SWITCHES)} out", given="parallel.stage!=zeropp"),
    Rule(TP, "lora.lora_dropout!=0.0", f"{APART}ranks along tp would drop other inputs of one matrix",
         "set lora.lora_dropout=0"),
    Rule(CP, "model.attention=eager", f"{APART}it computes all scores of a row at once", "set model.attention=sdpa"),
    Rule(PP, "offload.activations!=none",
         f"{APART}a block has room on the host for one input, and several micro-batches are on their way at once",
         "leave [offload] out"),
    Rule(TP, f"optim.name={'|'.join(WHOLE_MATRICES)}",
         f"{APART}it orthogonalises whole matrices, of which ranks along tp have parts", "set optim.name=adamw"),
    # methods
    *(Rule(f"{section}.{key}!={field.default}", f"method!={'|'.join(methods)}", f"only {' or '.join(methods)} has it",
           "leave it out")
      for section, method, fields in OF_ONE_METHOD for key, field in fields.items()
      for methods in [OF_OTHERS.get(key, (method,))]),
    Rule("preference.label_smoothing!=0.0", "", "only loss_type = 'robust' has it", "leave it out",
         "method=dpo preference.loss_type!=robust"),
    Rule("preference.label_smoothing=*", "", "must be below 0.5", "",
         when=lambda recipe: recipe.preference.label_smoothing >= 0.5),
    Rule("preference.precompute_ref_log_probs=False", "", "without lora.r the reference is gone after the first step",
         "leave it out", "method=dpo lora.r=0"),
    Rule("preference.precompute_ref_log_probs=False", "",
         "with lora.modules_to_save = {lora.modules_to_save} the reference is gone after the first step",
         "leave it out", f"method=dpo {LORA} lora.modules_to_save!=[]"),
    Rule("preference.precompute_ref_log_probs=False", "",
         "the reference would be the base without the adapters in lora.adapter, with which the run begins",
         "leave it out", f"method=dpo {LORA} lora.adapter!="),
    Rule("method=distill", "", "needs distill.teacher", "", "distill.teacher="),
    Rule("distill.kd_ratio=0.0", "method=distill", "the teacher would be loaded and not used",
         "set a share above 0, or method=sft and leave [distill] out"),
    *(Rule("method=distill", f"offload.{what}!=none",
           "a teacher stays on the device, and offload beside one is not tested", f"set offload.{what}=none")
      for what in ("optimizer", "params", "activations")),
    Rule("generate.steps!=0", "method=reward", "a reward model generates no text", "set generate.steps=0"),
    Rule("train.eval_steps!=0", "", "needs data.eval or data.eval_size", "", "data.eval=|[] data.eval_size=0|0.0"),
    # frozen weights and dtypes
    Rule("precision.master=bf16", "optim.name!=adamw_bf16",
         "rounded to the nearest, most bf16 weights never move at the usual rates",
         "set optim.name=adamw_bf16 (stochastic rounding), or precision.master=fp32"),
    Rule("precision.frozen!=auto", "", "nothing is frozen", "set lora.r, or leave it out", "lora.r=0 method!=distill",
         lambda recipe: recipe.precision.frozen != recipe.precision.params),
    Rule("model.load_in_4bit=True", "", "four bits cannot be trained", "set lora.r=16, or leave it out", "lora.r=0"),
    Rule("model.load_in_4bit=True", QWZ, "the base is sent in four bits already, and bytes cannot be rounded",
         "leave parallel.quantize_weights out"),
    Rule("model.load_in_4bit=True", HPZ, "torch keeps no secondary shard of bytes",
         "leave parallel.secondary_shard out"),
    # offload
    Rule(LORA, STATE, "the state of adapters is small, and stays on the device",
         "set offload.optimizer=none and offload.params=none"),
    Rule(STATE, f"optim.name!={'|'.join(HOST_OPTIMIZERS)}", "the host runs AdamW on fp32 masters and moments",
         "set optim.name=adamw and precision.master=fp32"),
    Rule(STATE, UNSHARDED, "every rank would step the whole model on the host", "set parallel.stage=zero1"),
    Rule("offload.params!=none", GATHERED, "{stage.name} keeps every parameter gathered through a step",
         "set parallel.stage=zero3, or offload.params=none"),
    Rule("train.async_save=True|wait", "offload.optimizer=nvme",
         "state on the disk would be copied to the host's memory", "leave train.async_save out"),
    Rule(STATE, HPZ, "secondary shards stay on the device", "leave one of the two out"),
    # what is computed twice
    Rule("train.check_steps!=0", "", "without deterministic kernels bits may differ anyway",
         "set train.deterministic=true", given="train.deterministic=False"),
    Rule("train.check_steps!=0", STATE,
         f"{APART}the host adds gradients up as they come, and those of a second run could not be taken out again",
         "leave train.check_steps out"),
    Rule("train.check_steps!=0", PP,
         f"{APART}a wrong bit goes on to the next stage, so the rank that made it could not be named",
         "leave train.check_steps out"),
    # mixtures of experts
    Rule(EP, TP, f"{APART}ranks along tp have the same tokens in an MLP, and each would send them to the experts",
         "set parallel.tp_size=1"),
    Rule(EP, "train.compile=True",
         "torch's compiler recomputes no block that it compiles in parts, and experts part it",
         "set train.compile=false or activation.checkpointing=none", "activation.checkpointing!=none"),
    Rule(EP, "parallel.forward_prefetch!=-1|0",
         "a block that backward runs again would gather the one after it for nothing",
         "leave parallel.forward_prefetch out", "activation.checkpointing!=none"),
    Rule(EP, "optim.name=adamw_8bit",
         f"{APART}its state belongs to one number of parts of a matrix, and experts are in other parts",
         "set optim.name=adamw_bf16"),
    Rule(EP, INTERLEAVED,
         "each micro-batch has other numbers of rows, so a kernel may be loaded in mid-step, and two stages then wait "
         "for each other", "set parallel.pipeline_schedule=1f1b", given=PP),
    Rule(EP, "preference.precompute_ref_log_probs=False",
         "the reference sends tokens to other experts, and its bytes are not predicted", "leave it out"),
    Rule("train.router_aux_loss_coef!=0.0", "method!=sft", "only sft has an auxiliary loss", "leave it out"),
    Rule("train.router_aux_loss_coef!=0.0", PP,
         f"{APART}its gradient needs the choices of all layers, and a stage has those of later ones after its backward",
         "leave train.router_aux_loss_coef out"),
    Rule("train.router_aux_loss_coef!=0.0", "train.compile=True",
         "torch's compiler lets no recomputed block leave anything behind, as a router does its logits",
         "set train.compile=false or activation.checkpointing=none", "activation.checkpointing!=none"),
    Rule("train.router_bias_update_rate!=0.0", "method!=sft", "only sft moves biases of routers", "leave it out"),
    Rule("train.router_bias_update_rate!=0.0", LORA, "the files of adapters hold no biases of routers", "leave it out"),
    Rule("train.freeze_router=True", LORA, "beside adapters routers are frozen already", "leave it out"),
    # recompute and compile
    Rule("offload.activations!=none", "activation.checkpointing=none|budget:*",
         "only recomputed blocks offload inputs", "set activation.checkpointing=full, selective or every:<n>"),
    Rule("activation.checkpointing=budget:*", "", "only the compiler can keep a budget",
         "set train.compile=true, or choose selective or every:<n>", "train.compile=False"),
)
# fmt: on
OF_PARALLEL = [rule for rule in RULES if rule.sections == {"parallel"}]
