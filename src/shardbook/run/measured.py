"""Measured steps of runs, for a plan's calibration."""

from dataclasses import replace
from pathlib import Path
from statistics import median

from shardbook.gpus import find_gpu, gpu_of
from shardbook.plan.calibrate import Sample
from shardbook.plan.cluster import build_planner
from shardbook.plan.hardware import Cluster
from shardbook.recipe import RecipeError, first_line, load_recipe
from shardbook.run.directory import read_facts
from shardbook.run.metrics import read_rows

SKIPPED = 3  # first logged steps, which compile and fill caches


def read_sample(run: Path, model_path: str, gpu_name: str, document_tokens: float) -> Sample:
    """Returns the median step of a run directory and the function that predicts it on a cluster. Raises RecipeError for
    a directory that is no run, a run of another model or on another kind of GPU, or one with too few steps."""
    said = f"--calibrate {run}"
    if not (run / "resolved.toml").is_file():
        raise RecipeError(f"{said}: not a run directory (no resolved.toml in it)")
    recipe, facts = load_recipe(run / "resolved.toml"), read_facts(run)
    if recipe.model.path != model_path:
        raise RecipeError(f"{said}: a run of {recipe.model.path}, and the plan is for {model_path}")
    device = facts.get("gpu", "a CPU")
    if gpu_of(device) != find_gpu(gpu_name):
        raise RecipeError(f"{said}: a run on {device}, and the plan is for {gpu_name}")
    try:
        rows = read_rows(run / "metrics.jsonl")
    except (OSError, ValueError) as error:
        raise RecipeError(f"{said}: its metrics.jsonl cannot be read ({first_line(error)})") from None
    seconds = [row["perf/step_seconds"] for row in rows if "perf/step_seconds" in row][SKIPPED:]
    if not seconds:
        raise RecipeError(f"{said}: needs more than {SKIPPED} logged steps")
    planner, gpu, world = build_planner(recipe, document_tokens), find_gpu(gpu_name), facts["world_size"]
    size = {"gpus": world, "a_node": min(gpu.a_node, world)}
    found = planner.lay_out(planner.recipe, Cluster(gpu, nics=gpu.nics, **size))
    return Sample(median(seconds), lambda cluster: replace(found, cluster=replace(cluster, **size)).time.seconds)
