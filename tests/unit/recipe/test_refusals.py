"""What does not go with what: all of a recipe's contradictions are named, each row of the table has a recipe that
breaks it alone, and plan, translate, comparisons, the library and the docs' matrix ask this table."""

import json
import runpy
from pathlib import Path
from typing import get_args

import pytest
from torch import nn

from shardbook import cli
from shardbook.compare import read_variants
from shardbook.parallel.library import shard_model
from shardbook.plan.cluster import build_planner
from shardbook.plan.hardware import build_cluster
from shardbook.recipe import (
    STAGES,
    Parallel,
    Recipe,
    RecipeError,
    Train,
    check_parallel,
    conflicts,
    find_recipe,
    list_recipes,
    load_recipe,
    refusals,
    with_settings,
)
from shardbook.translate import translate

RECIPE = Recipe(train=Train(steps=3))
PAGE = Path(__file__).parents[3] / "docs" / "matrix.md"
matrix = runpy.run_path(str(PAGE.with_suffix(".py")))
CAPABILITIES, NEEDS, find_cells, write_matrix = map(matrix.get, ("CAPABILITIES", "NEEDS", "find_cells", "write_matrix"))
TWO = {"parallel.pp_size": 2}
LOOPED = {"parallel.pipeline_schedule": "interleaved", "parallel.pipeline_chunks": 2}
HSDP = {"parallel.stage": "hsdp", "parallel.dp_shard_size": 2}
AUX = {"train.router_aux_loss_coef": 0.1}
MOVES = {"train.router_bias_update_rate": 0.001}
DISTILL = {"method": "distill", "distill.teacher": "x"}
DPO = {"method": "dpo"}
HOST = {"offload.optimizer": "cpu"}
ALONE = [  # settings that break one row each, in the table's order
    {"parallel.dp_shard_size": 0},
    {"parallel.dp_replicate_size": 2},
    {"parallel.dp_shard_size": 2, "parallel.stage": "ddp"},
    {"parallel.stage": "hsdp"},
    {"parallel.reshard_min_params": 5, "parallel.stage": "zero1"},
    {"parallel.backward_prefetch": 1, "parallel.stage": "ddp"},
    {"parallel.forward_prefetch": 1, "parallel.stage": "ddp"},
    {"parallel.quantize_gradients": [8, 4], "parallel.stage": "fsdp"},
    {"parallel.stage": "zeropp"},
    HSDP | {"parallel.quantize_gradients": [8]},
    {"parallel.pipeline_chunks": 2},
    TWO | LOOPED | {"parallel.pipeline_chunks": 1, "train.gradient_accumulation_steps": 2},
    TWO | {"parallel.pipeline_chunks": 2},
    TWO | LOOPED | {"train.gradient_accumulation_steps": 3},
    TWO | LOOPED | {"train.gradient_accumulation_steps": 4, "data.packing": False},
    {"parallel.cp_size": 3},
    {"parallel.cp_size": 2, "parallel.stage": "zeropp", "parallel.quantize_weights": 8},
    HSDP | {"parallel.cp_size": 2, "parallel.secondary_shard": 2},
    {"parallel.tp_size": 2, "lora.r": 4, "lora.lora_dropout": 0.1},
    {"parallel.cp_size": 2, "model.attention": "eager"},
    TWO | {"offload.activations": "cpu", "activation.checkpointing": "full"},
    {"parallel.tp_size": 2, "optim.name": "muon"},
    {"preference.beta": 0.2},
    {"preference.loss_type": "ipo", "method": "simpo"},
    {"preference.label_smoothing": 0.1},
    {"preference.rpo_alpha": 1.0},
    {"preference.simpo_gamma": 1.0, "method": "orpo"},
    {"preference.precompute_ref_log_probs": False},
    {"distill.teacher": "x"},
    {"distill.teacher_revision": "abc"},
    {"distill.temperature": 2.0},
    {"distill.kd_ratio": 0.1},
    DPO | {"preference.label_smoothing": 0.1},
    DPO | {"preference.label_smoothing": 0.5, "preference.loss_type": "robust"},
    DPO | {"preference.precompute_ref_log_probs": False},
    DPO | {"preference.precompute_ref_log_probs": False, "lora.r": 4, "lora.modules_to_save": ["norm"]},
    DPO | {"preference.precompute_ref_log_probs": False, "lora.r": 4, "lora.adapter": "x"},
    {"method": "distill"},
    DISTILL | {"distill.kd_ratio": 0.0},
    DISTILL | HOST,
    DISTILL | {"offload.params": "cpu"},
    DISTILL | {"offload.activations": "cpu", "activation.checkpointing": "full"},
    {"method": "reward", "generate.steps": 1},
    {"train.eval_steps": 5},
    {"precision.master": "bf16"},
    {"precision.frozen": "bf16"},
    {"model.load_in_4bit": True},
    {"model.load_in_4bit": True, "lora.r": 4, "parallel.stage": "zeropp", "parallel.quantize_weights": 8},
    {"model.load_in_4bit": True, "lora.r": 4, "parallel.stage": "zeropp", "parallel.secondary_shard": 2},
    {"lora.r": 4} | HOST,
    {"optim.name": "lion"} | HOST,
    {"parallel.stage": "ddp"} | HOST,
    {"offload.params": "cpu", "parallel.stage": "zero2"},
    {"train.async_save": True, "offload.optimizer": "nvme"},
    {"parallel.stage": "zeropp", "parallel.secondary_shard": 2} | HOST,
    {"train.check_steps": 10},
    HOST | {"train.check_steps": 10, "train.deterministic": True},
    TWO | {"train.check_steps": 10, "train.deterministic": True},
    {"parallel.ep_size": 2, "parallel.tp_size": 2},
    {"parallel.ep_size": 2, "train.compile": True, "activation.checkpointing": "full"},
    {"parallel.ep_size": 2, "parallel.forward_prefetch": 1, "activation.checkpointing": "full"},
    {"parallel.ep_size": 2, "optim.name": "adamw_8bit"},
    TWO | LOOPED | {"parallel.ep_size": 2, "train.gradient_accumulation_steps": 2},
    {"parallel.ep_size": 2, "preference.precompute_ref_log_probs": False, "lora.r": 4} | DPO,
    DPO | AUX,
    TWO | AUX,
    AUX | {"train.compile": True, "activation.checkpointing": "full"},
    DPO | MOVES,
    MOVES | {"lora.r": 4},
    {"train.freeze_router": True, "lora.r": 4},
    {"offload.activations": "cpu"},
    {"activation.checkpointing": "budget:0.5"},
]


def broken(settings):
    return conflicts(with_settings(RECIPE, settings))


def test_each_row_has_a_recipe_that_breaks_it_alone():
    found = [broken(settings) for settings in ALONE]
    assert [len(each) for each in found] == [1] * len(ALONE), [
        s for s, f in zip(ALONE, found, strict=True) if len(f) != 1
    ]
    assert [each[0].rule for each in found] == list(refusals.RULES)


def test_a_row_that_is_gone_is_seen(monkeypatch):
    for at, settings in enumerate(ALONE):
        monkeypatch.setattr(refusals, "RULES", [rule for rule in refusals.RULES if rule is not refusals.RULES[at]])
        assert not broken(settings), settings
        monkeypatch.undo()


def test_recipes_that_load_break_none():
    for path in list_recipes().values():
        assert conflicts(load_recipe(path)) == []


@pytest.mark.parametrize(
    "words, parts",
    [
        (
            ["parallel.tp_size=2", "optim.name=muon", "train.eval_steps=5"],
            ["and optim.name = 'muon': they do", "eval_steps = 5: needs"],
        ),
        (
            ["parallel.stage=ddp", "parallel.forward_prefetch=1", "offload.optimizer=cpu"],
            [
                "forward_prefetch = 1: ddp gathers nothing",
                "offload.optimizer = 'cpu' and parallel.stage = 'ddp': every",
            ],
        ),
        (
            ["precision.master=bf16", "preference.beta=0.2", "model.load_in_4bit=true"],
            ["'bf16' and optim.name = 'adamw': rounded", "beta = 0.2 and method", "true: four bits cannot be trained"],
        ),
        (
            ["parallel.tp_size=2", "parallel.cp_size=2", "parallel.stage=zeropp", "parallel.quantize_weights=8"],
            ["tp_size = 2, parallel.cp_size = 2 and parallel.stage = 'zeropp'"],
        ),
        (
            ["train.async_save=wait", "offload.optimizer=nvme", "offload.path=/scratch"],
            [
                "train.async_save = 'wait' and offload.optimizer = 'nvme': state on the disk",
                "leave train.async_save out",
            ],
        ),
    ],
)
def test_all_contradictions_are_named_in_one_line(words, parts, tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text("[train]\nsteps = 3\n")
    assert cli.main(["train", str(path), *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(part in error for part in parts), error


def test_a_loop_of_ones_own_asks_the_table():
    check_parallel(Parallel(stage="zeropp", quantize_weights=8))
    with pytest.raises(RecipeError) as error:
        shard_model(nn.Linear(2, 2), blocks=[], stage=Parallel(stage="zero1", reshard_min_params=5, quantize_weights=8))
    assert "zero1 keeps every parameter" in str(error.value) and "zero1 does not have it" in str(error.value)


PLANTED = refusals.Rule("activation.checkpointing=full", "parallel.stage=zero3", "planted", "leave it")


def test_the_planner_asks_the_table(monkeypatch):
    planner, cluster = build_planner(load_recipe(find_recipe("smollm2-135m-fsdp"))), build_cluster("h100", 8)

    def kinds():
        return {
            (found.layout.stage.name, found.recipe.activation.checkpointing, found.recipe.offload.optimizer)
            for tier in ("none", "cpu")
            for found in planner.candidates(cluster, tier)
        }

    before = kinds()
    assert ("zero3", "full", "none") in before and ("ddp", "none", "cpu") not in before
    monkeypatch.setattr(refusals, "RULES", (*refusals.RULES, PLANTED))
    assert before - kinds() == {("zero3", "full", tier) for tier in ("none", "cpu")}


def test_what_a_plan_tries_is_a_recipe_that_loads():
    """Also of a recipe that has something which goes with some candidates only."""
    for name, words in (
        ("smollm2-135m-offload", []),
        ("smollm2-135m-distill", []),
        ("smollm2-135m-fsdp", ["parallel.reshard_min_params=100000"]),
        ("smollm2-135m-tp", []),
    ):
        planner = build_planner(load_recipe(find_recipe(name), words))
        cluster = build_cluster("h100", 16)
        stages = planner.stages(cluster)
        tried = [*stages.values(), *planner.candidates(cluster), *planner.candidates(cluster, "cpu")]
        assert tried and stages and not [found for each in tried for found in conflicts(each.recipe)]


def test_translate_asks_the_table(monkeypatch, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"sequence_parallel_size": 2, "gradient_clipping": 1.0}))
    assert translate(path)[0]["parallel.cp_size"] == 2
    planted = refusals.Rule("parallel.cp_size!=1", "optim.max_grad_norm!=0.0", "planted", "leave it")
    monkeypatch.setattr(refusals, "RULES", (*refusals.RULES, planted))
    settings, entries = translate(path)
    [size] = [entry for entry in entries if entry.refused]
    assert "parallel.cp_size" not in settings and "max_grad_norm = 1.0: planted" in size.remark


def test_a_comparison_names_the_variant_and_all_that_is_wrong_with_it():
    with pytest.raises(
        RecipeError, match=r"^variant ddp,lora.r=4,offload.optimizer=cpu: lora.r = 4 and .*; offload\.opt"
    ):
        read_variants("ddp,lora.r=4,offload.optimizer=cpu", find_recipe("smollm2-135m-fsdp"), [], 2)


def test_a_capability_by_itself_is_fine():
    for name, settings in CAPABILITIES.items():
        assert not broken(NEEDS.get(name, {}) | settings), name


def test_the_page_is_what_the_table_says(monkeypatch):
    page = PAGE.read_text().split("```")[1].removeprefix("text\n")
    assert page == write_matrix() + "\n", "docs/matrix.md is old: make matrix"
    monkeypatch.setattr(refusals, "RULES", [rule for rule in refusals.RULES if rule.others != "model.attention=eager"])
    assert page != write_matrix() + "\n"


def values_of(key):
    section, _, name = key.rpartition(".")
    model = Recipe.model_fields[section].annotation if section else Recipe
    field = model.model_fields[name]
    return [value for value in get_args(field.annotation) if value != field.default]


def test_the_matrix_has_every_stage_method_optimizer_and_tier():
    keys = "method", "optim.name", "offload.optimizer", "offload.params", "offload.activations"
    every = [{"parallel.stage": name} for name in STAGES] + [{key: value} for key in keys for value in values_of(key)]
    assert len(every) == 20 and all(settings in CAPABILITIES.values() for settings in every)


def test_the_matrix_says_each_pair_and_why():
    lines = write_matrix().splitlines()
    refused = sum(bool(found) for found in find_cells().values())
    rows = lines[2 : 2 + len(CAPABILITIES)]
    assert sum(row[22:].count("-") for row in rows) == refused > 80
    assert max(map(len, rows)) <= 110
    assert any(
        line.startswith("cp_size with eager attention: ") and "set model.attention=sdpa" in line for line in lines
    )
