"""Advice: the quickest layout that fits, why others do not, and what would help where nothing does."""

from dataclasses import replace

import pytest
from plans import plan_of, report_on

from shardbook.cli import main
from shardbook.plan.advice import advise, min_gpus
from shardbook.plan.cluster import build_planner
from shardbook.plan.hardware import (
    build_cluster,
)
from shardbook.plan.recipe_file import write_recipe_file
from shardbook.plan.report import (
    as_json,
    describe_advice,
    describe_path,
    describe_shared,
)
from shardbook.recipe import Parallel, Recipe, find_recipe, load_recipe, with_settings


def test_advice_takes_what_fits_and_says_why_not():
    planner = build_planner(load_recipe(find_recipe("llama8b-fsdp")))
    cluster = build_cluster("h100", 8)
    advice = advise(planner, cluster)
    everything = list(planner.candidates(cluster))
    assert advice.best and advice.best.fits
    assert advice.best.time.seconds == min(found.time.seconds for found in everything if found.fits)
    assert [found.layout.stage.name for found, _ in advice.refused] == ["ddp"]
    assert "ddp does not fit (most optimizer; 73.4 GB over)" in advice.why
    rows = {
        found.recipe.train.per_device_train_batch_size * found.recipe.train.gradient_accumulation_steps
        for found in everything
    }
    assert rows == {2}


@pytest.mark.slow
def test_what_fits_nowhere_names_the_smallest_cluster():
    planner = build_planner(load_recipe(find_recipe("llama70b-fsdp")))
    small = build_cluster("h100", 8, host_gb=32)
    small = replace(small, gpu=replace(small.gpu, gb=40))  # nor can the host's memory, or a GPU all that disks leave it
    advice = advise(planner, small)
    assert advice.best is None
    assert advice.why == "fits nowhere here; the smallest cluster of these GPUs where it does has 64"
    assert min_gpus(planner, "zero3", build_cluster("h100", 64)) == 32
    never = build_planner(plan_of("llama-3.1-405b", "data.max_length=131072"))
    assert "fits on no number of these GPUs (activations" in advise(never, build_cluster("rtx4090", 8)).why


def test_where_devices_are_too_small_tiers_are_advised(tmp_path):
    """A 70B on one node: the host's memory where it is enough, else disks; and from how many tokens on it is hidden."""
    recipe = load_recipe(find_recipe("llama70b-fsdp"))
    report = report_on(recipe, "h100-80gb", 8)
    best = report.advice.best
    assert best.recipe.offload.optimizer == "cpu" and best.fits and best.offloaded_bytes.keys() == {"host"}
    staged = 2 * 4 * 128_256 * 8192  # gradients of the largest unit on their way, in two buffers
    assert best.offloaded_bytes["host"] * 8 == pytest.approx(16 * report.planner.parameters + staged, rel=1e-3)
    saving = replace(best, recipe=with_settings(best.recipe, {"train.async_save": True}))
    assert best.copied == 0 and saving.copied == pytest.approx(12 / 8 * report.planner.parameters, rel=1e-3)
    assert replace(best, recipe=with_settings(best.recipe, {"train.async_save": "wait"})).copied == saving.copied
    assert replace(saving, cluster=replace(best.cluster, host_gb=1500)).bottleneck == "host"  # beside 1,140 GB
    said = "\n".join(describe_advice(report))
    assert (
        not describe_path(report)
        and "optimizer on cpu (142 GB of host a rank)" in said
        and "tokens a step on all of it is hidden" in said
    )
    assert report.advice.best.time.offload > 0 and as_json(report)["advice"]["recipe"]["offload.optimizer"] == "cpu"
    from_disk = report_on(recipe, "h100-80gb", 8, host_gb=512)
    best = from_disk.advice.best
    assert best.recipe.offload.optimizer == "nvme" and best.offloaded_bytes["disk"] == pytest.approx(
        1.5 * 70.55e9, rel=1e-3
    )
    assert "0.85 TB written in a node each step" in "\n".join(describe_advice(from_disk))
    assert best.time.seconds > report.advice.best.time.seconds
    (unnamed,) = describe_path(from_disk)  # only its user knows a disk
    assert unnamed in "\n".join(describe_advice(from_disk)) and "set it before the run" in unnamed
    write_recipe_file(from_disk, written := tmp_path / "advised.toml")
    assert f"# {unnamed}\n" in written.read_text() and load_recipe(written).offload.path == "/scratch"


def test_what_is_advised_is_a_recipe(tmp_path, capsys):
    out = tmp_path / "advised.toml"
    assert main(["plan", "llama8b-fsdp", "--gpus", "8", "--write", str(out)]) == 0
    recipe = load_recipe(out)
    assert isinstance(recipe, Recipe) and recipe.parallel == Parallel(stage=recipe.parallel.stage)
    assert recipe.precision == load_recipe(find_recipe("llama8b-fsdp")).precision
    assert f"parallel.stage={recipe.parallel.stage}" in capsys.readouterr().out
    assert main(["plan", "llama8b-fsdp", "--write", str(out)]) == 2
    assert "exists; name a new file" in capsys.readouterr().err


@pytest.mark.slow
def test_sharing_matrices_is_advised_where_nothing_else_fits():
    report = report_on(plan_of("llama-3.1-70b", "data.max_length=65536"), "h100-80gb", 64)
    best = report.advice.best
    assert best and best.layout.cp_size > 1 and not any(row.fits for row in report.stages.values())
    told = as_json(report)["advice"]
    assert told["take"]["mesh"]["cp"] == told["recipe"]["parallel.cp_size"] == best.layout.cp_size
    assert f"x cp {best.layout.cp_size})" in describe_advice(report)[0]
    assert best.tokens == report.stages["zero3"].tokens  # a step of as many rows
    tensor = report.planner.candidates(report.cluster, sizes=(8, 1, 1, 1))
    assert any(found.fits for found in tensor)  # matrices could be shared too


@pytest.mark.slow
def test_an_advice_that_shares_what_the_recipe_does_not_says_so():
    report = report_on(plan_of("llama-3.1-70b", "data.max_length=65536"), "h100-80gb", 64)
    assert [line for line in describe_shared(report) if line.startswith("context  4 ranks") and "(advised)" in line]
    assert "ddp with cp 4 does not fit" in report.advice.why
