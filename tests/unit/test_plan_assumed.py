"""What a plan takes for granted is printed, written and can be said otherwise; and what it advises beside it."""

import json
import tomllib

import pytest

from shardbook.cli import PLAIN, main
from shardbook.gpus import GPUS
from shardbook.plan.hardware import build_cluster
from shardbook.plan.recipe_file import write_recipe_file
from shardbook.plan.report import Report, as_json, as_table, describe_advice, make_report
from shardbook.recipe import load_recipe, parse_recipe


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
