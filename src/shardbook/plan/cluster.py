"""A recipe on a cluster: each stage's memory, traffic and time there, which fit, and the fastest that does.

Invariant: all numbers are of `Layout` values, which a run of the same recipe builds too; nothing is allocated and no
process group made, so a laptop answers for any number of GPUs.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from transformers import PreTrainedConfig

from shardbook.comm.ledger import add_traffic
from shardbook.memory.shelf import shelf_sizes
from shardbook.model.attention import kernel_on_gpu
from shardbook.model.causal_lm import CausalLM, Flops, count_flops
from shardbook.model.context import check_heads
from shardbook.model.laid_out import World, build_adapted, layout_of
from shardbook.model.shapes import shape_config
from shardbook.model.weights import own_parameters
from shardbook.parallel.layout import Layout
from shardbook.parallel.mesh import describe_sizes
from shardbook.parallel.units import count_parameters
from shardbook.plan.axes import axes_traffic
from shardbook.plan.formulas import predict_traffic
from shardbook.plan.hardware import Cluster
from shardbook.plan.peak import Peak, predict_fullest
from shardbook.plan.speed import StepTime, model_flops, predict_step
from shardbook.recipe import Offload, Parallel, Recipe, RecipeError, conflicts, resolve_precision
from shardbook.recipe.stages import OF_ANY, STAGES, SWITCHES, find_stage

KINDS = ("none", "selective", "full")  # the cheapest in time first
DOCUMENT_TOKENS = 1200  # of documents in packed rows, where nothing else is said
DISK = "/scratch"  # stands in an advice for a directory that only its user knows
FILLED = 4  # as many micro-batches for each rank of a pipeline as are tried
MICROS = 8  # micro-batches of a step, at most, where another number of ranks shares matrices or rows
SHARES = (1, 2, 4, 8)
STAGES_OF = (2, 4, 8, 16)  # ranks along pp
Shares = tuple[int, int, int]  # ranks that share matrices, rows, and layers
SHARED = ("tp_size", "cp_size", "pp_size")
WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Candidate:
    """A recipe's settings, laid out on the cluster."""

    recipe: Recipe
    layout: Layout
    peak: Peak
    time: StepTime
    cluster: Cluster
    config: PreTrainedConfig

    @property
    def away(self) -> dict[str, int]:
        """Bytes of one rank on the `host` and on the `disk`, where something is."""
        return shelf_sizes(self.layout, 0) if self.layout.offload.optimizer != "none" else {}

    @property
    def largest(self) -> str:
        """The largest term of the peak."""
        terms = asdict(self.peak)
        return max(terms, key=lambda name: terms[name])

    @property
    def over(self) -> dict[str, float]:
        """GB that are missing, by the largest term of the peak or `host`."""
        on_host = self.away.get("host", 0) * self.cluster.a_node - self.cluster.host_bytes
        missing = {self.largest: self.peak.total - self.cluster.room_bytes, "host": on_host}
        return {what: size / 1e9 for what, size in missing.items() if size > 0}

    @property
    def fits(self) -> bool:
        return not self.over

    @property
    def limit(self) -> str:
        """What is missing, or else the largest term of the peak."""
        return next(iter(self.over), self.largest)

    @property
    def comm(self) -> dict[str, int]:
        """Payload bytes of a step of one rank, `<op>_bytes`, over all axes."""
        sums: dict[str, int] = {}
        micros, optimizer = self.recipe.train.gradient_accumulation_steps, self.recipe.optim.name
        sent = predict_traffic(self.layout, micros, optimizer, self.recipe.forwards)
        for (op, _), volume in add_traffic(sent, axes_traffic(self.layout, self.config, self.recipe)).items():
            sums[f"{op}_bytes"] = sums.get(f"{op}_bytes", 0) + volume.payload_bytes
        return sums

    @property
    def tokens(self) -> int:
        """Of a step of all ranks, rows full."""
        ranks = self.layout.data_rank(0).ranks
        return self.recipe.micro_tokens * self.recipe.train.gradient_accumulation_steps * ranks

    @property
    def speed(self) -> float:
        """Tokens a second of one GPU."""
        return self.tokens / self.time.seconds / self.cluster.gpus

    @property
    def gpu_hours(self) -> float:
        """Of a billion tokens, padding among them."""
        return 1e9 / self.speed / 3600

    def words(self) -> str:
        train, offload, mesh = self.recipe.train, self.recipe.offload, describe_sizes(self.layout.mesh)
        away = [f"{what} on {tier}" for what in ("optimizer", "params") if (tier := getattr(offload, what)) != "none"]
        sizes = [f"{size / 1e9:,.0f} GB of {where} a rank" for where, size in self.away.items()]
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
    model: CausalLM
    document_tokens: float = DOCUMENT_TOKENS
    teacher: PreTrainedConfig | None = None
    made: dict[tuple[str, str, int, int, int], Layout] = field(default_factory=dict)
    # what a rank has of the model, by how it is shared
    cut: dict[tuple[Any, ...], CausalLM] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> int:
        return count_parameters(parameter for _, parameter in own_parameters(self.model))

    @cached_property
    def flops(self) -> Flops:
        return count_flops(self.model)

    def model_of(self, parallel: Parallel, stage: int = 0) -> CausalLM:
        """What a rank of that stage of a pipeline has. Raises RecipeError where so many cannot share the model."""
        key = (parallel.tp_size, *pipeline_settings(parallel).values(), stage)
        if parallel.pp_size == 1 and parallel.tp_size == self.recipe.parallel.tp_size:
            return self.model
        if key not in self.cut:
            own = self.recipe.parallel.model_copy(update={"tp_size": parallel.tp_size, **pipeline_settings(parallel)})
            recipe, inside = self.recipe.model_copy(update={"parallel": own}), own.row_ranks
            place = kernel_on_gpu(recipe.model.attention), self.teacher, stage * inside, own.pp_size * inside
            self.cut[key] = build_adapted(recipe, self.config, *place)
        return self.cut[key]

    def layout_of(self, recipe: Recipe, cluster: Cluster, stage: int) -> Layout:
        world = cluster.gpus, cluster.a_node
        key = (recipe.parallel.model_dump_json(), recipe.offload.model_dump_json(), *world, stage)
        if key not in self.made:
            self.made[key] = layout_of(recipe, self.model_of(recipe.parallel, stage), World(*world))
        return self.made[key]

    def lay_out(self, recipe: Recipe, cluster: Cluster) -> Candidate:
        """Of a pipeline the fullest stage, and the time that the slowest sets: those at its ends, or the second, which
        of those between is the longest and holds most. Raises RecipeError where the recipe's mesh does not fit the
        cluster."""
        ranks = recipe.parallel.pp_size
        layouts = [self.layout_of(recipe, cluster, stage) for stage in sorted({0, min(1, ranks - 1), ranks - 1})]
        peaks = [predict_fullest(layout, self.config, recipe) for layout in layouts]
        more = recipe, self.flops, self.document_tokens, cluster
        times = [predict_step(layout, self.config, *more) for layout in layouts]
        fullest = max(range(len(layouts)), key=lambda number: peaks[number].total)
        time = max(times, key=lambda each: each.seconds)
        return Candidate(recipe, layouts[fullest], peaks[fullest], time, cluster, self.config)

    def mfu(self, candidate: Candidate) -> float:
        """Model FLOPs over the GPUs' peak."""
        counted = model_flops(candidate.recipe, self.flops, self.document_tokens)
        return counted / candidate.time.seconds / candidate.cluster.gpu.flops

    def stages(self, cluster: Cluster) -> dict[str, Candidate]:
        """The recipe under each stage: its own as it is, the others as a user would first set them."""
        own = find_stage(self.recipe.parallel.stage).name
        asked = {name: self.recipe if name == own else self.under(name, cluster) for name in STAGES}
        return {name: self.lay_out(recipe, cluster) for name, recipe in asked.items() if recipe}

    def under(self, stage: str, cluster: Cluster, shared: Parallel | None = None) -> Recipe | None:
        """Returns the recipe under a stage as a user would first set it on the cluster, without those of its tiers, and
        of ZeRO++'s switches, that do not go with it; `shared` has other sizes of tp, cp and pp. None where it would be
        another stage, or does not go with the recipe."""
        parallel, offload = stage_settings(stage, shared or self.recipe.parallel, cluster), self.recipe.offload
        if not parallel:
            return None
        none: dict[str, Any] = {}
        fewer = none, {"quantize_weights": 0, "secondary_shard": 0}
        nearer = none, {"params": "none"}, {"params": "none", "optimizer": "none", "path": ""}
        for switches, tiers in product(fewer, nearer):
            own = {"parallel": parallel.model_copy(update=switches), "offload": offload.model_copy(update=tiers)}
            if not conflicts(recipe := self.recipe.model_copy(update=own)):
                return recipe
        return None

    def fewest(self, stage: str, cluster: Cluster) -> int | None:
        """The fewest GPUs on which the recipe fits under `stage`, its micro-batch as it is; None: not up to 4,096."""
        for world in WORLDS:
            smaller = cluster.resized(world)
            recipe = self.under(stage, smaller)
            if recipe and self.lay_out(recipe, smaller).fits:
                return world
        return None

    def shares(self, cluster: Cluster, both: bool = False) -> list[Shares]:
        """How many ranks of a node may share matrices, or rows, or nodes layers, where that is not as the recipe says;
        with `both` a node's share matrices, and those of several rows or layers."""
        asked = self.recipe.parallel
        tp, cp, pp = own = asked.tp_size, asked.cp_size, asked.pp_size
        choices = [(size, cp, pp) for size in SHARES] + [(tp, size, pp) for size in SHARES]
        choices += [(tp, cp, size) for size in (1, *STAGES_OF)]
        if both:
            choices = [(cluster.a_node, size, pp) for size in SHARES[1:]]
            choices += [(cluster.a_node, cp, size) for size in STAGES_OF]
        found = list[Shares]()
        for each in dict.fromkeys(choices):
            parallel = Parallel(wrap=asked.wrap).model_copy(update=shared_as(asked, each))
            inside = each[0] if both else each[0] * each[1]
            if each == own or cluster.a_node % inside or cluster.gpus % prod(each) or cluster.nodes % each[2]:
                continue
            if conflicts(self.recipe.model_copy(update={"parallel": parallel})):
                continue
            try:
                self.model_of(parallel)
                check_heads(self.config, parallel)
            except RecipeError:
                continue
            found.append(each)
        return found

    def looped(self, found: Candidate) -> Candidate | None:
        """`found` with each rank's layers in two runs, which halves what its pipeline waits and holds more activations.
        None where it has none, or has them already, or blocks or micro-batches are too few."""
        looped = found.recipe.parallel.model_copy(update={"pipeline_schedule": "interleaved", "pipeline_chunks": 2})
        recipe = found.recipe.model_copy(update={"parallel": looped})
        if found.recipe.parallel.pipeline_chunks > 1 or conflicts(recipe):
            return None
        try:
            return self.lay_out(recipe, found.cluster)
        except RecipeError:
            return None

    def candidates(self, cluster: Cluster, tier: str = "none", shares: Shares | None = None) -> Iterator[Candidate]:
        """Every stage, checkpointing and micro-batch whose steps have as many rows as the recipe's, with state at
        `tier`, and with parameters there too; so many ranks share matrices and rows (None: as the recipe says)."""
        train, asked = self.recipe.train, self.recipe.parallel
        own = asked.model_copy(update=shared_as(asked, shares) if shares else {})
        rows = train.per_device_train_batch_size * train.gradient_accumulation_steps
        rows, over = divmod(rows * own.micro_batch_ranks, asked.micro_batch_ranks)
        # with other ranks there are more rows to a rank, and small micro-batches are slow ones, but fill a pipeline
        most = max(MICROS, train.gradient_accumulation_steps, FILLED * own.pp_size) if shares else rows
        sizes = [size for size in range(1, rows + 1) if rows % size == 0 and rows // size <= most]
        for name in ("ddp", "zero1", "zero2", "zero3", "hsdp") if not over else ():
            if not (recipe := self.under(name, cluster, own)):
                continue
            for kind, batch, offload in product(KINDS, sizes, _tiers(recipe.offload, tier)):
                steps = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": rows // batch}
                changes = {
                    "offload": offload,
                    "activation": recipe.activation.model_copy(update={"checkpointing": kind}),
                    "train": train.model_copy(update=steps),
                }
                candidate = recipe.model_copy(update=changes)
                if not conflicts(candidate):
                    yield self.lay_out(candidate, cluster)


def _tiers(offload: Offload, tier: str) -> list[Offload]:
    """Returns `[offload]` with the optimizer at `tier`, and with parameters there too."""
    if tier == "none":
        return [offload]
    changes = {"optimizer": tier, "path": (offload.path or DISK) if tier == "nvme" else ""}
    return [offload.model_copy(update=changes | more) for more in ({}, {"params": tier})]


def stage_settings(name: str, parallel: Parallel, cluster: Cluster) -> Parallel | None:
    """`[parallel]` for a stage as a user would first set it on the cluster; None where it would be another one."""
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
    if name in ("hsdp", "zeropp") and cluster.nodes == 1:
        return None
    return Parallel.model_validate(settings)


def pipeline_settings(parallel: Parallel) -> dict[str, Any]:
    return {key: getattr(parallel, key) for key in ("pp_size", "pipeline_schedule", "pipeline_chunks")}


def shared_as(parallel: Parallel, shares: Shares) -> dict[str, Any]:
    """Returns those settings of `[parallel]` with which so many ranks share matrices, rows and layers; a pipeline of
    another length runs in 1f1b."""
    like = parallel if shares[2] == parallel.pp_size else Parallel()
    return pipeline_settings(like) | dict(zip(SHARED, shares, strict=True))


def build_planner(recipe: Recipe, document_tokens: float = DOCUMENT_TOKENS) -> Planner:
    """A planner for `recipe` on GPUs. Reads shapes alone. Raises RecipeError where the model's are not known."""
    recipe = resolve_precision(recipe, "cuda")
    config = shape_config(recipe.model.path, recipe.data.max_length)
    path, longest = recipe.distill.teacher, recipe.data.max_length
    teacher = shape_config(path, longest, "distill.teacher") if path else None
    alone = recipe.parallel.model_copy(update=pipeline_settings(Parallel()))
    whole = recipe.model_copy(update={"parallel": alone})
    model = build_adapted(whole, config, kernel_on_gpu(recipe.model.attention), teacher)
    return Planner(recipe, config, model, min(document_tokens, longest), teacher)
