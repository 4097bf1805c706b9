"""What offload needs of a machine: counted before anything is taken, and refused in one line where it is not there."""

from dataclasses import replace

import pytest
from test_peak import lay_out, settings

import shardbook.memory.offload as offload
from shardbook.memory.shelf import ALIGN, plan_shelf, shelf_sizes
from shardbook.plan.peak import predict_peak
from shardbook.recipe import Offload, RecipeError


def laid_out(**tiers):
    recipe = settings(offload=tiers)
    layout, made = lay_out(recipe)
    return replace(layout, offload=recipe.offload), made, recipe


def test_a_parameter_begins_at_a_page_and_trained_ones_come_first():
    layout, _, _ = laid_out(optimizer="cpu")
    for unit in layout.units:
        plan = plan_shelf(layout, unit, 0)
        assert all(place.start % ALIGN == 0 for place in plan.places)
        assert plan.trained == plan.masters and plan.reduced == plan.wire == unit.padded_numel(4) // 4


@pytest.mark.parametrize(("optimizer", "params"), [("cpu", "none"), ("cpu", "cpu"), ("nvme", "none"), ("nvme", "nvme")])
def test_tiers_take_what_the_table_says(optimizer, params):
    path = {"path": "/scratch"} if optimizer == "nvme" else {}
    layout, made, recipe = laid_out(optimizer=optimizer, params=params, **path)
    share = sum(unit.numel for unit in layout.units) / 4
    sizes = shelf_sizes(layout, 0)
    padding = 1024 * 4 * 5 * sum(len(unit.shapes) for unit in layout.units)
    wanted = {"host": 4 if optimizer == "nvme" else 16, "disk": 12 if optimizer == "nvme" else 0}
    if params != "none":
        wanted["disk" if params == "nvme" else "host"] += 2
    for where, a_parameter in wanted.items():
        assert 0 <= sizes.get(where, 0) - a_parameter * share <= padding
    peak = predict_peak(layout, made, recipe)
    assert (peak.params > 0) == (params == "none") and peak.optimizer == 0


def test_too_little_memory_or_disk_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(offload, "available_memory", lambda: 10**6)
    layout, _, _ = laid_out(optimizer="cpu")
    with pytest.raises(RecipeError, match=r"this machine's memory are needed for 4 ranks and 0\.0 can be had; set"):
        offload.check_room(layout, 4)
    monkeypatch.setattr(offload, "available_memory", lambda: 10**12)
    monkeypatch.setattr(offload, "free_bytes", lambda folder: 10**6)
    layout, _, _ = laid_out(optimizer="nvme", path=str(tmp_path))
    with pytest.raises(RecipeError, match=r"GB are needed for 4 ranks and 0\.0 are free; choose another disk"):
        offload.check_room(layout, 4)


def test_what_the_kernel_says_is_available():
    assert 10**8 < offload.available_memory() < 10**14


def test_a_tier_further_out_than_its_masters_is_no_section():
    with pytest.raises(ValueError, match="lies further out"):
        Offload(optimizer="cpu", params="nvme", path="/scratch")
