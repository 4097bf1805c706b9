"""The set-up of a run: computes, and refuses, everything that can be known before anything large is allocated.

Invariant: the same two calls prepare `shardbook train` and its rehearsal, so a dry run shows what a run does.
`place_run` reads the configs and the tokenizer; `prepare_job` reads the data and, on the ranks of a run, fetches the
weights to this node. What a rank reads it reads once.
"""

import math
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from shardbook.data.encoding import digest_tokenizer, load_tokenizer
from shardbook.data.loader import Batching, Loader, choose_batching
from shardbook.data.template import CLOCK
from shardbook.data.tokenized import Documents, build_documents, check_vocabulary, column
from shardbook.memory.host_state import available_memory
from shardbook.model.attention import head_size
from shardbook.model.families import load_config
from shardbook.model.flash import choose_flash, current_flash, use_flash
from shardbook.model.hub import check_weights, config_folder, model_folder, tokenizer_folder
from shardbook.model.selfcheck import check_family, remember
from shardbook.model.weight_files import digest_ends
from shardbook.objectives import Objective, build_objective
from shardbook.optim.table import OPTIMIZERS
from shardbook.parallel.placement import PlacedModel, World, place_model
from shardbook.plan.formulas import predict_memory_metrics
from shardbook.plan.hardware import HOST_ROOM
from shardbook.plan.measure_blocks import KNOWN_BLOCKS, Unmeasured
from shardbook.plan.peak import GB, Peak, predict_fullest, predict_peak
from shardbook.plan.smallest_change import NONE_FITS, smallest_change
from shardbook.plan.speed import predict_perf_metrics
from shardbook.ranks.distributed import broadcast_from_main, check_same_on_all_ranks
from shardbook.recipe import Model, Recipe, RecipeError, resolve_precision, with_settings
from shardbook.run.load_teacher import KEY, check_teacher
from shardbook.run.prompts import Prompts, build_prompts
from shardbook.terminal import print_line

InTurn = Callable[[], AbstractContextManager[None]]  # around reads of files: a node's first rank before the others


@dataclass(frozen=True)
class PlacedRun(PlacedModel):
    """A run whose model is placed on its ranks, with what was read for that."""

    folder: Path  # of the config; in a Job that is no rehearsal's, of the weights
    tokenizer: PreTrainedTokenizerBase
    tokenizer_folder: Path


@dataclass(frozen=True)
class Job(PlacedRun):
    """A run that is ready to begin: its objective, data and steps, and the predictions for it."""

    objective: Objective
    documents: Documents
    held_out: Documents | None
    prompts: Prompts
    batching: Batching
    loader: Loader
    steps: int
    peak: Peak | None
    no_plan_reason: str  # the reason why there is no peak
    forecast: dict[str, float | int]  # predicted metrics


def place_run(recipe: Recipe, world: World, in_turn: InTurn = nullcontext) -> PlacedRun:
    """Returns `recipe` placed on `world`, whose device computes attention by the implementation for it from then on.
    Reads configs and the tokenizer; fetches nothing large. Raises RecipeError where one of them, a local weights file
    or the optimizer's package is missing or broken, recipe, device, model and mesh contradict each other, or ranks
    would compute attention by different implementations."""
    recipe = resolve_precision(recipe, world.device_type)
    with in_turn():
        _check_optimizer(recipe.optim.name, world)
        folder, tokenizer_at = config_folder(recipe.model), tokenizer_folder(recipe.model)
        config = _read_config(recipe.model, folder, recipe.data.max_length, "model.path")
        tokenizer = load_tokenizer(tokenizer_at, "model.tokenizer", recipe.data.chat_template)
        check_vocabulary(tokenizer, config)
        teacher = None
        if path := recipe.distill.teacher:
            teacher_folder = config_folder(recipe.distill.model, KEY)
            teacher = _read_config(recipe.distill.model, teacher_folder, recipe.data.max_length, KEY)
            check_teacher(path, teacher, load_tokenizer(teacher_folder, KEY), tokenizer)
    if dist.is_initialized():  # a second on one rank, not on each
        remember(config, broadcast_from_main(lambda: check_family(config)))
    placed = place_model(recipe, world, config, teacher)
    if world.device:
        _switch_flash(placed, world.device)
    return PlacedRun(**vars(placed), folder=folder, tokenizer=tokenizer, tokenizer_folder=tokenizer_at)


def _read_config(model: Model, folder: Path, max_length: int, what: str) -> PreTrainedConfig:
    """Returns the config in `folder`, of the model that the recipe key `what` names. Raises RecipeError where it cannot
    be trained, or a local weights file is missing or broken at its beginning."""
    check_weights(model, folder)
    return load_config(model, folder, max_length, what)


def _check_optimizer(name: str, world: World) -> None:
    """Raises RecipeError, which names this rank and its host, where a package that the optimizer needs is missing."""
    try:
        if needs := OPTIMIZERS[name].needs:
            needs(world.device_type)
    except RecipeError as error:
        place = f"rank {world.rank} on {socket.gethostname()}: " * (world.device is not None)
        raise RecipeError(f"{place}{error}") from error


def _switch_flash(placed: PlacedModel, device: torch.device) -> None:
    """Switches torch's flash attention, before its first call, to the implementation for a model on `device`."""
    largest = max(head_size(config) for config in (placed.config, placed.teacher) if config)
    name = choose_flash(placed.attention.name, largest, device, placed.recipe.train.deterministic)
    if reason := use_flash(name):
        print_line(f"warning  {name} is installed, but torch cannot use it ({reason}); attention runs by FA2")
    if dist.is_initialized():
        check_same_on_all_ranks({"flash attention": current_flash()})


def prepare_job(placed: PlacedRun, in_turn: InTurn = nullcontext, day: str = "") -> Job:
    """Returns the job of a placed run: weights on this node (not for a rehearsal), every row of the data, and
    predictions. `day`: that its chat template reads (empty: today). Raises RecipeError where one is missing or
    contradicts the others."""
    recipe, world, config, layout = placed.recipe, placed.world, placed.config, placed.layout
    tokenizer, folder, sequences = placed.tokenizer, placed.folder, recipe.sequences
    micros = recipe.train.gradient_accumulation_steps
    recipe = _with_day(recipe, tokenizer, day)
    with in_turn():
        parts = documents, held_out = build_documents(recipe.data, tokenizer, placed.tokenizer_folder, sequences)
        prompts = build_prompts(recipe, config, tokenizer, folder, held_out or documents)
        if world.device:  # last: a row that cannot be trained is refused before weights are fetched
            folder = model_folder(recipe.model)
    if dist.is_initialized():
        _check_same_files(recipe, tokenizer, parts, folder)
    place = layout.data_rank(world.rank)
    of_rows: dict[str, Any] = {"sequences": sequences, "marks_padding": any(layout.balanced) or any(layout.counted)}
    batching = choose_batching(recipe.data, recipe.train, place, world.device_type, *parts, **of_rows)
    loader = Loader(documents, batching, micros, recipe.train.seed)
    steps = recipe.train.steps or math.ceil(recipe.train.epochs * len(documents.rows) / loader.rows_per_step)
    peak, no_plan_reason = None, ""
    forecast: dict[str, float | int] = {}

    def look_ahead() -> tuple[Peak, dict[str, float | int]]:
        check_host(placed, documents)
        speed = predict_perf_metrics(layout, config, recipe, placed.flops, documents.mean_length, world.device_name)
        return predict_peak(layout, config, recipe), speed

    try:
        if dist.is_initialized():  # one rank measures blocks: half of what a small run computes
            known = broadcast_from_main(lambda: (look_ahead(), KNOWN_BLOCKS)[1])
            for known_here, theirs in zip(KNOWN_BLOCKS, known, strict=True):
                known_here.update(theirs)
        peak, forecast = look_ahead()
    except Unmeasured as error:  # a model that cannot be planned can be trained
        no_plan_reason = str(error)
    forecast |= predict_memory_metrics(layout, recipe.optim.name, asdict(peak) if peak else {}, micros)
    coefficient = recipe.train.router_aux_loss_coef
    objective = build_objective(recipe.method, recipe.preference, recipe.distill, coefficient)
    data: dict[str, Any] = {"folder": folder, "documents": documents, "held_out": held_out, "prompts": prompts}
    how = data | {"objective": objective, "batching": batching, "loader": loader, "steps": steps}
    outlook = {"peak": peak, "no_plan_reason": no_plan_reason, "forecast": forecast}
    return Job(**vars(placed) | {"recipe": recipe} | how | outlook)


def _check_same_files(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    parts: tuple[Documents, Documents | None],
    folder: Path,
) -> None:
    """Raises RecipeError where machines have unlike copies of rows, tokenizer or weights: they would train on a mixture
    of two orders, or take unlike numbers of steps. Collective."""
    rows = zip(("data.train", "data.eval or data.eval_size"), parts, strict=True)
    facts = {name: f"{len(each.rows)} rows of {each.digest}" for name, each in rows if each}
    facts["the tokenizer, or its chat template,"] = digest_tokenizer(tokenizer)[:16]
    named = {"model.path": str(folder), "lora.adapter": recipe.lora.adapter, "distill.teacher": recipe.distill.teacher}
    for key, place in named.items():
        if place and Path(place).is_dir():
            facts[f"what is in {key}"] = digest_ends(Path(place))[:16]
    check_same_on_all_ranks(facts, "has other files than rank 0; copy them, so that all machines have the same")


def _with_day(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, day: str) -> Recipe:
    """Returns the recipe with the day that the chat template reads, where it reads one and the recipe says none: the
    same on all ranks, and after each restart."""
    if recipe.data.chat_template_date or CLOCK not in str(tokenizer.chat_template):
        return recipe
    changed: Recipe = with_settings(recipe, {"data.chat_template_date": day or f"{date.today()}"})
    return changed


def check_host(placed: PlacedModel, documents: Documents) -> None:
    """Raises RecipeError, with the smallest change that fits, where a step of this CPU's ranks is predicted to take
    more memory than the machine has to give: the kernel would end a rank in mid-run, and say nothing."""
    ranks, lengths = placed.world.ranks_per_node, column(documents.encoded, "length")
    if placed.world.device_type != "cpu" or not Path("/proc/meminfo").exists():
        return
    longest = int(lengths.sum() if placed.recipe.data.packing else lengths.max())  # rows may be shorter than they could
    rows = {"data.max_length": min(placed.recipe.data.max_length, max(1, longest // placed.recipe.sequences))}
    recipe, room = with_settings(placed.recipe, rows), HOST_ROOM * available_memory() / ranks
    peak = predict_fullest(placed.layout, placed.config, recipe).total
    if peak <= room:
        return
    change = smallest_change(placed.layout, placed.config, recipe, room, has_more=False)
    raise RecipeError(
        f"a step takes {peak / GB:.1f} GB on each of {ranks} ranks here, and this machine has {room / GB:.1f} GB for "
        "each; " + (f"the smallest change that fits: {change}" if change else NONE_FITS)
    )
