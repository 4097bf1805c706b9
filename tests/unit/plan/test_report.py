"""The report of a plan: one value for JSON, table and words; what it takes for granted, and what is asked wrongly."""

import json
import tomllib

import pytest
from plans import ORDER, plan_of, report_on

from shardbook.cli import PLAIN, main
from shardbook.compare.plan_page import write_plan_page
from shardbook.gpus import GPUS
from shardbook.plan.block_traffic import describe_sharing
from shardbook.plan.cluster import build_planner
from shardbook.plan.hardware import (
    build_cluster,
)
from shardbook.plan.recipe_file import write_recipe_file
from shardbook.plan.report import (
    Report,
    as_json,
    as_table,
    describe_advice,
    describe_shared,
    facts,
    make_report,
)
from shardbook.recipe import STAGES, find_recipe, load_recipe, parse_recipe


def plan(gpu: str, gpus: int, **box: float) -> Report:
    recipe = parse_recipe(PLAIN, "test", ["model.path=Qwen/Qwen3-32B"])
    return make_report(recipe, gpu, build_cluster(gpu, gpus, **box))


@pytest.fixture(scope="module")
def usual():
    return {"a100": plan("a100-40gb", 4), "4090": plan("rtx4090", 8)}


def tiers(report):
    offload = report.advice.best.recipe.offload
    return offload.optimizer, offload.params


def test_a_box_is_what_such_a_machine_is(usual):
    """Eight 4090 have no P2P, half a terabyte of memory and one drive; four A100 have half a DGX's memory."""
    assert usual["4090"].cluster.node_words() == (
        "a node has 512 GB of memory (--host-gb), drives that read 7 GB/s (--disk-gbps), and 16 GB/s from a GPU to the "
        "others (--link-gbps, through the node's memory: no P2P)"
    )
    assert usual["a100"].cluster.node_words() == (
        "a node has 512 GB of memory (--host-gb), drives that read 27 GB/s (--disk-gbps), and 300 GB/s from a GPU to "
        "the others (--link-gbps)"
    )
    assert all(gpu.link == gpu.pcie / 2 for gpu in GPUS.values() if not gpu.has_p2p)


def test_the_answer_changes_only_with_an_assumption(usual):
    """A 32B with 16 bytes a parameter is 524 GB: a node's memory holds it or a drive does, and QLoRA fits a card."""
    assert tiers(usual["4090"]) == ("nvme", "nvme") and tiers(usual["a100"]) == ("nvme", "none")
    larger = plan("rtx4090", 8, host_gb=1024)
    assert tiers(larger) == ("cpu", "cpu") and tiers(plan("a100-40gb", 4, host_gb=1024))[0] == "cpu"
    slow = plan("rtx4090", 8, disk=3.5)
    before, after = (report.advice.best.time for report in (usual["4090"], slow))
    assert after.seconds - after.offload == before.seconds - before.offload and after.offload > 1.5 * before.offload
    wide = plan("rtx4090", 8, link=32)
    assert "no P2P" not in wide.cluster.node_words()
    for stage, found in wide.stages.items():
        assert found.peak == usual["4090"].stages[stage].peak
        assert found.time.exposed < usual["4090"].stages[stage].time.exposed


def test_what_is_assumed_is_printed_and_in_the_json(usual):
    said = as_json(usual["4090"])
    assert (said["host_gb"], said["disk_gbps"], said["link_gbps"], said["max_length"]) == (512, 7, 16, 8192)
    title = str(as_table(usual["4090"]).title)
    assert usual["4090"].cluster.node_words() in title and "checkpointing selective, compiled, adamw" in title


def test_the_advised_layout_has_a_row_and_gpus_says_how_many_would_do(usual):
    columns = as_table(usual["a100"]).columns
    names, fewest = (list(column.cells) for column in (columns[0], columns[-1]))
    assert dict(zip(names, fewest, strict=True)) == {
        "ddp": "-",
        "zero1": "-",
        "zero2": "-",
        "zero3": "32 full",
        "advised": "",
    }
    rows = {row["stage"]: row for row in as_json(usual["a100"])["stages"]}
    assert (rows["zero3"]["min_gpus"], rows["zero3"]["min_gpus_full"]) == (None, 32)


def test_adapters_are_said_where_all_of_a_model_takes_a_tier(usual):
    (line,) = [line for line in describe_advice(usual["a100"]) if line.startswith("adapters")]
    assert "LoRA (lora.r=16, " in line and "; QLoRA (lora.r=16 model.load_in_4bit=true, " in line
    for name, found in usual["a100"].adapted.items():
        assert found.fits and found.recipe.lora.r == 16 and found.recipe.offload.optimizer == "none"
        assert found.recipe.model.load_in_4bit == (name == "QLoRA")
    advice = as_json(usual["a100"])["advice"]
    each = {name: row["mfu"] / row["tokens_per_second_per_device"] for name, row in advice["adapters"].items()}
    whole = advice["take"]["mfu"] / advice["take"]["tokens_per_second_per_device"]
    for flops in each.values():  # of a token: a frozen weight has no gradient, two of a trained one's six
        assert 4 / 6 < flops / whole < 4.6 / 6
    small = make_report(parse_recipe(PLAIN, "test", ["model.path=llama-3.2-1b"]), "h100", build_cluster("h100", 8))
    assert small.adapted == {} and not any(line.startswith("adapters") for line in describe_advice(small))


def test_what_is_written_is_what_differs_with_the_reason(usual, tmp_path):
    write_recipe_file(usual["4090"], file := tmp_path / "advised.toml")
    best = usual["4090"].advice.best.recipe
    assert load_recipe(file) == best.model_copy(update={"precision": usual["4090"].asked})
    text = file.read_text()
    assert tomllib.loads(text)["train"] == {"epochs": 1, "compile": True}  # no key at its default
    assert 'checkpointing = "full"  # the cheapest recompute with which activations fit; it was selective\n' in text
    assert 'path = "/scratch"  # a directory on a local disk of each node\n' in text
    assert "# 1 node of 8, 100 Gbit/s a node; a node has 512 GB of memory" in text


def test_a_plan_without_a_recipe_says_what_it_plans(capsys):
    assert main(["plan", "--model", "llama-3.2-1b", "--gpus", "1"]) == 0
    assert "assumed  no recipe: rows and settings above are those of the shipped recipes; " in capsys.readouterr().out
    assert main(["plan", "--model", "llama-3.2-1b", "--gpus", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_length"] == 8192


def test_a_node_may_be_said_to_be_another():
    cluster = build_cluster("l40s", 8, disk=3, link=12.5, host_gb=256)
    assert (cluster.gpu.disk, cluster.gpu.link, cluster.node_gb) == (3e9, 12.5e9, 256)


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


SHARED = ("qwen3-30b-a3b-lora", "parallel.ep_size=8")
UP_TO_EIGHT = "must be from 1 to 8, where all tokens choose the experts of one rank"
NONE_SHARED = "no ranks share experts, so there is no busiest one; set parallel.ep_size, or leave it out"


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
        (["llama8b-fsdp", "--expert-load", "2"], f"--expert-load 2: {NONE_SHARED}"),
        (["qwen3-30b-a3b-lora", "--expert-load", "1.5"], f"--expert-load 1.5: {NONE_SHARED}"),
        ([*SHARED, "--expert-load", "0.9"], f"--expert-load 0.9: {UP_TO_EIGHT}"),
        ([*SHARED, "--expert-load", "8.1"], f"--expert-load 8.1: {UP_TO_EIGHT}"),
        ([*SHARED, "--expert-load", "nan"], f"--expert-load nan: {UP_TO_EIGHT}"),
    ],
)
def test_what_is_asked_wrongly(words, said, capsys):
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("shardbook: ")


def test_more_ranks_than_a_node_has_are_told():
    report = report_on(plan_of("smollm2-135m", "parallel.tp_size=8", "data.max_length=2048"), "h100", 8, a_node=4)
    said, *advised = describe_shared(report)
    assert all(line.endswith("(advised)") for line in advised)
    assert said.startswith("tensor   8 ranks share matrices") and "slow: a node has 4 ranks" in said
    assert "heads do not divide" in said  # nine
    assert describe_shared(report_on(plan_of("llama-3.2-1b"), "h100", 8)) == []
    for words in ([], ["lora.r=16"], ["lora.r=16", "model.load_in_4bit=true", "model.bnb_4bit_use_double_quant=true"]):
        planner = build_planner(plan_of("llama-3.2-1b", "parallel.tp_size=8", *words))
        found = planner.lay_out(planner.recipe, build_cluster("h100", 8))
        assert describe_sharing(found.layout) == "8 ranks share matrices, and tokens between them"
    report = report_on(plan_of("smollm2-135m", "parallel.cp_size=8", "data.max_length=2048"), "h100", 8, a_node=4)
    said, *advised = describe_shared(report)
    assert all(line.endswith("(advised)") for line in advised)
    assert said.startswith("context  8 ranks split each row") and "a rank has 2 of them or 1" in said
    assert "a node has 4 ranks" in said


def test_a_plan_has_the_worst_that_routers_can_do(tmp_path):
    """In JSON, words and the page; a load changes what is planned, and not what is worst."""
    words = ("parallel.ep_size=4", "data.max_length=16384", "train.compile=false", "parallel.stage=zero1")
    recipe, cluster = plan_of("qwen3-30b-a3b", *words, "lora.r=16"), build_cluster("h100", 8)
    even, loaded = (make_report(recipe, "h100", cluster, expert_load=load) for load in (1.0, 2.5))
    for report, load, share in ((even, 1, ""), (loaded, 2.5, "2.5 times ")):
        row = next(each for each in as_json(report)["stages"] if each["stage"] == "zero1")
        assert row["expert_load"] == load and row["worst_expert_load"]["load"] == 4
        planned, worst = (size / 1e9 for size in (row["peak_bytes"], row["worst_expert_load"]["peak_bytes"]))
        assert planned < worst
        line, *_ = describe_shared(report)
        told = (
            f"; a rank with {share}the mean of rows takes {planned:.1f} GB, at worst, with 4 times it, {worst:.1f} GB"
        )
        assert line.startswith("experts") and line.endswith(told)
        assert (", expert load 2.5" in as_table(report).title) == (load > 1)
    peaks = [report.stages["zero1"].peak.total for report in (even, loaded)]
    assert peaks[0] < peaks[1] and even.stages["zero1"].worst_peak == loaded.stages["zero1"].worst_peak
    dense = as_json(report_on(plan_of("smollm2-135m", "data.max_length=2048"), "h100", 8))
    assert not any("expert_load" in row for row in dense["stages"])
    write_plan_page(tmp_path / "page.html", loaded)
    assert f"a rank with 2.5 times the mean of rows takes {planned:.1f} GB" in (tmp_path / "page.html").read_text()


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
