"""The story of a run: build everything in order, then the loop.

Start it through a launcher (`shardbook train`, torchrun, accelerate launch) or alone as a world of one:
`python -m shardbook.train RECIPE [section.key=value ...]`. A feature enters here as one call; if it needs a branch in
the loop, it belongs in a module.
"""

import math
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from shardbook.comm.ledger import Ledger, add_traffic, first_steps
from shardbook.data.loader import Loader, choose_batching
from shardbook.data.tokenized import build_documents, check_vocabulary, load_tokenizer
from shardbook.memory.activation import apply_checkpointing
from shardbook.memory.block_inputs import send_inputs
from shardbook.memory.offload import settle
from shardbook.model.adapters import build_adapted
from shardbook.model.attention import choose_attention
from shardbook.model.causal_lm import apply_compile, count_flops
from shardbook.model.families import load_config
from shardbook.model.hub import config_folder, model_folder, tokenizer_folder
from shardbook.objectives import build_objective
from shardbook.optim import check_optimizer, clip_gradients, learning_rate, set_learning_rate
from shardbook.parallel.layout import DTYPES, build_layout
from shardbook.parallel.mesh import build_mesh
from shardbook.parallel.pipeline import run_step
from shardbook.parallel.sharding import apply_stage
from shardbook.plan.axes import axes_traffic
from shardbook.plan.formulas import predict_memory_metrics, predict_traffic
from shardbook.plan.peak import predict_peak
from shardbook.plan.speed import predict_perf_metrics
from shardbook.ranks.distributed import (
    Ranks,
    StopFlag,
    broadcast_from_main,
    check_alike,
    leave_hangs_in,
    local_main_process_first,
    start_distributed,
    stop_distributed,
    watch_steps,
)
from shardbook.ranks.exits import DONE, FAILED, WRONG, RunFailed, exit_rank, report_error
from shardbook.ranks.progress import marked
from shardbook.ranks.settings import use_deterministic
from shardbook.recipe import Recipe, RecipeError, find_recipe, flatten_recipe, load_recipe, resolve_precision
from shardbook.run.ahead import StepsAhead
from shardbook.run.checkpoint import TrainState, newest_checkpoint, save_checkpoint
from shardbook.run.console import Console
from shardbook.run.directory import check_shared, environment, open_run
from shardbook.run.evaluation import evaluate
from shardbook.run.export import export_result
from shardbook.run.garbage import collected_together
from shardbook.run.generate import Samples, build_prompts
from shardbook.run.metrics import Metrics, Pace, Recorder, memory_metrics, peak_metrics
from shardbook.run.out_of_memory import OutOfMemory
from shardbook.run.profile import Profile
from shardbook.run.reference import Reference
from shardbook.run.rows import Part, Rows
from shardbook.run.start import start_from
from shardbook.run.teacher import load_teacher
from shardbook.run.trackers import flat_config


def train(recipe: Recipe, recipe_path: Path, ranks: Ranks) -> int:
    """Run `recipe` to its last step, or until it is asked to stop. Returns the exit code, DONE or PREEMPTED."""
    # Config -> meta model -> layout, refused here before anything large is fetched or built.
    console = Console(ranks.is_main)
    recipe = resolve_precision(recipe, ranks.device.type)
    check_alike(environment() | flatten_recipe(recipe) | {"ranks of a node": ranks.ranks_per_node})
    check_optimizer(recipe.optim, ranks.device.type)
    use_deterministic(recipe.train.deterministic)
    torch.manual_seed(recipe.train.seed + ranks.rank)  # of lora_dropout: each rank drops its own
    objective = build_objective(recipe.method, recipe.preference, recipe.distill)
    stop = StopFlag().listen()
    with local_main_process_first(ranks):
        config = load_config(recipe.model, config_folder(recipe.model), recipe.data.max_length)
        teacher = load_teacher(recipe)
    attention = choose_attention(recipe.model.attention, config, ranks.device, DTYPES[recipe.precision.params])
    model = build_adapted(recipe, config, attention, teacher, ranks.rank, ranks.world_size)
    world = (ranks.world_size, ranks.ranks_per_node)
    layout = build_layout(recipe.parallel, recipe.precision, model, model.parts, model.blocks, *world, recipe.offload)

    # The directory, and what this run goes on from.
    run = broadcast_from_main(lambda: open_run(recipe.run, recipe_path))
    check_shared(run)
    leave_hangs_in(run.path / "hang")
    newest = broadcast_from_main(lambda: newest_checkpoint(run.checkpoints))
    console.print(f"run      {run.path}")

    # Weights on this node, tokenizer and data.
    with local_main_process_first(ranks):
        folder, tokenizer_at = model_folder(recipe.model), tokenizer_folder(recipe.model)
        tokenizer = load_tokenizer(tokenizer_at, "model.tokenizer", recipe.data.chat_template)
        check_vocabulary(tokenizer, config)
        parts = documents, held_out = build_documents(recipe.data, tokenizer, tokenizer_at, recipe.sequences)
        prompts = build_prompts(recipe, config, tokenizer, folder, held_out or documents)
    console.show_data(*parts)
    place = layout.data_rank(ranks.rank)
    batching = choose_batching(recipe.data, recipe.train, place, ranks.device.type, *parts, sequences=recipe.sequences)
    loader = Loader(documents, batching, recipe.train.gradient_accumulation_steps, recipe.train.seed)
    steps = recipe.train.steps or math.ceil(recipe.train.epochs * len(documents.rows) / loader.rows_per_step)
    if run.finished_steps >= steps:
        more = "raise train.steps, or " * run.is_saved(newest)
        console.print(f"done     this run has finished its {run.finished_steps} steps; {more}choose another run.name")
        return DONE
    run.check_goes_on(steps, newest, recipe)

    # Checkpointing -> compile -> stage -> memory.
    peak = predict_peak(layout, config, recipe)
    predicted = predict_traffic(layout, loader.accumulation, recipe.optim.name, recipe.forwards, ranks.rank)
    forecast = predict_memory_metrics(layout, recipe.optim.name, asdict(peak), loader.accumulation)
    flops, on = count_flops(model), torch.cuda.get_device_name() if ranks.device.type == "cuda" else "CPU"
    forecast |= predict_perf_metrics(layout, config, recipe, flops, documents.mean_length, on)
    send_inputs(
        model, apply_checkpointing(model.model.layers, recipe.activation, recipe.lora.lora_dropout > 0), recipe.offload
    )
    if recipe.train.compile:
        apply_compile(model)
    recomputed = recipe.activation.checkpointing + ", compiled" * recipe.train.compile
    console.show_layout(layout, attention, recomputed, peak, loader, steps)
    console.show_forecast(forecast)
    sharded = apply_stage(model, layout, build_mesh(layout.sizes, ranks.device.type))
    fits = OutOfMemory(sharded, config, recipe)
    with fits:
        optimizer = fits.optimizer = settle(model, sharded, recipe.optim, ranks.device)
        # Where to start: this run's newest checkpoint, else the recipe's, else pretrained weights, else random ones.
        reference = Reference(objective, recipe, loader, held_out, steps, run.path, ranks, console, stop)
        state, source = start_from(newest, recipe, sharded, optimizer, loader, folder, steps, reference)
    if reference.stopped:
        return console.show_stopped(run.name, newest_checkpoint(run.checkpoints), state.step, steps)
    held_out = reference.give()
    predicted = add_traffic(predicted, axes_traffic(layout, config, recipe, ranks.rank, loader.peek))
    saved_step = state.step
    console.print(f"weights  {source}, at step {state.step} of {steps}")

    if ranks.is_main:
        run.record(recipe_path, recipe, {"world_size": ranks.world_size, "mesh": layout.mesh})
    tracked = flat_config(flatten_recipe(recipe) | {"world_size": ranks.world_size}, layout.mesh)
    recorder = Recorder(run.path, run.name, recipe.run, tracked, ranks.is_main, state.step)
    profile = Profile(run.path, recipe.train.profile_steps, ranks.rank)
    first = first_steps(recipe.train.compile, layout.mesh)
    shown, watch = console.start(state.step, steps), watch_steps(ranks, recipe.run.hang_seconds, first)
    together, pace = collected_together(), Pace(ranks.world_size, flops, first)
    with (
        recorder,
        shown,
        profile,
        fits,
        Rows(recorder, console, objective.names("train"), pace, stop) as rows,
        Ledger(layout.groups(ranks.rank)) as ledger,
        watch as finish_step,
        together as collect,
    ):
        if held_out and state.step == 0:
            rows.log(0, [evaluate(sharded, objective, held_out, batching, ranks)])
        samples = Samples(recipe, prompts, tokenizer, sharded, ranks, steps, recorder, console)
        if state.step == 0:
            samples.take(0)
        ahead, kept = StepsAhead(loader, stop), Metrics()
        ledger.open()  # for one step; the others send the same
        pace.begin()
        while state.step < steps:
            step, row = state.step + 1, list[Part]()
            profile.advance(step)
            micros, totals, stops, work = ahead.take()  # counted on the host: the device is not waited for
            if stops:
                break
            pace.add(*work)
            rate = learning_rate(recipe.optim, step, steps)
            set_learning_rate(optimizer, rate)  # here: off the device a unit may be stepped in backward
            seen = torch.zeros(1 + len(objective.metrics), device=ranks.device)
            for shares in marked(run_step(sharded, micros, objective.of(totals), ranks.device), "micro-batch"):
                seen += shares
            norm = clip_gradients(sharded.gradients, recipe.optim.max_grad_norm)
            optimizer.step()
            state = TrainState(step, state.tokens + int(totals.tokens), loader.state_dict())
            ahead.begin()
            collect(step)  # a device is still computing
            if ledger.close():
                console.show_traffic(ledger.traffic, predicted)

            logs, saves = is_due(step, recipe.train.logging_steps), is_due(step, recipe.train.save_steps)
            if logs or saves or step == steps:
                # on a GPU read while the next step computes; what is not finite is never saved
                measured = rows.read(step, seen / layout.alike, norm)
            if logs:
                row = [measured, {"train/learning_rate": rate, "train/tokens": state.tokens}, pace.take()]
                kept = kept or memory_metrics(sharded, optimizer)  # the same in every step
                row += [kept, peak_metrics(), ahead.take_wait(), sharded.take_metrics()]
                row += [ledger.take_metrics(ranks.ranks_per_node, predicted, forecast)]
            optimizer.zero_grad()
            if held_out and (is_due(step, recipe.train.eval_steps) or step == steps):
                with rows.paused():
                    row += [evaluate(sharded, objective, held_out, batching, ranks)]
            rows.log(step, row)
            samples.take(step, rows.paused)
            if saves:
                with rows.paused():
                    save_checkpoint(run.checkpoints, sharded, optimizer, state, recipe.train.save_total_limit)
                saved_step = step
            finish_step(step)

    stopped = state.step < steps
    if state.step > saved_step and (recipe.train.save_steps or stopped):
        rows.read(state.step, seen / layout.alike, norm)()  # a step that was not logged was not looked at yet
        with fits:
            save_checkpoint(run.checkpoints, sharded, optimizer, state, recipe.train.save_total_limit)
    if stopped:
        return console.show_stopped(run.name, newest_checkpoint(run.checkpoints), state.step, steps)
    if recipe.train.export:
        export_result(run.export, sharded, recipe, config, tokenizer, folder, ranks.is_main)
        console.print(f"export   {run.export}")
    if ranks.is_main:
        run.finish(steps)
    console.print(f"done     {steps} steps, {state.tokens:,} trained tokens")
    return DONE


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def main(words: list[str] | None = None) -> int:
    """`python -m shardbook.train RECIPE [section.key=value ...]`: one rank. Returns the exit code."""
    words = sys.argv[1:] if words is None else words
    try:
        if not words:
            raise RecipeError("no recipe: python -m shardbook.train RECIPE [section.key=value ...]")
        path = find_recipe(words[0])
        recipe = load_recipe(path, words[1:])
        ranks = start_distributed(recipe.run.lost_seconds, recipe.run.hang_seconds)
        code = train(recipe, path, ranks)
    except (RecipeError, RunFailed) as error:
        return report_error(error, WRONG if isinstance(error, RecipeError) else FAILED)
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error, FAILED)
    stop_distributed(ranks)
    return code


if __name__ == "__main__":
    exit_rank(main())
