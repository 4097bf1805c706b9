"""The timeline of a step: it ends with the plan's time, and its figure has the numbers of its table."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from shardbook.compare.page import draw_lanes
from shardbook.compare.plan_page import timeline_of
from shardbook.plan.cluster import build_planner
from shardbook.plan.hardware import build_cluster
from shardbook.plan.step_timeline import lay_in_time
from shardbook.recipe import find_recipe, load_recipe


def planned(*overrides, gpus=16):
    planner = build_planner(load_recipe(find_recipe("llama8b-fsdp"), list(overrides)))
    return planner.lay_out(planner.recipe, build_cluster("h100-80gb", gpus))


@pytest.mark.parametrize("micros", [1, 4])
@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero3"])
def test_a_step_ends_where_the_plan_says(stage, micros):
    found = planned(f"parallel.stage={stage}", f"train.gradient_accumulation_steps={micros}")
    spans, cut = lay_in_time(found)
    assert max(span.ends for span in spans) + cut == pytest.approx(found.time.seconds, rel=1e-9)
    assert (cut > 0) == (micros > 2)
    for lane in {span.lane for span in spans}:  # on a lane one thing after the other
        own = [span for span in spans if span.lane == lane]
        assert all(before.ends <= after.begins + 1e-9 for before, after in pairwise(own)), lane
        assert all(0 < span.busy <= span.ends - span.begins + 1e-9 for span in own)
    computing = sum(span.busy for span in spans if span.lane == "computing")
    shown = min(micros, 2) / micros
    assert computing == pytest.approx(
        shown * (found.time.seconds - found.time.exposed - found.time.optimizer) + found.time.optimizer, rel=0.01
    )


def test_a_model_of_many_blocks_stays_readable():
    spans, _ = lay_in_time(planned("train.gradient_accumulation_steps=8"))
    names = [span.of for span in spans if span.what == "computes forward"]
    assert names[:5] == ["block 1", "block 2", "blocks 3 to 30", "block 31", "block 32"]
    assert len(spans) < 80


def test_transfers_have_a_lane_of_their_own():
    spans, _ = lay_in_time(planned("offload.optimizer=cpu", "offload.params=cpu", "precision.master=fp32"))
    assert {span.what for span in spans if span.lane == "host"} >= {"moves parameters or gradients"}


def test_the_figure_has_the_numbers_of_the_table():
    panel = timeline_of(SimpleNamespace(stages={"zero3": planned()}), "zero3")
    drawn = draw_lanes(panel)["data"]
    bars = {pair for trace in drawn for pair in zip(trace["base"], trace["x"], strict=True)}
    assert bars == {(cells["from"], cells["to"] - cells["from"]) for _, cells in panel.rows}
    assert {trace["name"] for trace in drawn} == {label[1] for label, _ in panel.rows}
    assert [text for _, text in panel.texts(*panel.rows[0])] == [format(v, ",.1f") for v in panel.rows[0][1].values()]
