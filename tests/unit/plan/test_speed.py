"""The seconds of a step: what waits for the network, between nothing and all of it."""

import math
from dataclasses import replace

import pytest
from plans import plan_of

from shardbook.plan.cluster import build_planner, stage_settings
from shardbook.plan.hardware import (
    ACROSS_SECONDS,
    INSIDE_SECONDS,
    build_cluster,
)
from shardbook.plan.speed import (
    exposed_seconds,
    predict_perf_metrics,
)
from shardbook.recipe import find_recipe, load_recipe


def break_even_micro_batch(
    parameters: float, layers: int, length: int, alpha: float, beta: float, flops: float, share: float = 0.05
) -> float:
    """Rows of a micro-batch from which zero3's three collectives a layer (two gathers, one reduction, 2 bytes a
    parameter, `alpha` seconds and `beta` bytes a second) take at most `share` of its computing (6 FLOPs a parameter and
    token at `flops` a second): ZeRO-Infinity, arXiv 2104.07857, section 4, for the idea."""
    layer = parameters / layers
    return 3 * (alpha + 2 * layer / beta) / (share * 6 * layer * length / flops)


def prefetch_depth(parameters: float, beta: float, computing: float) -> int:
    """k* = ceil(T_gather / T_compute): units to gather ahead so that a unit of `parameters`, 2 bytes each, is there in
    time over a link of `beta` bytes a second, where computing one takes `computing` seconds."""
    return -int(-(2 * parameters / beta) // computing)


def test_break_even_and_prefetch_depth():
    """Numbers of docs/planning.md."""
    rows = break_even_micro_batch(7e9, 32, 2048, alpha=10e-6, beta=100e9, flops=150e12)
    assert round(rows, 1) == 14.7 and math.ceil(rows) == 15
    assert [prefetch_depth(200e6, rate * 1e9, 10e-3) for rate in (50, 100, 200, 25)] == [1, 1, 1, 2]


def candidate(stage, gpus=16, nics=0.0, **parallel):
    cluster = build_cluster("h100", gpus, nics)
    planner = build_planner(plan_of("llama-3.2-1b"))
    settings = stage_settings(stage, planner.recipe.parallel, cluster)
    settings = settings.model_copy(update=parallel)
    return planner.lay_out(planner.recipe.model_copy(update={"parallel": settings}), cluster), cluster


def test_nothing_waits_where_the_network_is_endless():
    """But for hops: of the first two gathers, the tied matrix' and a block's, and of the last two reductions."""
    found, cluster = candidate("zero3", 16)
    endless = replace(cluster, nics=1e9, gpu=replace(cluster.gpu, link=1e18))
    hops = ACROSS_SECONDS + 14 * INSIDE_SECONDS
    first, backward = 0.05, 0.1
    waits = exposed_seconds(found.layout, endless, 1, first, backward)
    assert waits == pytest.approx(4 * hops, rel=1e-3)


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_what_waits_is_all_where_the_gpu_takes_no_time(stage):
    """Every collective in turn, each counted once."""
    found, cluster = candidate(stage, 16, 100.0)
    layout, groups = found.layout, found.layout.groups(0)
    seconds = 0.0
    for unit in layout.units:
        gathers = (1 + unit.gathers_again) * (layout.shards > 1)
        seconds += gathers * cluster.ring_seconds(unit.numel * 2, groups["dp_shard"]) * (unit.numel > 0)
        seconds += cluster.ring_seconds(unit.numel * 4, groups["dp_shard"]) * (unit.numel > 0)
        seconds += 2 * cluster.ring_seconds(unit.numel * 4 / layout.shards, groups["dp_replicate"]) * (unit.numel > 0)
    assert exposed_seconds(layout, cluster, 1, 0.0, 0.0) == pytest.approx(seconds)


def test_slower_cards_wait_longer_and_quantised_bytes_less():
    waits = [candidate("zero3", 16, nics)[0].time.exposed for nics in (3200, 400, 100, 25)]
    assert waits == sorted(waits) and waits[-1] > 10 * waits[0]
    assert candidate("zeropp", 16, 25)[0].time.exposed < 0.5 * waits[-1]


def test_a_run_on_known_hardware_forecasts_a_step():
    planner = build_planner(load_recipe(find_recipe("llama8b-fsdp")))
    found = planner.lay_out(planner.recipe, build_cluster("h100", 8))
    words = (found.layout, planner.config, planner.recipe, planner.flops, planner.document_tokens)
    told = predict_perf_metrics(*words, "NVIDIA H100 80GB HBM3")
    assert told == {"predicted/perf/step_seconds": found.time.seconds}
    assert predict_perf_metrics(*words, "CPU") == {}
