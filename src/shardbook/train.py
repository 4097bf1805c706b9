"""The story of a run: build everything in order, then the loop.

Start it through a launcher (`shardbook train`, torchrun, accelerate launch) or alone as a world of one:
`python -m shardbook.train RECIPE [section.key=value ...]`. A feature enters here as one call; if it needs a branch in
the loop, it belongs in a module.
"""

import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from shardbook.comm.ledger import Ledger
from shardbook.data.loader import Batching, Loader, Micro, eval_micros
from shardbook.data.tokenized import build_documents, check_vocabulary, load_tokenizer
from shardbook.memory.activation import apply_checkpointing
from shardbook.model.causal_lm import (
    CausalLM,
    apply_compile,
    build_model,
    flops_per_token,
    load_config,
    materialize,
    model_folder,
    tokenizer_folder,
)
from shardbook.model.weights import full_tensors, init_weights, load_weights, save_weights
from shardbook.objectives import OBJECTIVES, Objective
from shardbook.optim import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from shardbook.parallel.mesh import DP_SHARD, axis_groups, axis_sizes, build_mesh, data_rank
from shardbook.parallel.stages import apply_stage, check_stage, read_switches, reshard, set_schedule, start_carrying
from shardbook.parallel.units import Unit, choose_units
from shardbook.plan.formulas import predict_memory_metrics, predict_traffic
from shardbook.ranks.distributed import (
    Ranks,
    StopFlag,
    check_alike,
    first_on_node,
    from_main,
    start_distributed,
    stop_distributed,
    sum_over_ranks,
)
from shardbook.ranks.exits import DONE, FAILED, PREEMPTED, WRONG, RunFailed, exit_rank, report_error
from shardbook.recipe import Recipe, RecipeError, find_recipe, flatten_recipe, load_recipe, settle_precision
from shardbook.run.checkpoint import Progress, load_checkpoint, newest_checkpoint, save_checkpoint
from shardbook.run.console import Teller
from shardbook.run.directory import check_shared, environment, open_run
from shardbook.run.metrics import Metrics, Recorder, memory_metrics, read_loss, speed_metrics
from shardbook.run.trackers import flat_config


def train(recipe: Recipe, recipe_path: Path, ranks: Ranks) -> int:
    """Run `recipe` to its last step, or until it is asked to stop. Returns the exit code, DONE or PREEMPTED."""
    # The layout, and the directory that says what it was.
    tell = Teller(ranks.is_main)
    recipe = settle_precision(recipe, ranks.device.type)
    check_alike(environment() | flatten_recipe(recipe) | {"ranks of a node": ranks.ranks_per_node})
    torch.manual_seed(recipe.train.seed)
    objective = OBJECTIVES[recipe.method]
    stage = check_stage(recipe.parallel)
    mesh = build_mesh(recipe.parallel, stage.axes, ranks.world_size, ranks.device.type)
    sizes = axis_sizes(mesh)
    switches = read_switches(recipe.parallel, sizes[DP_SHARD], ranks.ranks_per_node)
    run = from_main(lambda: open_run(recipe.run, recipe_path))
    check_shared(run)
    newest = from_main(lambda: newest_checkpoint(run.checkpoints))
    stop = StopFlag().listen()
    tell.say(f"run      {run.path}")

    # Config, tokenizer and data, checked before anything large is built.
    with first_on_node(ranks):
        folder, tokenizer_at = model_folder(recipe.model), tokenizer_folder(recipe.model)
        config = load_config(recipe.model, folder, recipe.data.max_length)
        tokenizer = load_tokenizer(tokenizer_at, "model.tokenizer")
        check_vocabulary(tokenizer, config)
        documents, held_out = build_documents(recipe.data, tokenizer, tokenizer_at)
    tell.data(documents, held_out)
    row_length = recipe.data.max_length if recipe.data.packing else None
    batching = Batching(row_length, recipe.train.per_device_train_batch_size, *data_rank(mesh))
    loader = Loader(documents, batching, recipe.train.gradient_accumulation_steps, recipe.train.seed)
    steps = recipe.train.steps or math.ceil(recipe.train.epochs * len(documents.rows) / loader.rows_per_step)
    if run.finished_steps >= steps:
        tell.say(f"done     this run has finished its {run.finished_steps} steps; for another choose another run.name")
        return DONE
    run.check_goes_on(steps, newest)

    # Meta model -> checkpointing -> compile -> stage -> memory.
    model = build_model(config, recipe.precision.master, recipe.train.loss_chunk_tokens)
    flops = flops_per_token(model, row_length or documents.mean_length)
    units = choose_units(model, model.parts, model.blocks, stage.reshard_after_forward, recipe.parallel)
    predicted = predict_traffic(stage, units, sizes, loader.accumulation, recipe.precision, switches)
    forecast = predict_memory_metrics(stage, units, sizes, recipe.precision, switches)
    apply_checkpointing(model.blocks, recipe.activation)
    if recipe.train.compile:
        apply_compile(model)
    carriers = apply_stage(units, mesh, recipe.parallel, recipe.precision, switches)
    tell.layout(stage, sizes, recipe, units, switches, model, loader, steps)
    materialize(model, ranks.device)
    unsent = start_carrying(carriers, ranks.device)
    optimizer = build_optimizer(model, recipe.optim)

    # Where to start: this run's newest checkpoint, else the one the recipe names, else pretrained weights, else random.
    began = time.perf_counter()
    progress = Progress(step=0, tokens=0, loader=loader.state_dict())
    saved_step = 0
    if newest or recipe.train.resume_from_checkpoint:
        source = str(newest or recipe.train.resume_from_checkpoint)
        progress, lost = load_checkpoint(Path(source), model, optimizer, unsent)
        loader.load_state_dict(progress.loader)
        if progress.step > steps:
            raise RecipeError(f"checkpoint {source} is at step {progress.step}, the recipe ends at step {steps}")
        saved_step = progress.step
        source += f" (begun anew: {lost})" if lost else ""
    elif recipe.model.init == "pretrained":
        source = str(folder)
        load_weights(model, folder)
    else:
        source = "random"
        init_weights(model, recipe.train.seed)
    tell.say(f"weights  {source}, {time.perf_counter() - began:.1f} s, at step {progress.step} of {steps}")

    groups = axis_groups(sizes, ranks.rank, switches.inside)
    if ranks.is_main:
        run.record(recipe_path, recipe, {"world_size": ranks.world_size, "mesh": sizes})
    tracked = flat_config(flatten_recipe(recipe) | {"world_size": ranks.world_size}, sizes)
    recorder = Recorder(run.path, run.name, recipe.run, tracked, ranks.is_main, progress.step)
    with recorder, tell.start(progress.step, steps), Ledger(groups) as ledger:
        if held_out and progress.step == 0:
            before: Metrics = {"eval/loss": evaluate(model, units, objective, eval_micros(held_out, batching), ranks)}
            recorder.log(0, before)
            tell.advance(0, before)
        ledger.open()  # for one step; the others send the same
        logged_at, logged_step, read_tokens = time.perf_counter(), progress.step, 0.0
        while progress.step < steps:
            step, metrics = progress.step + 1, Metrics()
            micros = loader.next_step()
            counts = (sum(len(m.targets) for m in micros), sum(m.input_ids.numel() for m in micros), stop.asked)
            tokens, row_tokens, stops = sum_over_ranks(*counts)  # on the host: the device is not waited for
            if stops:
                break
            read_tokens += row_tokens
            loss = torch.zeros((), device=ranks.device)
            for micro in micros:
                set_schedule(units, stage, is_last_micro=micro is micros[-1])
                part = objective(model, micro.to(ranks.device)) / tokens
                part.backward()
                loss += part.detach()
            norm = clip_gradients(model.parameters(), recipe.optim.max_grad_norm)
            rate = learning_rate(recipe.optim, step, steps)
            set_learning_rate(optimizer, rate)
            optimizer.step()
            progress = Progress(step, progress.tokens + int(tokens), loader.state_dict())
            if ledger.close():
                tell.traffic(ledger.traffic, predicted)

            logs, saves = is_due(step, recipe.train.logging_steps), is_due(step, recipe.train.save_steps)
            if logs or saves or step == steps:
                measured = read_loss(loss, norm, step)  # the step's one host sync; what is not finite is never saved
            if logs:
                metrics = measured | {"train/learning_rate": rate, "train/tokens": progress.tokens}
                seconds, count = time.perf_counter() - logged_at, step - logged_step
                metrics |= speed_metrics(seconds, count, read_tokens, ranks.world_size, flops)
                metrics |= memory_metrics(model, optimizer, unsent.values())
                metrics |= ledger.take_metrics(ranks.ranks_per_node, predicted, forecast)
            optimizer.zero_grad()
            if held_out and (is_due(step, recipe.train.eval_steps) or step == steps):
                metrics["eval/loss"] = evaluate(model, units, objective, eval_micros(held_out, batching), ranks)
            if metrics:
                recorder.log(step, metrics)
            tell.advance(step, metrics)
            if saves:
                save_checkpoint(run.checkpoints, model, optimizer, unsent, progress, recipe.train.save_total_limit)
                saved_step = step
            if metrics or saves:  # so that no step's time holds an evaluation or a checkpoint
                logged_at, logged_step, read_tokens = time.perf_counter(), step, 0.0

    stopped = progress.step < steps
    if progress.step > saved_step and (recipe.train.save_steps or stopped):
        read_loss(loss, norm, progress.step)  # a step that was not logged was not looked at yet
        save_checkpoint(run.checkpoints, model, optimizer, unsent, progress, recipe.train.save_total_limit)
    if stopped:
        saved = f"after step {progress.step} of {steps}, checkpoint saved" if progress.step else "before the first step"
        tell.say(f"stopped  {saved}; continue with run.name={run.name}")
        return PREEMPTED
    if recipe.train.export:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        save_weights(
            run.export, full_tensors(model), shapes, config, tokenizer, folder, recipe.train.export_dtype, ranks.is_main
        )
        tell.say(f"export   {run.export}")
    if ranks.is_main:
        run.finish(steps)
    tell.say(f"done     {steps} steps, {progress.tokens:,} trained tokens")
    return DONE


@torch.no_grad()
def evaluate(model: CausalLM, units: list[Unit], objective: Objective, micros: Iterable[Micro], ranks: Ranks) -> float:
    """Mean loss of the held-out trained tokens, over all ranks. Collective."""
    model.eval()
    loss, tokens = torch.zeros((), device=ranks.device), 0
    for micro in micros:
        loss += objective(model, micro.to(ranks.device))
        tokens += len(micro.targets)
    reshard(units)
    model.train()
    total, count = sum_over_ranks(loss.item(), tokens)
    return total / count


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
        ranks = start_distributed(recipe.run.lost_seconds)
        code = train(recipe, path, ranks)
    except (RecipeError, RunFailed) as error:
        return report_error(error, WRONG if isinstance(error, RecipeError) else FAILED)
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error, FAILED)
    stop_distributed(ranks)
    return code


if __name__ == "__main__":
    exit_rank(main())
