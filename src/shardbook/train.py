"""The story of a run: prepare it, build it, start it, then the loop.

Start it through a launcher (`shardbook train`, torchrun, accelerate launch) or alone as a world of one:
`python -m shardbook.train RECIPE [section.key=value ...]`. A feature enters here as one call; if it needs a branch in
the loop, it belongs in a module.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from shardbook.memory.activation import apply_checkpointing
from shardbook.memory.block_inputs import send_inputs
from shardbook.memory.host_adamw import materialize_state
from shardbook.model.causal_lm import apply_compile
from shardbook.model.laid_out import World
from shardbook.optim import clip_gradients, learning_rate, set_learning_rate
from shardbook.parallel.mesh import build_mesh
from shardbook.parallel.pipeline import run_step
from shardbook.parallel.sharding import ShardedModel, apply_stage
from shardbook.ranks.distributed import (
    Ranks,
    check_same_on_all_ranks,
    local_main_process_first,
    start_distributed,
    stop_distributed,
    sum_over_ranks,
    watch_steps,
)
from shardbook.ranks.exits import DONE, FAILED, PREEMPTED, WRONG, exit_rank, report_error
from shardbook.ranks.progress import PROGRESS
from shardbook.ranks.settings import use_deterministic
from shardbook.ranks.signals import StopFlag, asked_early
from shardbook.recipe import Recipe, RecipeError, find_recipe, flatten_recipe, load_recipe
from shardbook.run.checkpoint.format import TrainState, newest_checkpoint
from shardbook.run.checkpoint.save import Saver, predict_bytes
from shardbook.run.console import Console
from shardbook.run.directory import environment, find_everywhere, open_everywhere
from shardbook.run.evaluation import Observer
from shardbook.run.export import export_result
from shardbook.run.garbage import synchronized_gc
from shardbook.run.meter import Meter
from shardbook.run.out_of_memory import OomGuard
from shardbook.run.prefetch import BatchPrefetcher
from shardbook.run.prepare import Job, lay_out_run, prepare_job
from shardbook.run.profile import Profile
from shardbook.run.push import push_if_asked
from shardbook.run.reference import Reference
from shardbook.run.start import start_from


def train(recipe: Recipe, recipe_path: Path, ranks: Ranks) -> int:
    """Runs `recipe` to its last step, or until it is asked to stop. Returns the exit code, DONE or PREEMPTED."""
    console, in_turn = Console(ranks.is_main), partial(local_main_process_first, ranks)
    check_same_on_all_ranks(environment() | flatten_recipe(recipe) | {"ranks of a node": ranks.ranks_per_node})
    use_deterministic(recipe.train.deterministic)
    torch.manual_seed(recipe.train.seed + ranks.rank)  # for lora_dropout: each rank drops other elements
    stop = StopFlag().listen()

    # Config -> meta model -> layout: a wrong recipe is refused here, before anything large is fetched or built.
    laid = lay_out_run(recipe, World(ranks.world_size, ranks.ranks_per_node, ranks.rank, ranks.device), in_turn)
    recipe = laid.recipe

    # The run's newest checkpoint; then weights on this node, tokenizer and data; then the run's directory.
    run, newest = find_everywhere(recipe.run, recipe_path)
    console.print(f"run      {run.path}")
    job = prepare_job(laid, in_turn, run.path, newest or recipe.train.resume_from_checkpoint)
    if run.finished_steps >= job.steps:
        more = f"raise train.steps above {run.finished_steps}, or " * run.is_saved(newest)
        console.print(f"done     this run has finished its {run.finished_steps} steps; {more}choose another run.name")
        return DONE
    open_everywhere(run, job.steps, newest, job.recipe, predict_bytes(job))
    console.show_job(job)

    # Model and optimizer; then the start: the newest checkpoint, else the recipe's, else pretrained or random weights.
    sharded = build(job, ranks.device)
    oom_guard = OomGuard(job, sharded)
    with oom_guard:
        seed = recipe.train.seed
        optimizer = oom_guard.optimizer = materialize_state(job.model, sharded, recipe.optim, ranks.device, seed)
        reference = Reference(job, run.path, ranks, console, stop)
        state, source = start_from(newest, job, sharded, optimizer, reference)
    if reference.stopped:
        return console.show_stopped(run.name, newest_checkpoint(run.checkpoints), state.step, job.steps)
    console.print(f"weights  {source}, at step {state.step} of {job.steps}")
    if ranks.is_main:
        run.record(recipe_path, job.recipe, {"world_size": ranks.world_size, "mesh": job.layout.mesh})

    meter = Meter(job, run, sharded, optimizer, state, ranks, console, stop)
    observer = Observer(job, sharded, reference.attach(), ranks, meter, console)
    saver = Saver(run, job, sharded, optimizer, meter, state.step)
    profile = Profile(run.path, recipe.train.profile_steps, ranks.rank)
    shown = console.start(state.step, job.steps)
    watch, gc_in_step = watch_steps(ranks, recipe.run.hang_seconds, meter.first_steps), synchronized_gc()
    with shown, profile, oom_guard, meter, watch as finish_step, gc_in_step as collect:
        if state.step == 0:
            observer.after(0)
        batches = BatchPrefetcher(job.loader, stop, saver.flags, saver.take_flag_sums)
        meter.start(batches.take_wait)
        for step, batch in enumerate(batches.next_steps(job.steps - state.step), state.step + 1):
            profile.advance(step)
            meter.begin(batch.work)
            rate = set_learning_rate(optimizer, learning_rate(recipe.optim, step, job.steps))
            loss = job.objective.with_totals(batch.totals)
            meter.check_results(step, batch.micros[0], loss)
            terms = run_step(sharded, batch.micros, loss, ranks.device, PROGRESS.mark)
            norm = clip_gradients(sharded.gradients, recipe.optim.max_grad_norm)
            optimizer.step()
            state = TrainState(step, state.tokens + int(batch.totals.tokens), job.loader.state_dict())
            batches.prefetch()
            collect(step)  # while a device still computes
            meter.finish(state, terms, norm, rate, saver.is_due(step))  # counts gradients' bytes: before zero_grad
            optimizer.zero_grad()
            observer.after(step)
            saver.after(state)
            finish_step(step)

    stopped = state.step < job.steps
    with oom_guard:
        saver.finish(state, stopped)
    if stopped:
        return console.show_stopped(run.name, newest_checkpoint(run.checkpoints), state.step, job.steps)
    if recipe.train.export:
        export_result(run.export, sharded, recipe, job.config, job.tokenizer, job.folder, ranks.is_main)
        console.print(f"export   {run.export}")
    if ranks.is_main:
        run.finish(job.steps)
        push_if_asked(run.path, recipe.train, console)
    console.print(f"done     {job.steps} steps, {state.tokens:,} trained tokens")
    return DONE


def build(job: Job, device: torch.device) -> ShardedModel:
    """Applies checkpointing -> compile -> stage in place: compile sees recomputed blocks, the stage compiled ones."""
    activation, model = job.recipe.activation, job.model
    recomputed = apply_checkpointing(model.all_blocks, activation, job.recipe.lora.lora_dropout > 0)
    send_inputs(model, recomputed, job.recipe.offload)
    if job.recipe.train.compile:
        apply_compile(model)
    return apply_stage(model, job.layout, build_mesh(job.layout.sizes, device.type))


def main(words: list[str] | None = None) -> int:
    """Runs one rank: `python -m shardbook.train RECIPE [section.key=value ...]`. Returns the exit code."""

    def story() -> int:
        given = sys.argv[1:] if words is None else words
        if not given:
            raise RecipeError("no recipe: python -m shardbook.train RECIPE [section.key=value ...]")
        path = find_recipe(given[0])
        recipe = load_recipe(path, given[1:])
        ranks = start_distributed(recipe.run.lost_seconds, recipe.run.hang_seconds)
        if sum_over_ranks(asked_early())[0]:
            Console(ranks.is_main).print("stopped  before anything was built; run the same command again")
            code = PREEMPTED
        else:
            code = train(recipe, path, ranks)
        stop_distributed(ranks)
        return code

    return guard(story)


def guard(story: Callable[[], int]) -> int:
    """Returns the exit code of a rank's `story`; of one that fails the code of its error, whose reason is printed."""
    try:
        return story()
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error, WRONG if isinstance(error, RecipeError) else FAILED)


if __name__ == "__main__":
    exit_rank(main())
