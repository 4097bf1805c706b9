"""The story of an evaluation: lays out a run, an export or any model as a run would be; prints its held-out numbers.

Started like a run: `shardbook eval`, or by a launcher: `-m shardbook.evaluate MODEL [--json] [section.key=value ...]`.
Invariant: the numbers are those that a run with the same rows logs as eval/...; nothing is trained or written.
"""

if __name__ == "__main__":  # before torch is imported, which takes seconds: a request to stop counts already
    from shardbook.ranks.signals import begin_rank

    begin_rank()

import json
import math
import sys
import tempfile
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from shardbook.model.adapter_files import load_adapter
from shardbook.model.weights import load_weights
from shardbook.parallel.placement import World
from shardbook.parallel.sharding import ShardedModel
from shardbook.ranks.distributed import Ranks, broadcast_from_main, local_main_process_first
from shardbook.ranks.exits import DONE, exit_rank
from shardbook.ranks.signals import StopFlag, listen_no_more
from shardbook.recipe import Recipe, RecipeError
from shardbook.run.build import allocate_state, build_sharded
from shardbook.run.checkpoint.format import newest_checkpoint, step_of
from shardbook.run.checkpoint.load import load_checkpoint
from shardbook.run.checkpoint.save import kept_shapes
from shardbook.run.directory import first_day, read_facts
from shardbook.run.eval.model import describe_rows, evaluation_recipe
from shardbook.run.eval.observer import evaluate
from shardbook.run.eval.reference import Reference
from shardbook.run.load_teacher import fill_teacher
from shardbook.run.log.console import Console
from shardbook.run.out_of_memory import OomGuard
from shardbook.run.preflight import check_named
from shardbook.run.prepare import Job, place_run, prepare_job
from shardbook.run.rank import guard, with_ranks
from shardbook.run.start import load_base

LIKELIHOODS = {"sft": "loss", "distill": "nll"}  # by method, the metric whose exponential is the perplexity


def evaluate_model(model: str, recipe: Recipe, run: Path | None, ranks: Ranks, is_shown: bool) -> dict[str, Any]:
    """Returns the held-out numbers of `model`, whose run directory is `run` where it has one, with what they are of;
    prints them where `is_shown`."""
    console, in_turn = Console(ranks.is_main and is_shown), partial(local_main_process_first, ranks)
    placed = place_run(recipe, World(ranks.world_size, ranks.ranks_per_node, ranks.rank, ranks.device), in_turn)
    job = prepare_job(placed, in_turn, broadcast_from_main(lambda: first_day({}, "")))
    assert job.held_out is not None  # evaluation_recipe has seen to it
    if rows := describe_rows(recipe, run):
        console.print(f"rows     {rows}")
    console.print(f"eval     {job.held_out.summary}")
    sharded = build_sharded(job, ranks.device)
    oom_guard = OomGuard(job, sharded)
    with oom_guard, tempfile.TemporaryDirectory() as folder:
        optimizer = oom_guard.optimizer = allocate_state(job.model, sharded, placed.recipe.optim, ranks.device)
        source = load_base(placed.recipe, sharded, job.folder)
        fill_teacher(sharded, placed.recipe)
        sharded.upload_shards()
        reference = Reference(job, Path(folder), ranks, console, StopFlag())
        if not reference.read(sharded, job.folder, goes_on=False):
            reference.compute(sharded)
        checkpoint = broadcast_from_main(lambda: _find_result(run)) if run else None
        if checkpoint:
            load_checkpoint(checkpoint, sharded, optimizer)
            source = str(checkpoint)
        elif run:
            source = _load_export(run, job, sharded)
        sharded.upload_shards()
        held_out = reference.attach()
        assert held_out is not None
        metrics = evaluate(sharded, job.objective, held_out, job.batching, ranks)
    numbers: dict[str, Any] = {name.removeprefix("eval/"): value for name, value in metrics.items()}
    if likelihood := LIKELIHOODS.get(recipe.method):
        numbers["perplexity"] = math.exp(min(numbers[likelihood], 700.0))  # of more a float has no exponential
    facts: dict[str, Any] = {"model": model, "weights": source, "method": recipe.method, "stage": job.layout.stage.name}
    facts |= {"examples": int(held_out.totals.examples), "tokens": int(held_out.totals.tokens)}
    console.print(f"weights  {source}")
    console.print("result   " + "  ".join(f"{name} {value:.4f}" for name, value in numbers.items()))
    return facts | numbers


def _find_result(run: Path) -> Path | None:
    """Returns the newest checkpoint of a run; None where there is none, or the run's result is not in one. One rank
    looks: a run that goes on may publish another meanwhile."""
    checkpoint, finished = newest_checkpoint(run / "checkpoints"), read_facts(run).get("finished_steps", 0)
    return checkpoint if checkpoint and step_of(checkpoint) >= finished else None


def _load_export(run: Path, job: Job, sharded: ShardedModel) -> str:
    """Loads the export of a run without a checkpoint. Returns its directory. Raises RecipeError where there is none."""
    export = run / "export"
    if not export.is_dir():
        raise RecipeError(f"{run}: has no checkpoint and no export; name a run with one, or a model")
    if job.recipe.lora.r:
        load_adapter(job.model, export, job.recipe.lora, job.folder, kept_shapes(sharded.layout, job.model))
    else:
        load_weights(sharded.masters, export, sharded.layout.file_shapes)
    return str(export)


def main(words: list[str] | None = None) -> int:
    """Runs one rank of an evaluation. Returns the exit code."""

    def story() -> int:
        given = sys.argv[1:] if words is None else words
        named = [word for word in given if word != "--json"]
        if not named:
            raise RecipeError("no model: python -m shardbook.evaluate MODEL [--json] [section.key=value ...]")
        recipe, run = evaluation_recipe(named[0], named[1:])
        is_json, output = "--json" in given, sys.stdout

        def show(ranks: Ranks) -> int:
            listen_no_more()  # a signal ends it at once: there is nothing to save
            numbers = evaluate_model(named[0], recipe, run, ranks, not is_json)
            if is_json and ranks.is_main:
                print(json.dumps(numbers, indent=1), file=output, flush=True)
            return DONE

        with redirect_stdout(sys.stderr) if is_json else nullcontext():  # whatever else is printed is not JSON
            return with_ranks(recipe, lambda ranks: check_named(recipe), show)

    return guard(story)


if __name__ == "__main__":
    exit_rank(main())
