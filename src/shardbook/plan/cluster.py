"""A recipe on a cluster: memory, traffic and time of each stage there, and the candidates that an advice compares.

Invariant: all numbers come from `Layout` values, which a run of the same recipe builds too; nothing is allocated and
no process group made, so a laptop answers for any number of GPUs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from transformers import PreTrainedConfig

from shardbook.memory.host_state import offloaded_bytes
from shardbook.model.attention import kernel_on_gpu
from shardbook.model.experts import stacked_parameters
from shardbook.model.flops import Flops
from shardbook.model.marks import NOT_STORED
from shardbook.model.selfcheck import check_family
from shardbook.model.shapes import shape_config
from shardbook.parallel.context import check_heads
from shardbook.parallel.layout import Layout
from shardbook.parallel.mesh import describe_sizes
from shardbook.parallel.placement import LocalModel, World, build_local, layout_of
from shardbook.parallel.units import Unit
from shardbook.plan.block_traffic import read_inside
from shardbook.plan.formulas import predict_copied, predict_traffic
from shardbook.plan.hardware import Cluster
from shardbook.plan.peak import Peak, predict_fullest
from shardbook.plan.speed import StepTime, Tracer, model_flops, predict_step
from shardbook.recipe import Offload, Parallel, Recipe, RecipeError, conflicts, resolve_precision, with_settings
from shardbook.recipe.stages import OF_ANY, STAGES, SWITCHES, find_stage

KINDS = ("none", "selective", "full")  # the cheapest in time first
DOCUMENT_TOKENS = 1200  # of a document in packed rows, where no other number is given
DISK = "/scratch"  # stands in an advice for the directory, which only its user knows
FILLED = 4  # most micro-batches for each rank along pp that are tried
MICROS = 8  # most micro-batches of a step that are tried with other sizes than the recipe's, beside FILLED
SIZES = (1, 2, 4, 8)
PP_SIZES = (2, 4, 8, 16)  # pp sizes that are tried
SIZE_KEYS = ("tp_size", "cp_size", "pp_size", "ep_size")
ParallelSizes = tuple[int, int, int, int]  # of SIZE_KEYS


@dataclass(frozen=True)
class Candidate:
    """A recipe settings out on a cluster, with its peak and the time of its step."""

    recipe: Recipe
    layout: Layout
    peak: Peak
    layouts: Sequence[Layout]  # of the pipeline stages that were looked at; `layout` is the fullest one's
    cluster: Cluster
    planner: "Planner"

    @cached_property
    def time(self) -> StepTime:
        """The time of its step: the slowest pipeline stage's. Most candidates do not fit, and are never asked."""
        return max(map(self.time_of, self.layouts), key=lambda each: each.seconds)

    def time_of(self, layout: Layout, note: Tracer | None = None) -> StepTime:
        """Returns the time of a step of the pipeline stage with `layout`. `note`: as predict_step takes it."""
        asked = self.planner.config, self.recipe, self.planner.flops, self.planner.document_tokens, self.cluster
        return predict_step(layout, *asked, note)

    @cached_property
    def offloaded_bytes(self) -> dict[str, int]:
        """The most bytes that one rank offloads to its `host` and `disk`; empty where nothing is offloaded."""
        if not self.layout.steps_on_host:
            return {}
        sizes = [offloaded_bytes(layout, 0) for layout in self.layouts]
        return {where: max(size[where] for size in sizes) for where in sizes[0]}

    @property
    def copied(self) -> int:
        """The most bytes of the host for one rank's copy of an asynchronous save; 0 where `auto` finds no room."""
        train, behind = self.recipe.train, self.recipe.saves_behind and self.recipe.train.save_steps
        size, away = predict_copied(self.layout, 0, self.recipe.optim.name), self.offloaded_bytes.get("host", 0)
        has_room = (away + size) * self.cluster.a_node <= self.cluster.host_bytes
        return size if behind and (has_room or train.async_save != "auto") else 0

    @cached_property
    def worst_peak(self) -> Peak:
        """Its peak where each token chooses as many of this rank's experts as it can."""
        layout = replace(self.layout, expert_load=self.layout.most_expert_load)
        return predict_fullest(layout, self.planner.config, self.recipe)

    @property
    def largest(self) -> str:
        """The name of the peak's largest term."""
        return max(terms := asdict(self.peak), key=lambda name: terms[name])

    @cached_property
    def over_budget_gb(self) -> dict[str, float]:
        """The GB that are missing, by the name of the peak's largest term or `host`."""
        on_host = (self.offloaded_bytes.get("host", 0) + self.copied) * self.cluster.a_node - self.cluster.host_bytes
        missing = {self.largest: self.peak.total - self.cluster.room_bytes, "host": on_host}
        return {what: size / 1e9 for what, size in missing.items() if size > 0}

    @property
    def fits(self) -> bool:
        return not self.over_budget_gb

    @property
    def bottleneck(self) -> str:
        """The first name in `over_budget_gb`, or else that of the peak's largest term."""
        return next(iter(self.over_budget_gb), self.largest)

    @property
    def comm(self) -> dict[str, int]:
        """The payload bytes of one rank's step, by `<op>_bytes`, over all axes."""
        sums: dict[str, int] = {}
        micros, optimizer = self.recipe.train.gradient_accumulation_steps, self.recipe.optim.name
        inside = read_inside(self.layout, self.planner.config, self.recipe)
        sent = predict_traffic(self.layout, micros, optimizer, self.recipe.forwards_per_micro, inside=inside)
        for (op, _), volume in sent.items():
            sums[f"{op}_bytes"] = sums.get(f"{op}_bytes", 0) + volume.payload_bytes
        return sums

    @property
    def tokens(self) -> int:
        """The number of tokens in a step of all ranks, rows full."""
        ranks = self.layout.data_rank(0).dp_size
        return self.recipe.micro_tokens * self.recipe.train.gradient_accumulation_steps * ranks

    @property
    def speed(self) -> float:
        """The tokens a second of one GPU."""
        return self.tokens / self.time.seconds / self.cluster.gpus

    @property
    def mfu(self) -> float:
        """The model FLOPs over the GPUs' peak."""
        counted = model_flops(self.recipe, self.planner.flops, self.planner.document_tokens)
        return counted / self.time.seconds / self.cluster.gpu.flops

    def words(self) -> str:
        train, offload, mesh = self.recipe.train, self.recipe.offload, describe_sizes(self.layout.mesh)
        mesh += f", ep {self.layout.ep_size}" * (self.layout.ep_size > 1)
        away = [f"{what} on {tier}" for what in ("optimizer", "params") if (tier := getattr(offload, what)) != "none"]
        sizes = [f"{size / 1e9:,.0f} GB of {where} a rank" for where, size in self.offloaded_bytes.items()]
        return (
            f"{self.layout.stage.name} ({mesh}), checkpointing {self.recipe.activation.checkpointing}, "
            f"{train.per_device_train_batch_size} rows x {train.gradient_accumulation_steps}"
            + (f", {', '.join(away)} ({', '.join(sizes)})" if away else "")
        )


@dataclass(frozen=True)
class Planner:
    """Lays a recipe out on clusters."""

    recipe: Recipe  # without `auto`: for a GPU
    config: PreTrainedConfig
    local: LocalModel  # without a pipeline
    document_tokens: float = DOCUMENT_TOKENS
    teacher: PreTrainedConfig | None = None
    # the rows that the planned ranks' experts receive, as a multiple of the mean; other sizes of ep may allow less
    expert_load: float = 1.0
    layouts: dict[tuple[str, str, int, int, int], Layout] = field(default_factory=dict)
    units: dict[Any, tuple[Unit, ...]] = field(default_factory=dict)  # of layouts of the same part, chosen once
    # a rank's part of the model, by tp size, pipeline settings and pipeline stage
    part_models: dict[tuple[Any, ...], LocalModel] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> int:
        placements = self.local.placements.items()
        return sum(placement.numel for name, placement in placements if not name.startswith(NOT_STORED))

    @cached_property
    def has_experts(self) -> bool:
        """Returns whether blocks have experts, which ranks along ep could share."""
        return any(stacked_parameters(block) for block in self.local.model.blocks)

    @property
    def flops(self) -> Flops:
        return self.local.flops

    def part_of(self, parallel: Parallel, stage: int = 0) -> LocalModel:
        """Returns the part of the model that pipeline stage `stage` has. RecipeError where it cannot be shared so."""
        split = {key: getattr(parallel, key) for key in ("tp_size", "ep_size")}
        key = (*split.values(), *pipeline_settings(parallel).values(), stage)
        if parallel.pp_size == 1 and all(size == getattr(self.recipe.parallel, key) for key, size in split.items()):
            return self.local
        if key not in self.part_models:
            settings = self.recipe.parallel.model_copy(update=split | pipeline_settings(parallel))
            recipe, inside = self.recipe.model_copy(update={"parallel": settings}), settings.row_ranks
            demands = check_family(self.config).demands
            kernel = kernel_on_gpu(recipe.model.attention, demands)
            place = kernel, self.teacher, stage * inside, settings.pp_size * inside
            self.part_models[key] = build_local(recipe, self.config, *place)
        return self.part_models[key]

    def layout_of(self, recipe: Recipe, cluster: Cluster, stage: int) -> Layout:
        key = (recipe.parallel.model_dump_json(), recipe.offload.model_dump_json(), cluster.gpus, cluster.a_node, stage)
        if key not in self.layouts:
            world = World(*key[2:4], expert_load=self.expert_load)
            self.layouts[key] = layout_of(recipe, self.part_of(recipe.parallel, stage), world, self.units)
        return self.layouts[key]

    def lay_out(self, recipe: Recipe, cluster: Cluster) -> Candidate:
        """Returns the candidate of `recipe`: of a pipeline the fullest stage, and the slowest one's time, among both
        ends and the second stage, which is the longest and fullest between them. Raises RecipeError where the recipe's
        mesh does not fit the cluster."""
        ranks = recipe.parallel.pp_size
        layouts = [self.layout_of(recipe, cluster, stage) for stage in sorted({0, min(1, ranks - 1), ranks - 1})]
        peaks = [predict_fullest(layout, self.config, recipe) for layout in layouts]
        fullest = max(range(len(layouts)), key=lambda number: peaks[number].total)
        return Candidate(recipe, layouts[fullest], peaks[fullest], layouts, cluster, self)

    def stages(self, cluster: Cluster) -> dict[str, Candidate]:
        """Returns a candidate for each possible stage: the recipe's as it is, others as a user would first set them."""
        stage_name = find_stage(self.recipe.parallel.stage).name
        asked = {name: self.recipe if name == stage_name else self.under(name, cluster) for name in STAGES}
        return {name: self.lay_out(recipe, cluster) for name, recipe in asked.items() if recipe}

    def under(self, stage: str, cluster: Cluster, shared: Parallel | None = None) -> Recipe | None:
        """Returns the recipe under a stage as a user would first set it on the cluster, without those offload tiers and
        ZeRO++ switches that contradict it; `shared` has other sizes of SIZE_KEYS. None where it would be another
        stage, or contradicts the recipe."""
        parallel, offload = stage_settings(stage, shared or self.recipe.parallel, cluster), self.recipe.offload
        if not parallel:
            return None
        none: dict[str, Any] = {}
        fewer = none, {"quantize_weights": 0, "secondary_shard": 0}
        nearer = none, {"params": "none"}, {"params": "none", "optimizer": "none", "path": ""}
        for switches, tiers in product(fewer, nearer):
            sections = {"parallel": parallel.model_copy(update=switches), "offload": offload.model_copy(update=tiers)}
            if not conflicts(recipe := self.recipe.model_copy(update=sections)):
                return recipe
        return None

    def parallel_sizes(self, cluster: Cluster, both: bool = False) -> list[ParallelSizes]:
        """Returns the sizes of tp, cp, pp and ep to try beside the recipe's: one of the four differs, tp x cp and ep
        divide a node, and pp the nodes; with `both` tp is a whole node, and cp (across nodes) or pp is above 1."""
        asked = self.recipe.parallel
        tp, cp, pp, ep = asked_sizes = asked.tp_size, asked.cp_size, asked.pp_size, asked.ep_size
        choices = [(size, cp, pp, ep) for size in SIZES] + [(tp, size, pp, ep) for size in SIZES]
        choices += [(tp, cp, size, ep) for size in (1, *PP_SIZES)]
        choices += [(tp, cp, pp, size) for size in SIZES if self.has_experts]
        if both:
            choices = [(cluster.a_node, size, pp, ep) for size in SIZES[1:]]
            choices += [(cluster.a_node, cp, size, ep) for size in PP_SIZES]
        tried = list[ParallelSizes]()
        for each in dict.fromkeys(choices):
            parallel = Parallel().model_copy(update=with_sizes(asked, each))
            inside = each[0] if both else each[0] * each[1]
            if each == asked_sizes or cluster.a_node % inside or cluster.gpus % prod(each[:3]):
                continue
            if cluster.nodes % each[2] or cluster.a_node % each[3]:
                continue
            if conflicts(with_settings(self.recipe, {"parallel": parallel, "activation.checkpointing": "none"})):
                continue
            try:
                self.part_of(parallel)
                check_heads(self.config, parallel)
            except RecipeError:
                continue
            tried.append(each)
        return tried

    def interleaved(self, candidate: Candidate) -> Candidate | None:
        """Returns `candidate` with two interleaved chunks of layers a rank: half the bubble, and more activations held.
        None where it has no pipeline, or chunks already, or too few blocks or micro-batches."""
        settings = {"parallel.pipeline_schedule": "interleaved", "parallel.pipeline_chunks": 2}
        recipe = with_settings(candidate.recipe, settings)
        if candidate.recipe.parallel.pipeline_chunks > 1 or conflicts(recipe):
            return None
        try:
            return self.lay_out(recipe, candidate.cluster)
        except RecipeError:
            return None

    def candidates(
        self, cluster: Cluster, tier: str = "none", sizes: ParallelSizes | None = None
    ) -> Iterator[Candidate]:
        """Yields each stage, checkpointing and micro-batch whose steps have as many rows as the recipe's, with the
        optimizer at `tier`, and with parameters there too. `sizes`: of SIZE_KEYS (None: the recipe's)."""
        train, asked = self.recipe.train, self.recipe.parallel
        parallel = asked.model_copy(update=with_sizes(asked, sizes) if sizes else {})
        rows = train.per_device_train_batch_size * train.gradient_accumulation_steps
        rows, left_over = divmod(rows * parallel.micro_batch_ranks, asked.micro_batch_ranks)
        # other sizes leave more rows to a rank, and small micro-batches are slow, but many of them fill a pipeline
        most = max(MICROS, train.gradient_accumulation_steps, FILLED * parallel.pp_size) if sizes else rows
        batch_sizes = [size for size in range(1, rows + 1) if rows % size == 0 and rows // size <= most]
        for name in ("ddp", "zero1", "zero2", "zero3", "hsdp") if not left_over else ():
            if not (recipe := self.under(name, cluster, parallel)):
                continue
            for kind, batch, offload in product(KINDS, batch_sizes, _tiers(recipe.offload, tier)):
                how = {"train.per_device_train_batch_size": batch, "train.gradient_accumulation_steps": rows // batch}
                candidate = with_settings(recipe, how | {"activation.checkpointing": kind, "offload": offload})
                if not conflicts(candidate):
                    yield self.lay_out(candidate, cluster)


def _tiers(offload: Offload, tier: str) -> list[Offload]:
    """Returns `offload` with the optimizer at `tier`: once without parameters there, and once with them."""
    if tier == "none":
        return [offload]
    changes = {"optimizer": tier, "path": (offload.path or DISK) if tier == "nvme" else ""}
    return [offload.model_copy(update=changes | more) for more in ({}, {"params": tier})]


def stage_settings(name: str, parallel: Parallel, cluster: Cluster) -> Parallel | None:
    """Returns `[parallel]` for a stage as a user would first set it on the cluster; None where it is another stage."""
    settings: dict[str, Any] = {"stage": name} | {key: getattr(parallel, key) for key in OF_ANY}
    together, inside = parallel.micro_batch_ranks, parallel.row_ranks
    if cluster.gpus % together:
        return None
    if STAGES[name].shards:
        settings["forward_prefetch"] = parallel.forward_prefetch
    if name == "hsdp":
        settings["dp_shard_size"] = shards = cluster.a_node // inside
        if not shards or shards * parallel.cp_size < 2 or cluster.gpus % (together * shards):
            return None
    if name == "zeropp":
        settings |= SWITCHES
    data_ranks = settings.get("dp_shard_size", cluster.gpus // together)  # of which ep is a part
    if data_ranks * parallel.cp_size % parallel.ep_size or (name in ("hsdp", "zeropp") and cluster.nodes == 1):
        return None
    return Parallel.model_validate(settings)


def pipeline_settings(parallel: Parallel) -> dict[str, Any]:
    return {key: getattr(parallel, key) for key in ("pp_size", "pipeline_schedule", "pipeline_chunks")}


def with_sizes(parallel: Parallel, sizes: ParallelSizes) -> dict[str, Any]:
    """Returns the settings of `[parallel]` for the `sizes` of tp, cp, pp and ep; a pipeline of another length than in
    `parallel` runs in 1f1b."""
    like = parallel if sizes[2] == parallel.pp_size else Parallel()
    return pipeline_settings(like) | dict(zip(SIZE_KEYS, sizes, strict=True))


def build_planner(recipe: Recipe, document_tokens: float = DOCUMENT_TOKENS, expert_load: float = 1.0) -> Planner:
    """Returns a planner for `recipe` on GPUs. Reads only the model's shapes; RecipeError where they are not known."""
    recipe = resolve_precision(recipe, "cuda")
    config = shape_config(recipe.model, recipe.data.max_length)
    distill, longest = recipe.distill, recipe.data.max_length
    teacher = shape_config(distill.model, longest, "distill.teacher") if distill.teacher else None
    unpiped = with_settings(recipe, {f"parallel.{key}": value for key, value in pipeline_settings(Parallel()).items()})
    attention = kernel_on_gpu(recipe.model.attention, check_family(config).demands)
    local = build_local(unpiped, config, attention, teacher)
    return Planner(recipe, config, local, min(document_tokens, longest), teacher, expert_load)
