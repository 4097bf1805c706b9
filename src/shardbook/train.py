"""The story of a run: rank 0 looks at its recipe (`main`); then prepare it, build it, start it, and the loop.

Start it through a launcher (`shardbook train`, torchrun, accelerate launch) or alone as a world of one:
`python -m shardbook.train RECIPE [section.key=value ...]`. A feature enters here as one call; if it needs a branch in
the loop, it belongs in a module.
"""

if __name__ == "__main__":  # before torch is imported, which takes seconds: a request to stop counts already
    from shardbook.ranks.signals import begin_rank

    begin_rank()

import sys
from functools import partial
from pathlib import Path

import torch

from shardbook.optim import learning_rate, set_learning_rate
from shardbook.optim.clip import clip_gradients
from shardbook.parallel.placement import World
from shardbook.parallel.router_bias import balance_routers
from shardbook.parallel.step import run_step
from shardbook.ranks.distributed import (
    Ranks,
    broadcast_from_main,
    check_same_on_all_ranks,
    local_main_process_first,
    watch_steps,
)
from shardbook.ranks.exits import DONE, exit_rank
from shardbook.ranks.process_env import use_deterministic
from shardbook.ranks.progress import PROGRESS
from shardbook.ranks.signals import StopFlag
from shardbook.recipe import Recipe, RecipeError, find_recipe, flatten_recipe, load_recipe
from shardbook.run.build import allocate_state, build_sharded
from shardbook.run.checkpoint.format import TrainState, newest_checkpoint
from shardbook.run.checkpoint.save import Saver, predict_bytes
from shardbook.run.directory import environment, find_run, open_everywhere
from shardbook.run.eval.observer import Observer
from shardbook.run.eval.reference import Reference
from shardbook.run.job_summary import describe_job
from shardbook.run.log.console import Console
from shardbook.run.log.step_log import StepLog
from shardbook.run.out_of_memory import OomGuard
from shardbook.run.prefetch import BatchPrefetcher
from shardbook.run.preflight import preflight
from shardbook.run.prepare import place_run, prepare_job
from shardbook.run.profile import Profile
from shardbook.run.rank import guard, with_ranks
from shardbook.run.result.export import export_result
from shardbook.run.result.hub import push_if_asked
from shardbook.run.sdc_check import SdcCheck
from shardbook.run.start import start_from
from shardbook.run.step_flags import StepFlags
from shardbook.run.synchronized_gc import synchronized_gc


def train(recipe: Recipe, recipe_path: Path, ranks: Ranks) -> int:
    """Runs `recipe`, which the preflight let in, to its last step, or until it is asked to stop. Returns the exit code,
    DONE or PREEMPTED."""
    console, in_turn = Console(ranks.is_main), partial(local_main_process_first, ranks)
    check_same_on_all_ranks(environment() | flatten_recipe(recipe) | {"ranks of a node": ranks.ranks_per_node})
    use_deterministic(recipe.train.deterministic)
    torch.manual_seed(recipe.train.seed + ranks.rank)  # for lora_dropout: each rank drops other elements
    stop = StopFlag().listen()

    # Config -> meta model -> layout: a wrong recipe is refused here, before anything large is fetched or built.
    placed = place_run(recipe, World(ranks.world_size, ranks.ranks_per_node, ranks.rank, ranks.device), in_turn)
    recipe = placed.recipe

    # The run's newest checkpoint; then weights on this node, tokenizer and data; then the run's directory.
    run, newest = broadcast_from_main(lambda: find_run(recipe, recipe_path))
    console.print(f"run      {run.path}")
    job = prepare_job(placed, in_turn, run.day)
    if run.finished_steps >= job.steps:
        more = f"raise train.steps above {run.finished_steps}, or " * run.is_saved(newest)
        console.print(f"done     this run has finished its {run.finished_steps} steps; {more}choose another run.name")
        return DONE
    open_everywhere(run, job.steps, newest, job.recipe, predict_bytes(job))
    console.show(describe_job(job))

    # Model and optimizer; then the start: the newest checkpoint, else the recipe's, else pretrained or random weights.
    sharded = build_sharded(job, ranks.device)
    oom_guard = OomGuard(job, sharded)
    with oom_guard:
        seed = recipe.train.seed
        optimizer = oom_guard.optimizer = allocate_state(job.model, sharded, recipe.optim, ranks.device, seed)
        reference = Reference(job, run.path, ranks, console, stop)
        state, source = start_from(newest, job, sharded, optimizer, reference)
    if reference.stopped:
        return console.show_stopped(run.name, newest_checkpoint(run.checkpoints), state.step, job.steps)
    console.print(f"weights  {source}, at step {state.step} of {job.steps}")
    if ranks.is_main:
        run.record(recipe_path, job.recipe, {"world_size": ranks.world_size, "mesh": job.layout.mesh})

    log = StepLog(job, run, sharded, optimizer, state, ranks, console, stop)
    observer = Observer(job, sharded, reference.attach(), ranks, log, console)
    saver = Saver(run, job, sharded, optimizer, log, state.step)
    sdc_check = SdcCheck(recipe.train.check_steps, sharded, ranks, state.step + 1)
    shown, profile = console.start(state.step, job.steps), Profile(run.path, recipe.train.profile_steps, ranks.rank)
    watch, gc_in_step = watch_steps(ranks, recipe.run.hang_seconds, log.warmup_steps), synchronized_gc()
    with shown, profile, oom_guard, saver, log, watch as finish_step, gc_in_step as collect:
        if state.step == 0:
            observer.after(0)
        batches = BatchPrefetcher(job.loader, StepFlags(stop, saver))
        for step, batch in enumerate(batches.next_steps(job.steps - state.step), state.step + 1):
            profile.advance(step)
            log.begin(batch)
            rate = set_learning_rate(optimizer, learning_rate(recipe.optim, step, job.steps))
            loss = job.objective.with_totals(batch.totals, sharded.sum_slices)
            sdc_check.before(step, batch.micros[0], loss)
            terms = run_step(sharded, batch.micros, loss, ranks.device, PROGRESS.mark)
            norm = clip_gradients(sharded.gradients, recipe.optim.max_grad_norm)
            optimizer.step()
            state = TrainState(step, state.tokens + int(batch.totals.tokens), job.loader.state_dict())
            batches.prefetch()
            collect(step)  # while a device still computes
            balance_routers(sharded)
            log.end(state, terms, norm, rate)  # measures gradients' bytes: before zero_grad
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


def main(words: list[str] | None = None) -> int:
    """Runs one rank: `python -m shardbook.train RECIPE [section.key=value ...]`. Returns the exit code."""

    def story() -> int:
        given = sys.argv[1:] if words is None else words
        if not given:
            raise RecipeError("no recipe: python -m shardbook.train RECIPE [section.key=value ...]")
        path = find_recipe(given[0])
        recipe = load_recipe(path, given[1:])
        return with_ranks(recipe, partial(preflight, recipe, path.stem), partial(train, recipe, path))

    return guard(story)


if __name__ == "__main__":
    exit_rank(main())
