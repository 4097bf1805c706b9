"""A rehearsal is its run: the same two calls, so what one is told of ranks, data and predictions the other has."""

import dataclasses
import re

import pytest
from planted import replace
from world import losses, metrics, run_world, train_rank

from shardbook.parallel.placement import World
from shardbook.recipe import RecipeError, load_recipe
from shardbook.run.prepare import place_run, prepare_job

RUNS = {
    "zero3": ("data.eval_size=4", "generate.steps=2", "generate.max_new_tokens=3", "activation.checkpointing=full"),
    "hsdp": ("parallel.stage=hsdp", "parallel.dp_shard_size=1", "train.gradient_accumulation_steps=2"),
    "tp": ("parallel.stage=zero1", "parallel.tp_size=2"),
    "pp": ("parallel.stage=ddp", "parallel.pp_size=2", "train.gradient_accumulation_steps=2"),
    "lora": ("parallel.stage=zero2", "lora.r=4", "data.packing=false"),
}


def facts(job):
    """What of a job can be compared between processes."""
    units = [dataclasses.replace(unit, modules=()) for unit in job.layout.units]
    found = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    for name in ("model", "config", "tokenizer", "objective", "documents", "held_out", "loader", "world"):
        del found[name]
    found["attention"] = job.attention.name
    found["layout"] = dataclasses.replace(job.layout, units=())
    found["units"] = [vars(unit) for unit in units]
    found["config"] = job.config.to_dict()
    found["parameters"] = {name: (p.shape, p.dtype, p.requires_grad) for name, p in job.model.named_parameters()}
    for name, documents in (("train", job.documents), ("eval", job.held_out)):
        found[name] = documents and (documents.summary, documents.rows, documents.totals)
    found["loader"] = (job.loader.accumulation, job.loader.seed, job.loader.rows_per_step)
    return {name: repr(value) for name, value in found.items()}


def jobs_of_a_run(words, ranks_planned):
    """The job that this rank prepares, on its way into a run, and how often it measures blocks for that."""
    from shardbook.plan import measure_blocks as blocks

    jobs, measured, measure = [], [], blocks.measure
    for known in blocks.KNOWN_BLOCKS:
        known.clear()
    blocks.measure = lambda *given: measured.append(1) or measure(*given)

    def prepare(laid, *more):
        job = prepare_job(laid, *more)
        jobs.append((job.world, facts(job)))  # now: a stage is applied in place
        return job

    replace(prepare_job, prepare)
    code, _, error = train_rank(words)
    assert code == 0, error
    assert [world.size for world, _ in jobs] == [ranks_planned]
    return *jobs[0], len(measured)


@pytest.mark.parametrize("name", RUNS)
def test_a_rehearsal_prepares_the_job_that_its_run_has(recipe, name):
    words = ["train.steps=2", "train.export=false", f"run.name=job-{name}", *RUNS[name]]
    jobs = run_world(2, jobs_of_a_run, [str(recipe), *words], 2)
    assert [measured > 0 for *_, measured in jobs] == [True, False], "one rank measures, and tells the others"
    for world, of_run, _ in jobs:
        rehearsed = prepare_job(place_run(load_recipe(recipe, words), dataclasses.replace(world)))
        assert facts(rehearsed) == of_run


def test_another_number_of_ranks_is_another_job(recipe):
    """What is compared tells jobs apart."""
    words = ["parallel.stage=zero3", "train.steps=2", "train.export=false"]
    found = [prepare_job(place_run(load_recipe(recipe, words), World(size, 1))) for size in (1, 2)]
    differ = {name for name, value in facts(found[0]).items() if facts(found[1])[name] != value}
    assert {"layout", "batching", "peak"} <= differ


def test_a_cpu_refuses_what_its_memory_does_not_hold(recipe, monkeypatch):
    """Two ranks share it; rows that are shorter than they could be count as they are; a GPU's run asks no host."""
    import torch

    from shardbook.run import prepare

    words = ["train.per_device_train_batch_size=64", "train.export=false"]
    here = World(2, 2, 0, torch.device("cpu"))
    laid = place_run(load_recipe(recipe, words), here)
    monkeypatch.setattr(prepare, "available_memory", lambda: 10**12)
    peak = prepare_job(laid).peak.total
    monkeypatch.setattr(prepare, "available_memory", lambda: int(0.9 * 2 * peak))
    with pytest.raises(RecipeError) as refused:
        prepare_job(laid)
    said, _, change = str(refused.value).partition("; the smallest change that fits: ")
    assert re.fullmatch(
        r"a step takes [\d.]+ GB on each of 2 ranks here, and this machine has [\d.]+ GB for each", said
    )
    assert change == "train.per_device_train_batch_size=32 train.gradient_accumulation_steps=2"
    prepare_job(place_run(load_recipe(recipe, change.split()), here))
    prepare_job(place_run(load_recipe(recipe, [*words, "data.packing=false", "data.max_length=256"]), World(2, 2)))
    monkeypatch.setattr(prepare, "available_memory", lambda: 1000)
    with pytest.raises(RecipeError, match="no single change would fit; shardbook plan also tries"):
        prepare_job(laid)


def train_unmeasured(words):
    """A model whose blocks need values to run: there is no plan of it."""
    from shardbook.plan.measure_blocks import Unmeasured
    from shardbook.run import prepare

    def predict_peak(*_):
        raise Unmeasured("model.path = 'x': block 0 cannot run without memory")

    prepare.predict_peak = predict_peak
    return train_rank(words)


def test_a_model_that_cannot_be_planned_is_trained(recipe):
    results = run_world(2, train_unmeasured, [str(recipe), "run.name=unplanned", "train.steps=2"])
    assert [code for code, *_ in results] == [0, 0], results
    assert "not predicted: model.path = 'x': block 0" in " ".join(results[0][1].split())
    rows = metrics(recipe.parent / "unplanned")
    assert len(losses(recipe.parent / "unplanned")) == 2
    assert not any(name.startswith("predicted/peak/") for row in rows for name in row)
    assert any("predicted/memory/params_bytes" in row for row in rows)
