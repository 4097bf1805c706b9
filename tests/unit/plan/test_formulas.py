"""The formulas beside the literature's figures: state by stage, and traffic in units of the parameters."""

import math

import pytest
from plans import ORDER, plan_of

from shardbook.plan.cluster import build_planner
from shardbook.plan.formulas import paper_resident
from shardbook.plan.hardware import (
    build_cluster,
)
from shardbook.recipe import STAGES


def paper(stage, billions, ranks):
    """GB by the ZeRO paper's count."""
    return paper_resident(STAGES[stage], int(billions * 1e9), ranks).total_bytes / 1e9


def test_the_papers_figure_1():
    assert [round(paper(stage, 7.5, 64), 1) for stage in ORDER] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize(
    ("stage", "sizes"),
    [
        ("ddp", {4: 112, 8: 112, 64: 112, 256: 112}),
        ("zero1", {4: 49, 8: 38.5, 64: 29.3125, 256: 28.328125}),
        ("zero2", {4: 38.5, 8: 26.25, 64: 15.53125, 256: 14.3828125}),
        ("zero3", {4: 28, 8: 14, 64: 1.75, 256: 0.4375}),
    ],
)
def test_seven_billion_parameters(stage, sizes):
    assert {ranks: paper(stage, 7, ranks) for ranks in sizes} == sizes


def test_larger_models_by_state_alone():
    assert (paper("ddp", 13, 8), paper("zero2", 13, 8), paper("zero3", 13, 32)) == (208, 48.75, 6.5)
    assert paper("ddp", 70, 1) == 1120 and paper("zero3", 70, 64) == 17.5
    assert math.ceil(paper("ddp", 70, 1) / 80) == 14 and math.ceil(paper("ddp", 405, 1) / 80) == 81
    assert paper("ddp", 405, 1) == 6480 and paper("zero3", 405, 128) == 50.625
    assert round(paper("zero3", 405, 128) / 8, 1) == 6.3  # each of eight tensor-parallel ranks has an eighth


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_how_many_times_less_than_all(ranks):
    """16 P over 4 + 12/N, 2 + 14/N, 16/N: 4N/(N+3), 8N/(N+7), N."""
    whole = paper("ddp", 1, ranks)
    factors = [whole / paper(stage, 1, ranks) for stage in ORDER[1:]]
    assert factors == pytest.approx([4 * ranks / (ranks + 3), 8 * ranks / (ranks + 7), ranks], rel=1e-12)


def test_traffic_in_units_of_the_parameters():
    """A reduce-scatter or an all-gather is one unit, an all-reduce two: 2, 2, 2, 3, with bf16 on every wire."""
    recipe = plan_of("llama-3.1-8b", "precision.reduce=bf16")
    stages = build_planner(recipe).stages(build_cluster("h100", 8))
    units = {}
    for name in ORDER:
        unit = 2 * sum(unit.numel for unit in stages[name].layout.units)
        sent = stages[name].comm
        times = (
            2 * sent.get("all_reduce_bytes", 0) + sent.get("all_gather_bytes", 0) + sent.get("reduce_scatter_bytes", 0)
        )
        units[name] = times / unit
    # zero3: embedding and head, an eighth of the model, are gathered once in a step
    assert units == pytest.approx(
        {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3 - 2 * 128_256 * 4096 / 8_030_261_248}, abs=1e-4
    )
