"""The planner: the literature's figures, times of known networks, what fits, and what is asked wrongly."""

import json
import math
from dataclasses import astuple, replace

import pytest

from shardbook.cli import main
from shardbook.gpus import GPUS, gpu_of
from shardbook.model.causal_lm import count_flops
from shardbook.model.shapes import hub_id, known_shapes
from shardbook.plan.advice import advise
from shardbook.plan.cluster import build_planner, stage_settings
from shardbook.plan.formulas import paper_resident
from shardbook.plan.hardware import (
    ACROSS,
    ACROSS_SECONDS,
    GBIT,
    INSIDE,
    INSIDE_SECONDS,
    build_cluster,
)
from shardbook.plan.recipe_file import write_recipe_file
from shardbook.plan.report import (
    as_json,
    as_table,
    describe_advice,
    describe_calibrated,
    describe_path,
    describe_shared,
    facts,
    make_report,
)
from shardbook.plan.speed import (
    exposed_seconds,
    inside_seconds,
    predict_perf_metrics,
)
from shardbook.plan.tp_cp_traffic import describe_sharing
from shardbook.recipe import STAGES, Parallel, Recipe, dump_recipe, find_recipe, load_recipe, with_settings
from shardbook.run.calibration_runs import calibrate, read_sample
from shardbook.run.log.console import describe_peak

ORDER = ["ddp", "zero1", "zero2", "zero3"]


def report_on(recipe, gpu, gpus, **node):
    return make_report(recipe, gpu, build_cluster(gpu, gpus, **node))


def paper(stage, billions, ranks):
    """GB by the ZeRO paper's count."""
    return paper_resident(STAGES[stage], int(billions * 1e9), ranks).total_bytes / 1e9


def test_units_chosen_once_are_those_of_each_layout():
    """A planner chooses units once for layouts that have the same: each is as one that is made alone."""
    recipe, cluster = plan_of("smollm2-135m"), build_cluster("h100", 8)
    planner = build_planner(recipe)

    def units_of(planner, words):
        layout = planner.layout_of(with_settings(recipe, words), cluster, 0)
        return [replace(unit, modules=(), shapes=tuple(map(tuple, unit.shapes))) for unit in layout.units]

    seen = []
    for key, value in (
        ("stage", "zero3"),
        ("stage", "zero2"),
        ("reshard_min_params", 10**7),
        ("pp_size", 2),
    ):
        once, alone = (units_of(each, {f"parallel.{key}": value}) for each in (planner, build_planner(recipe)))
        assert list(map(vars, once)) == list(map(vars, alone)), key
        seen.append(str(list(map(vars, once))))
    assert len(set(seen)) == len(seen)


def test_a_base_in_four_bits_is_planned_with_what_a_run_takes():
    """Also under zeropp, of whose switches it has one."""
    stages = build_planner(load_recipe(find_recipe("llama70b-qlora"))).stages(build_cluster("a100-80gb", 16))
    assert "zeropp" in stages
    for candidate in stages.values():
        assert Recipe.model_validate(candidate.recipe.model_dump(exclude_unset=True)).parallel.quantize_weights == 0


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


def plan_of(model, *words):
    from shardbook.cli import PLAIN
    from shardbook.recipe import parse_recipe

    return parse_recipe(PLAIN, "test", [f"model.path={model}", *words])


def test_a_ring_inside_a_node_and_between_nodes():
    inside = build_cluster("h100", 8)
    sent = 8e9 * 7 / 8
    assert inside.ring_seconds(8e9, list(range(8))) == sent / (INSIDE * 450e9) + 7 * INSIDE_SECONDS
    assert inside.ring_seconds(8e9, [0]) == 0
    across = build_cluster("h100", 16)
    hops = ACROSS_SECONDS + 14 * INSIDE_SECONDS
    assert across.ring_seconds(16e9, list(range(16))) == pytest.approx(15e9 / (ACROSS * 3200 * GBIT) + hops)
    # one rank of each node: the eight groups of a node share its cards
    pair = across.ring_seconds(2e9, [0, 8])
    assert pair == pytest.approx(8 * 1e9 / (ACROSS * 3200 * GBIT) + ACROSS_SECONDS)


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
    assert planner.min_gpus("zero3", build_cluster("h100", 64)) == 32
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


def test_the_contract_of_the_json():
    report = as_json(report_on(load_recipe(find_recipe("llama70b-hsdp")), "h100-80gb", 64))
    for row in report["stages"]:
        for what in ("paper", "resident"):
            sizes = row[what]
            parts = [sizes[f"{name}_bytes"] for name in ("params", "grads", "optimizer")]
            assert sizes["total_bytes"] == sum(parts)
        assert row["peak_bytes"] == sum(row["peak"].values())
        assert row["step_seconds"] == pytest.approx(sum(row["step"].values()))
        assert row["fits"] == (row["peak_bytes"] <= report["room_bytes"])
    hsdp = next(row for row in report["stages"] if row["stage"] == "hsdp")
    assert hsdp["mesh"] == {"dp_replicate": 2, "dp_shard": 32}  # the recipe's own, not a guess
    assert [row["stage"] for row in report["stages"]] == list(STAGES)
    assert (
        report["advice"]["fits"] and report["advice"]["recipe"]["parallel.stage"] == report["advice"]["take"]["stage"]
    )


def test_the_command_prints_json_alone(capsys):
    assert main(["plan", "llama8b-fsdp", "--gpus", "8", "--json", "optim.name=adamw_bf16"]) == 0
    out = capsys.readouterr().out
    kept = next(row for row in json.loads(out)["stages"] if row["stage"] == "ddp")["resident"]
    assert kept["optimizer_bytes"] == pytest.approx(4 * 8_030_261_248, rel=1e-6)


def test_what_is_recomputed_takes_time_and_a_budget_is_planned(tmp_path, capsys):
    def seconds(kind):
        words = (f"activation.checkpointing={kind}", "train.compile=true", "train.per_device_train_batch_size=1")
        assert main(["plan", "llama8b-fsdp", "--gpus", "8", "--json", *words]) == 0
        return {row["stage"]: row["step_seconds"] for row in json.loads(capsys.readouterr().out)["stages"]}["zero3"]

    none, full = seconds("none"), seconds("full")
    assert seconds("every:1") == full > seconds("every:2") > none
    assert seconds("budget:0.5") == seconds("budget:0") == none
    path = tmp_path / "lr=1e-4.toml"
    path.write_text(find_recipe("llama8b-fsdp").read_text())
    assert main(["plan", str(path), "--gpus", "8", "--json"]) == 0


def test_the_table_names_each_stage(capsys):
    assert main(["plan", "--model", "qwen3-0.6b", "data.max_length=2048", "--gpus", "2", "--gpu", "rtx4090"]) == 0
    said = capsys.readouterr().out
    assert "Qwen/Qwen3-0.6B (0.60 B) on 2 x rtx4090" in said
    assert [line.split()[0] for line in said.splitlines() if line.strip().startswith(tuple(ORDER))] == ORDER
    assert "hsdp" not in said  # one node
    assert "advice   " in said and "set      parallel.stage=" in said


def test_what_is_advised_is_a_recipe(tmp_path, capsys):
    out = tmp_path / "advised.toml"
    assert main(["plan", "llama8b-fsdp", "--gpus", "8", "--write", str(out)]) == 0
    recipe = load_recipe(out)
    assert isinstance(recipe, Recipe) and recipe.parallel == Parallel(stage=recipe.parallel.stage)
    assert recipe.precision == load_recipe(find_recipe("llama8b-fsdp")).precision
    assert f"parallel.stage={recipe.parallel.stage}" in capsys.readouterr().out
    assert main(["plan", "llama8b-fsdp", "--write", str(out)]) == 2
    assert "exists; name a new file" in capsys.readouterr().err


def test_the_page_draws_the_report(tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert main(["plan", "llama8b-fsdp", "--gpus", "16", "--json", "--html", str(page)]) == 0
    report, text = json.loads(capsys.readouterr().out), page.read_text()
    figures = json.JSONDecoder().raw_decode(text, text.index('{"memory"'))[0]
    assert list(figures) == ["memory", "memory-over-the-step", "traffic", "time", "timeline-of-a-step", "scaling"]
    for name, key, unit in (("memory", "peak", 1e9), ("time", "step", 1.0)):
        drawn = {
            (trace["name"], stage): x
            for trace in figures[name]["data"]
            for stage, x in zip(trace["hovertext"], trace["x"], strict=True)
        }
        told = {(term, row["stage"]): value / unit for row in report["stages"] for term, value in row[key].items()}
        assert drawn == told
    speeds = {trace["name"]: dict(zip(trace["x"], trace["y"], strict=True)) for trace in figures["scaling"]["data"]}
    for row in report["stages"]:
        assert speeds[row["stage"]][16] == pytest.approx(row["tokens_per_second_per_device"])
    assert 8 not in speeds["hsdp"]  # one node
    assert main(["plan", "llama8b-fsdp", "--html", str(page)]) == 2
    assert main(["plan", "llama8b-fsdp", "--html", str(tmp_path / "none" / "page.html")]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama8b-fsdp", "--gpu", "h1000"], "--gpu h1000: must be one of a100-40gb"),
        (["llama8b-fsdp", "--gpu", "a100"], "; did you mean a100-40gb or a100-80gb?"),  # two are called so
        (["llama8b-fsdp", "--gpu", "4090"], "; did you mean rtx4090-24gb?"),
        (["llama8b-fsdp", "--gpu", "RTX-4090"], "; did you mean rtx4090-24gb?"),
        (["llama8b-fsdp", "--gpu", "NVIDIA H200 141GB"], "; did you mean h200-141gb?"),
        (["llama8b-fsdp", "--gpu", "H100-SXM"], "; did you mean h100-80gb?"),
        (["llama8b-fsdp", "--gpu", "mi300x"], "l40s-48gb\n"),
        (["llama8b-fsdp", "--disk-gbps", "-1"], "--disk-gbps -1: must be above 0, or 0 for the usual value"),
        (["llama8b-fsdp", "--link-gbps", "-1"], "--link-gbps -1: must be above 0"),
        (["llama8b-fsdp", "--gpus", "12"], "--gpus 12: must be whole nodes of 8"),
        (["llama8b-fsdp", "--gpus", "0"], "--gpus 0: must be at least 1"),
        (["--model", "llama-3.1-8c"], "its shape is not known here"),
        (["--model", "llama-3.1-8c"], "did you mean llama-3.1-8b?"),
        (["--model", "qwen3-8b", "data.max_length=50000"], "sees at most 40960 tokens"),
        ([], "plan: needs a recipe, or --model"),
        pytest.param(
            ["llama70b-fsdp", "--gpus", "8", "--gpu", "a100-40gb", "--host-gb", "32", "--write", "none.toml"],
            "--write none.toml: fits nowhere here",
            marks=pytest.mark.slow,
        ),
        (["llama70b-hsdp", "--gpus", "24"], "needs 64 ranks, the world has 24"),
        (["llama8b-fsdp", "--network", "-5"], "--network -5: must be above 0"),
        (["llama8b-fsdp", "--per-node", "-1"], "--per-node -1: must be above 0"),
        (["llama8b-fsdp", "--document-tokens", "0"], "--document-tokens 0: must be at least 1"),
    ],
)
def test_what_is_asked_wrongly(words, said, capsys):
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("shardbook: ")


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA B200", "b200-180gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA L40", None),
        ("NVIDIA GB200", None),
        ("CPU", None),
    ],
)
def test_the_gpu_that_cuda_names(device_name, name):
    gpu = gpu_of(device_name)
    assert (gpu if gpu and gpu.a_node else None) == (name and GPUS[name])


def test_a_run_on_known_hardware_forecasts_a_step():
    planner = build_planner(load_recipe(find_recipe("llama8b-fsdp")))
    found = planner.lay_out(planner.recipe, build_cluster("h100", 8))
    words = (found.layout, planner.config, planner.recipe, count_flops(planner.model), planner.document_tokens)
    told = predict_perf_metrics(*words, "NVIDIA H100 80GB HBM3")
    assert told == {"predicted/perf/step_seconds": found.time.seconds}
    assert predict_perf_metrics(*words, "CPU") == {}


def test_a_peak_that_is_off_is_said():
    def said(measured):
        return describe_peak({"memory/peak_bytes": measured, "predicted/memory/peak_bytes": 100 * 2**30})

    assert said(104 * 2**30) == said(96 * 2**30) == "" == describe_peak({"memory/peak_bytes": 1.0})
    assert said(80 * 2**30) == "peak     80.0 GiB measured, 100.0 GiB predicted: +25%"


TP = ("data.max_length=8192", "parallel.tp_size=8", "activation.checkpointing=full")


def test_what_ranks_that_share_matrices_send():
    """Of a block six gathers and five reduce-scatters of all tokens, everything made again; two of each outside, and
    three fp32 numbers a trained token of each rank (notes/axes.md, section 5)."""
    cluster = build_cluster("h100", 64)
    planner = build_planner(plan_of("llama-3.1-8b", *TP))
    found = planner.lay_out(planner.recipe, cluster)
    tokens, told = 8192 * 4096 * 2, 8191 * 8 * 12
    along_shards = [unit.numel * 2 for unit in found.layout.units if unit.numel]
    outside = sum(size for size in along_shards if size > max(along_shards[1:-2]))  # gathered once in a step
    sent = found.comm
    assert sent["all_gather_bytes"] == 2 * sum(along_shards) - outside + (6 * 32 + 2) * tokens + told
    assert sent["reduce_scatter_bytes"] == 2 * sum(along_shards) + (5 * 32 + 2) * tokens
    assert found.tokens == 8 * 8192  # eight groups
    flops = count_flops(planner.model).of(found.tokens, found.tokens * 1200)
    assert found.mfu == pytest.approx(flops / found.time.seconds / 64 / cluster.gpu.flops)
    alone = build_planner(plan_of("llama-3.1-8b", *TP, "parallel.tp_size=1"))
    assert count_flops(alone.model) == count_flops(planner.model)
    shared, whole = found.time, alone.lay_out(alone.recipe, cluster).time
    assert (shared.products, shared.attention) == pytest.approx((whole.products / 8, whole.attention / 8), rel=1e-3)
    ring = (32 * 11 + 4) * tokens * 7 / 8 / (INSIDE * cluster.gpu.link)
    assert ring < shared.exposed < 1.6 * ring  # hops, and what waits for other nodes, beside it


@pytest.mark.parametrize(
    ("model", "gpus", "words", "measured"),
    [
        ("llama-3.1-70b", 256, ("activation.checkpointing=full", "train.per_device_train_batch_size=16"), 597),
        ("llama-3.1-8b", 64, ("activation.checkpointing=selective", "train.per_device_train_batch_size=4"), 4378),
    ],
)
def test_torchtitans_figures(model, gpus, words, measured):
    """Tokens a second of one H100, FSDP x TP 8, rows of 8,192 tokens, bf16, its collectives along tp not hidden: its
    post of June 2025, which does not say the micro-batch. Here products lose nothing by being an eighth as wide."""
    planner = build_planner(plan_of(model, *TP, *words), 8192)
    found = planner.lay_out(planner.recipe, build_cluster("h100", gpus))
    assert found.fits and 1 <= found.speed / measured < 1.35


@pytest.mark.slow
def test_sharing_matrices_is_advised_where_nothing_else_fits():
    report = report_on(plan_of("llama-3.1-70b", "data.max_length=65536"), "h100-80gb", 64)
    best = report.advice.best
    assert best and best.layout.cp_size > 1 and not any(row.fits for row in report.stages.values())
    told = as_json(report)["advice"]
    assert told["take"]["mesh"]["cp"] == told["recipe"]["parallel.cp_size"] == best.layout.cp_size
    assert f"x cp {best.layout.cp_size})" in describe_advice(report)[0]
    assert best.tokens == report.stages["zero3"].tokens  # a step of as many rows
    tensor = report.planner.candidates(report.cluster, sizes=(8, 1, 1))
    assert any(found.fits for found in tensor)  # matrices could be shared too


def test_what_may_share_matrices():
    cluster = build_cluster("h100", 16)
    split = [(1, 2, 1), (1, 4, 1), (1, 8, 1)]  # rows
    layers = [(1, 1, 2)]  # of two nodes
    matrices = [(2, 1, 1), (4, 1, 1), (8, 1, 1)]
    assert build_planner(plan_of("llama-3.1-8b")).parallel_sizes(cluster) == [*matrices, *split, *layers]
    own = build_planner(plan_of("llama-3.1-8b", "parallel.tp_size=4"))
    assert own.parallel_sizes(cluster) == [(1, 1, 1), (2, 1, 1), (8, 1, 1), (4, 2, 1), (4, 1, 2)]
    own = build_planner(plan_of("llama-3.1-8b", "parallel.cp_size=8"))
    assert own.parallel_sizes(cluster) == [(1, 1, 1), (1, 2, 1), (1, 4, 1), (1, 8, 2)]
    own = build_planner(plan_of("llama-3.1-8b", "parallel.pp_size=2"))
    assert own.parallel_sizes(cluster) == [(2, 1, 2), (4, 1, 2), (8, 1, 2), (1, 2, 2), (1, 4, 2), (1, 8, 2), (1, 1, 1)]
    assert build_planner(plan_of("llama-3.1-8b", "lora.r=16")).parallel_sizes(cluster) == split
    twelve = build_planner(plan_of("llama-3.1-8b")).parallel_sizes(build_cluster("h100", 12, a_node=4))
    assert twelve == [*matrices[:2], *split[:2]]  # three nodes
    assert build_planner(plan_of("llama-3.1-8b")).parallel_sizes(cluster, both=True) == [(8, 2, 1), (8, 1, 2)]
    assert build_planner(plan_of("smollm2-135m")).parallel_sizes(cluster, both=True) == [(8, 1, 2)]


CP = ("data.max_length=131072", "parallel.cp_size=8", "activation.checkpointing=full")


def test_what_ranks_that_split_rows_send():
    """Of a block three times queries, keys, values there and their result back, everything made again; 32 heads and 8
    of keys go round (notes/axes.md, section 5). Work is an eighth, that of attention too."""
    cluster = build_cluster("h100", 64)
    planner = build_planner(plan_of("llama-3.1-8b", *CP))
    found = planner.lay_out(planner.recipe, cluster)
    exchanged = 131072 // 8 * (2 * 32 + 2 * 8) * 128 * 2
    assert found.comm["all_to_all_bytes"] == 3 * 32 * exchanged
    assert found.tokens == 8 * 131072
    alone = build_planner(plan_of("llama-3.1-8b", *CP, "parallel.cp_size=1"))
    assert count_flops(alone.model) == count_flops(planner.model)
    split, whole = found, alone.lay_out(alone.recipe, cluster)
    for what in ("products", "attention"):
        assert getattr(split.time, what) == pytest.approx(getattr(whole.time, what) / 8, rel=1e-3)
    assert split.peak.activations == pytest.approx(whole.peak.activations / 8, rel=1e-6)
    flops = count_flops(planner.model).of(found.tokens, found.tokens * 1200)
    assert found.mfu == pytest.approx(flops / found.time.seconds / 64 / cluster.gpu.flops)
    ring = 3 * 32 * exchanged * 7 / 8 / (INSIDE * cluster.gpu.link)
    assert ring < inside_seconds(found.layout, planner.config, planner.recipe, cluster) < 1.6 * ring


def test_more_ranks_than_a_node_has_are_told():
    report = report_on(plan_of("smollm2-135m", "parallel.tp_size=8", "data.max_length=2048"), "h100", 8, a_node=4)
    said, *advised = describe_shared(report)
    assert all(line.endswith("(advised)") for line in advised)
    assert said.startswith("tensor   8 ranks share matrices") and "slow: a node has 4 ranks" in said
    assert "heads do not divide" in said  # nine
    assert describe_shared(report_on(plan_of("llama-3.2-1b"), "h100", 8)) == []
    planner = build_planner(plan_of("llama-3.2-1b", "parallel.tp_size=8"))
    found = planner.lay_out(planner.recipe, build_cluster("h100", 8))
    assert describe_sharing(found.layout) == "8 ranks share matrices, and tokens between them"
    report = report_on(plan_of("smollm2-135m", "parallel.cp_size=8", "data.max_length=2048"), "h100", 8, a_node=4)
    said, *advised = describe_shared(report)
    assert all(line.endswith("(advised)") for line in advised)
    assert said.startswith("context  8 ranks split each row") and "a rank has 2 of them or 1" in said
    assert "a node has 4 ranks" in said


def test_a_dense_mask_that_is_named_counts():
    """A byte for each pair of tokens of a packed row, on every rank that splits it."""
    long = ("data.max_length=32768", "parallel.cp_size=8", "activation.checkpointing=full")
    cluster, peaks = build_cluster("h100", 8), {}
    for words in ((), ("model.attention=sdpa",), ("model.attention=sdpa", "data.packing=false")):
        planner = build_planner(plan_of("llama-3.1-8b", *long, *words))
        peaks[words] = planner.lay_out(planner.recipe, cluster).peak
    none, dense, plain = peaks.values()
    assert dense.activations - none.activations >= 32768**2 and plain.total == none.total


@pytest.mark.slow
def test_an_advice_that_shares_what_the_recipe_does_not_says_so():
    report = report_on(plan_of("llama-3.1-70b", "data.max_length=65536"), "h100-80gb", 64)
    assert [line for line in describe_shared(report) if line.startswith("context  4 ranks") and "(advised)" in line]
    assert "ddp with cp 4 does not fit" in report.advice.why


PARAMETERS = {  # as the models' cards and papers round them
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_248_023_552,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-moe": 692_036_928,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3.5-9b": 8_953_803_264,
    "gemma-3-4b": 3_880_263_168,  # the text
    "gemma-3-27b": 27_009_346_304,
    "gpt-oss-20b": 20_914_757_184,
    "ministral-8b": 8_019_808_256,
    "glm-4-9b": 9_400_279_040,
    "phi-4": 14_659_507_200,
}


def test_the_shapes_have_the_parameters_of_the_published_models():
    words = (
        "data.max_length=1024",
        "data.packing=false",
    )  # of one of them, recurrent blocks see all documents of a row
    found = {name: build_planner(plan_of(name, *words)).parameters for name in known_shapes()}
    assert found == PARAMETERS
    assert all(hub_id(name) in known["ids"] for name, known in known_shapes().items() if "smollm2" not in name)


def test_every_gpu_has_its_source():
    for gpu in GPUS.values():  # one that plans are made for has all figures, another its FLOPs alone
        told = [bool(figure) for figure in astuple(gpu)]
        assert all(told[:-1]) or told == [True] * 3 + [False] * 9 + [True]
        assert gpu.flops > gpu.memory


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


def test_scaling_as_the_page_has_it():
    recipe = load_recipe(find_recipe("llama8b-fsdp"))
    planner = build_planner(recipe)

    def found(gpus, stage, nics=0):
        cluster = build_cluster("h100", gpus, nics)
        return planner.lay_out(planner.under(stage, cluster), cluster).time

    waits = [found(gpus, "zero3") for gpus in (8, 64, 512)]
    assert [f"{time.exposed / time.seconds:.1%}" for time in waits] == ["1.4%", "1.7%", "2.6%"]
    assert [f"{waits[0].seconds / time.seconds:.0%}" for time in waits] == ["100%", "101%", "100%"]
    slow = [waits[0].seconds / found(gpus, stage, 400).seconds for stage in ("zero3", "hsdp") for gpus in (64, 512)]
    assert [f"{share:.0%}" for share in slow] == ["55%", "48%", "64%", "59%"]


def test_no_gpu_is_hidden_behind_the_row_of_another():
    assert all(gpu_of(f"NVIDIA {gpu.cuda}") is gpu for gpu in GPUS.values())


def test_the_numbers_of_a_candidate_are_formatted_once():
    """JSON, the terminal's table and the advice have the same values."""
    report = report_on(load_recipe(find_recipe("llama8b-fsdp")), "h100-80gb", 16)
    best, table = report.advice.best, as_table(report)
    shown = {key: fact.text for key, fact in facts(best).items()}
    row = as_json(report)["advice"]["take"]
    assert {key: fact.value for key, fact in facts(best).items()}.items() <= row.items()
    assert (shown["peak_bytes"], shown["mfu"]) == (f"{best.peak.total / 1e9:,.1f}", f"{best.mfu:.2f}")
    assert f"{shown['peak_bytes']} GB, {shown['step_seconds']} s a step" in describe_advice(report)[0]
    for column, key in (
        ("peak GB", "peak_bytes"),
        ("waits", "waiting_share"),
        ("GPU-h/B", "gpu_hours_per_billion_tokens"),
    ):
        (cells,) = [list(one.cells) for one in table.columns if one.header == column]
        assert [str(cell) for cell in cells] == [facts(one)[key].text for one in (*report.stages.values(), best)]
