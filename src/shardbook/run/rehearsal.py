"""Rehearses a run's set-up and one step with nothing allocated (`shardbook train --dry-run`)."""

from pathlib import Path

from shardbook.parallel.placement import World
from shardbook.recipe import Recipe
from shardbook.run.checkpoint.format import newest_checkpoint
from shardbook.run.directory import first_day, read_facts
from shardbook.run.job_summary import describe_job
from shardbook.run.log.console import Console
from shardbook.run.preflight import check_run
from shardbook.run.prepare import place_run, prepare_job
from shardbook.terminal import readable_bytes


def rehearse(recipe: Recipe, world_size: int, ranks_per_node: int) -> None:
    """Prepares `recipe` as `world_size` ranks on GPUs would, up to its weights: config, layout, optimizer, tokenizer,
    every row of the data, and one step on fake tensors. Raises RecipeError where the run would."""
    check_run(recipe)
    console = Console(is_main=True)
    console.print(
        f"dry run  as on {world_size} GPUs, which compute in bf16 where precision.params is auto; a CPU's in fp32"
    )
    run = Path(recipe.run.dir).expanduser() / recipe.run.name if recipe.run.name else None
    checkpoint = newest_checkpoint(run / "checkpoints") if run else None
    placed = place_run(recipe, World(world_size, ranks_per_node))
    day = first_day(read_facts(run) if run else {}, checkpoint or recipe.train.resume_from_checkpoint)
    job = prepare_job(placed, day=day)
    console.show(describe_job(job))
    # makes a process group, and loads fake tensors' modules
    from shardbook.plan.simulate import find_unsimulated, simulate_step

    unsimulated = " and ".join(find_unsimulated(recipe))
    if not unsimulated:
        simulated = simulate_step(job, job.objective.terms)
        console.print(
            f"a step   on fake tensors: {readable_bytes(simulated.peak_bytes)} at its peak, in {simulated.moment}"
        )
        looked = "config, layout, data and a step; not looked at:"
    else:
        looked = f"config, layout and data; not looked at: a step (none is simulated with {unsimulated}),"
    console.print(f"dry run  done: {looked} weights, processes, links")
