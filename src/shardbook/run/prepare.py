"""The set-up of a run: computes, and refuses, everything that can be known before anything large is allocated.

Invariant: the same two calls prepare `shardbook train` and its rehearsal, so a dry run shows what a run does.
`lay_out_run` needs the model's config alone; `prepare_job` reads the tokenizer and the data and, on the ranks of a run,
fetches the weights to this node.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from shardbook.data.encoding import digest_tokenizer, load_tokenizer
from shardbook.data.loader import Batching, Loader, choose_batching
from shardbook.data.template import CLOCK
from shardbook.data.tokenized import Documents, build_documents, check_vocabulary, column
from shardbook.memory.host_state import available_memory
from shardbook.model.attention import head_size
from shardbook.model.causal_lm import Flops, count_flops
from shardbook.model.families import load_config
from shardbook.model.flash import choose_flash, current_flash, use_flash
from shardbook.model.hub import config_folder, model_folder, tokenizer_folder
from shardbook.model.placement import PlacedModel, World, place_model
from shardbook.model.selfcheck import check_family, remember
from shardbook.model.weight_files import digest_ends
from shardbook.objectives import Objective, build_objective
from shardbook.plan.formulas import predict_memory_metrics
from shardbook.plan.hardware import HOST_ROOM
from shardbook.plan.measure_blocks import KNOWN_BLOCKS, Unmeasured
from shardbook.plan.peak import GB, Peak, predict_fullest, predict_peak
from shardbook.plan.smallest_change import NONE_FITS, smallest_change
from shardbook.plan.speed import predict_perf_metrics
from shardbook.ranks.distributed import broadcast_from_main, check_same_on_all_ranks
from shardbook.recipe import Recipe, RecipeError, resolve_precision, with_settings
from shardbook.run.directory import first_day
from shardbook.run.load_teacher import load_teacher
from shardbook.run.prompts import Prompts, build_prompts
from shardbook.terminal import print_line

InTurn = Callable[[], AbstractContextManager[None]]  # around reads of files: a node's first rank before the others


@dataclass(frozen=True)
class Job(PlacedModel):
    """A run that is ready to begin: its objective, data and steps, and the predictions for it."""

    objective: Objective
    folder: Path  # of the weights; in a rehearsal, of the config
    tokenizer: PreTrainedTokenizerBase
    documents: Documents
    held_out: Documents | None
    prompts: Prompts
    batching: Batching
    loader: Loader
    steps: int
    flops: Flops
    peak: Peak | None
    no_plan_reason: str  # the reason why there is no peak
    forecast: dict[str, float | int]  # predicted metrics


def lay_out_run(recipe: Recipe, world: World, in_turn: InTurn = nullcontext) -> PlacedModel:
    """Returns `recipe` laid out on `world`, whose device computes attention by the implementation for it from then on.
    Fetches nothing large. Raises RecipeError where recipe, device, model and mesh contradict each other, or ranks
    would compute attention by different ones."""
    recipe = resolve_precision(recipe, world.device_type)
    with in_turn():
        config = load_config(recipe.model, config_folder(recipe.model), recipe.data.max_length)
    if dist.is_initialized():  # a second on one rank, not on each
        remember(config, broadcast_from_main(lambda: check_family(config)))
    with in_turn():
        teacher = load_teacher(recipe)
    laid = place_model(recipe, world, config, teacher)
    if world.device:
        _switch_flash(laid, world.device)
    return laid


def _switch_flash(laid: PlacedModel, device: torch.device) -> None:
    """Switches torch's flash attention, before its first call, to the implementation for a model on `device`."""
    largest = max(head_size(config) for config in (laid.config, laid.teacher) if config)
    name = choose_flash(laid.attention.name, largest, device, laid.recipe.train.deterministic)
    if reason := use_flash(name):
        print_line(f"warning  {name} is installed, but torch cannot use it ({reason}); attention runs by FA2")
    if dist.is_initialized():
        check_same_on_all_ranks({"flash attention": current_flash()})


def prepare_job(
    laid: PlacedModel, in_turn: InTurn = nullcontext, run: Path | None = None, checkpoint: Path | str = ""
) -> Job:
    """Returns the job of a run that is laid out: weights on this node (not for a rehearsal), tokenizer, every row of
    the data, and predictions. `run`: its directory; `checkpoint`: that it begins with. Raises RecipeError where one is
    missing or contradicts the others."""
    recipe, world, config, layout = laid.recipe, laid.world, laid.config, laid.layout
    day = (
        broadcast_from_main(lambda: first_day(run, checkpoint)) if dist.is_initialized() else first_day(run, checkpoint)
    )
    sequences, micros = recipe.sequences, recipe.train.gradient_accumulation_steps
    with in_turn():
        tokenizer_at = tokenizer_folder(recipe.model)
        tokenizer = load_tokenizer(tokenizer_at, "model.tokenizer", recipe.data.chat_template)
        check_vocabulary(tokenizer, config)
        recipe = _with_day(recipe, tokenizer, day)
        parts = documents, held_out = build_documents(recipe.data, tokenizer, tokenizer_at, sequences)
        folder = config_folder(recipe.model)
        prompts = build_prompts(recipe, config, tokenizer, folder, held_out or documents)
        if world.device:  # last: a row that cannot be trained is refused before weights are fetched
            folder = model_folder(recipe.model)
    if dist.is_initialized():
        _check_same_files(recipe, tokenizer, parts, folder)
    place = layout.data_rank(world.rank)
    batching = choose_batching(recipe.data, recipe.train, place, world.device_type, *parts, sequences=sequences)
    loader = Loader(documents, batching, micros, recipe.train.seed)
    steps = recipe.train.steps or math.ceil(recipe.train.epochs * len(documents.rows) / loader.rows_per_step)
    flops, peak, no_plan_reason = count_flops(laid.model), None, ""
    forecast: dict[str, float | int] = {}

    def look_ahead() -> tuple[Peak, dict[str, float | int]]:
        check_host(laid, documents)
        speed = predict_perf_metrics(layout, config, recipe, flops, documents.mean_length, world.device_name)
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
    objective = build_objective(recipe.method, recipe.preference, recipe.distill)
    data = {"folder": folder, "tokenizer": tokenizer, "documents": documents, "held_out": held_out, "prompts": prompts}
    how: dict[str, Any] = data | {"objective": objective, "batching": batching, "loader": loader, "steps": steps}
    outlook: dict[str, Any] = {"peak": peak, "no_plan_reason": no_plan_reason, "forecast": forecast}
    return Job(**vars(laid) | {"recipe": recipe}, **how, **outlook, flops=flops)


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
    changed: Recipe = with_settings(recipe, {"data.chat_template_date": day})
    return changed


def check_host(laid: PlacedModel, documents: Documents) -> None:
    """Raises RecipeError, with the smallest change that fits, where a step of this CPU's ranks is predicted to take
    more memory than the machine has to give: the kernel would end a rank in mid-run, and say nothing."""
    ranks, lengths = laid.world.ranks_per_node, column(documents.encoded, "length")
    if laid.world.device_type != "cpu" or not Path("/proc/meminfo").exists():
        return
    longest = int(lengths.sum() if laid.recipe.data.packing else lengths.max())  # rows may be shorter than they could
    rows = {"data.max_length": min(laid.recipe.data.max_length, max(1, longest // laid.recipe.sequences))}
    recipe, room = with_settings(laid.recipe, rows), HOST_ROOM * available_memory() / ranks
    peak = predict_fullest(laid.layout, laid.config, recipe).total
    if peak <= room:
        return
    change = smallest_change(laid.layout, laid.config, recipe, room, has_more=False)
    raise RecipeError(
        f"a step takes {peak / GB:.1f} GB on each of {ranks} ranks here, and this machine has {room / GB:.1f} GB for "
        "each; " + (f"the smallest change that fits: {change}" if change else NONE_FITS)
    )
