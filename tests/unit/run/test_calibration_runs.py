"""Runs calibrate a plan, and those that cannot are refused in a line."""

import json
from dataclasses import replace

import pytest
from plans import report_on

from shardbook.cli import main
from shardbook.plan.cluster import build_planner, stage_settings
from shardbook.plan.hardware import (
    ACROSS,
    build_cluster,
)
from shardbook.plan.report import (
    describe_calibrated,
    make_report,
)
from shardbook.recipe import dump_recipe, find_recipe, load_recipe
from shardbook.run.calibration_runs import calibrate, read_sample


def ran(folder, recipe, facts, seconds):
    """A run directory, as one leaves it."""
    folder.mkdir()
    (folder / "resolved.toml").write_text(dump_recipe(recipe))
    (folder / "run.json").write_text(json.dumps(facts))
    rows = [{"step": 0, "eval/loss": 1.0}, *({"step": n, "perf/step_seconds": 9.0} for n in (1, 2, 3))]
    rows += [{"step": 4 + n, "perf/step_seconds": found} for n, found in enumerate(seconds)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_runs_calibrate_a_plan(tmp_path):
    """Two runs of a cluster that computes at 1/1.3 of the data sheet's shares and sends at 35% of its cards' rate."""
    planner = build_planner(load_recipe(find_recipe("llama8b-fsdp")))
    truth = replace(build_cluster("h100", 64, 400), slowness=1.3, across=0.35)
    facts = {"world_size": 64, "gpu": "NVIDIA H100 80GB HBM3"}
    runs = []
    for stage, batch in (("zero3", 1), ("ddp", 4)):
        train = planner.recipe.train.model_copy(update={"per_device_train_batch_size": batch})
        settings = {"parallel": stage_settings(stage, planner.recipe.parallel, truth), "train": train}
        recipe = planner.recipe.model_copy(update=settings)
        seconds = planner.lay_out(recipe, truth).time.seconds
        runs.append(ran(tmp_path / stage, recipe, facts, [seconds, 0.9 * seconds, 7 * seconds]))
        with (runs[-1] / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7, "perf/step_se')  # a kill tore it
    samples = [read_sample(run, planner.recipe.model.path, "h100", 1200) for run in runs]
    found = calibrate(build_cluster("h100", 64, 400), samples)
    assert (found.slowness, found.across) == (pytest.approx(1.3, rel=0.02), pytest.approx(0.35, rel=0.02))
    alone = calibrate(build_cluster("h100", 64, 400), samples[:1])
    assert alone.across == ACROSS and samples[0].predict(alone) == pytest.approx(samples[0].seconds, rel=1e-3)
    report = make_report(planner.recipe, "h100", found)
    assert describe_calibrated(report)[0].startswith("measured computing takes 1.3")
    assert not describe_calibrated(report_on(planner.recipe, "h100", 8))


def test_runs_that_calibrate_nothing_are_refused(tmp_path, capsys):
    recipe = load_recipe(find_recipe("llama8b-fsdp"))
    gpu = {"world_size": 8, "gpu": "NVIDIA H100 80GB HBM3"}
    other = load_recipe(find_recipe("smollm2-135m-fsdp"))
    cases = {
        "empty": (tmp_path, "not a run directory"),
        "model": (ran(tmp_path / "model", other, gpu, [1.0]), "a run of"),
        "kind": (ran(tmp_path / "kind", recipe, gpu | {"gpu": "NVIDIA L40S"}, [1.0]), "a run on NVIDIA L40S"),
        "cpu": (ran(tmp_path / "cpu", recipe, {"world_size": 2}, [1.0]), "a run on a CPU"),
        "short": (ran(tmp_path / "short", recipe, gpu, []), "needs more than 3 logged steps"),
        "gone": (ran(tmp_path / "gone", recipe, gpu, [1.0]), "its metrics.jsonl cannot be read"),
    }
    (tmp_path / "gone" / "metrics.jsonl").unlink()
    for path, said in cases.values():
        assert main(["plan", "llama8b-fsdp", "--calibrate", str(path), "--json"]) == 2
        out, err = capsys.readouterr()
        assert not out and said in err and err.count("\n") == 1
