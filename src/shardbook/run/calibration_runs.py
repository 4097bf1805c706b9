"""Measured steps of runs, and a plan's constants fitted to them: the slowness of computing, and the share of its cards'
rate that a network attains.

Invariant: only constants that measurements tell apart are fitted: one run, or runs that never waited, give slowness.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from shardbook.gpus import find_gpu, gpu_of
from shardbook.plan.cluster import build_planner
from shardbook.plan.hardware import Cluster
from shardbook.recipe import RecipeError, first_line, load_recipe, note_gone
from shardbook.run.directory import read_facts
from shardbook.run.log.recorder import read_rows

SKIPPED = 3  # first logged steps, which compile and fill caches
LOWEST, HIGHEST = 0.1, 20.0  # bounds of either constant against a data sheet's share
ROUNDS, SPLITS = 10, 24  # of the search: one constant after the other, each by golden section


@dataclass(frozen=True)
class CalibrationRun:
    """A measured step, and the plan's prediction of it."""

    seconds: float
    predict: Callable[[Cluster], float]  # seconds of the same step on that cluster


def read_sample(run: Path, model_path: str, gpu_name: str, document_tokens: float) -> CalibrationRun:
    """Returns the median step of a run directory and the function that predicts it on a cluster. Raises RecipeError for
    a directory that is no run, a run of another model or on another kind of GPU, or one with too few steps."""
    at = f"--calibrate {run}"
    if not (run / "resolved.toml").is_file():
        raise RecipeError(f"{at}: not a run directory (no resolved.toml in it)")
    recipe, facts = load_recipe(run / "resolved.toml", is_past=True), read_facts(run)
    note_gone(run / "resolved.toml")
    if recipe.model.path != model_path:
        raise RecipeError(f"{at}: a run of {recipe.model.path}, and the plan is for {model_path}")
    device = facts.get("gpu", "a CPU")
    if gpu_of(device) != find_gpu(gpu_name):
        raise RecipeError(f"{at}: a run on {device}, and the plan is for {gpu_name}")
    try:
        rows = read_rows(run / "metrics.jsonl")
    except (OSError, ValueError) as error:
        raise RecipeError(f"{at}: its metrics.jsonl cannot be read ({first_line(error)})") from None
    seconds = [row["perf/step_seconds"] for row in rows if "perf/step_seconds" in row][SKIPPED:]
    if not seconds:
        raise RecipeError(f"{at}: needs more than {SKIPPED} logged steps")
    planner, gpu, world = build_planner(recipe, document_tokens), find_gpu(gpu_name), facts["world_size"]
    size = {"gpus": world, "a_node": min(gpu.a_node, world)}
    candidate = planner.lay_out(planner.recipe, Cluster(gpu, nics=gpu.nics, **size))
    return CalibrationRun(
        median(seconds), lambda cluster: replace(candidate, cluster=replace(cluster, **size)).time.seconds
    )


def calibrate(cluster: Cluster, samples: Sequence[CalibrationRun]) -> Cluster:
    """Returns `cluster` with the constants that predict `samples` best, least squares of the ratios' logarithms; as it
    is where there are none."""
    if not samples:
        return cluster

    def miss(fitted: Cluster) -> float:
        return sum(math.log(sample.predict(fitted) / sample.seconds) ** 2 for sample in samples)

    names = ["slowness"]
    network = replace(cluster, across=cluster.across / 2)
    if len(samples) > 1 and any(sample.predict(network) != sample.predict(cluster) for sample in samples):
        names.append("across")
    for _ in range(ROUNDS if len(names) > 1 else 1):
        for name in names:
            cluster = _nearest(cluster, name, miss)
    return cluster


def _nearest(cluster: Cluster, name: str, miss: Callable[[Cluster], float]) -> Cluster:
    """Returns the cluster with the value of `name` that misses least, by golden section over its logarithm."""
    golden = (math.sqrt(5) - 1) / 2
    low, high = math.log(LOWEST), math.log(HIGHEST)

    def at(place: float) -> Cluster:
        value: Any = math.exp(place)
        return replace(cluster, **{name: value})

    left, right = high - golden * (high - low), low + golden * (high - low)
    of_left, of_right = miss(at(left)), miss(at(right))
    for _ in range(SPLITS):
        if of_left <= of_right:
            high, right, of_right = right, left, of_left
            left = high - golden * (high - low)
            of_left = miss(at(left))
        else:
            low, left, of_left = left, right, of_right
            right = low + golden * (high - low)
            of_right = miss(at(right))
    return at((low + high) / 2)
