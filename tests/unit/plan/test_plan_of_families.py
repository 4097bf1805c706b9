"""A plan of each family that trains, as a whole and in pipeline stages, of a block each too: it is made, or says why
not, and takes no block for a head."""

import json
import warnings

import families
import pytest
from tiny import said_by
from transformers import CONFIG_MAPPING

from shardbook.parallel.placement import World, check_recipe, place_model
from shardbook.plan.events import tied_numel
from shardbook.plan.hardware import build_cluster
from shardbook.plan.measure_blocks import Unmeasured
from shardbook.plan.peak import predict_moments
from shardbook.plan.speed import predict_step
from shardbook.recipe import Recipe, RecipeError, resolve_precision

KINDS = {family: said["kind"] for family, said in json.loads(families.DATA.read_text()).items()}
TRAINED = [family for family, kind in KINDS.items() if kind in ("packed", "rows") and family in CONFIG_MAPPING]
# a block with a parameter of one row; so few layers that keys cannot be shared; two layers in a block; biases in files
FEW = ["apertus", "gemma3n_text", "longcat_flash", "glm4_moe", "lfm2"]
# products of one expert after another, tables of 256 positions, a cast by hand
NOT_MEASURED = ["longcat_flash", "dbrx", "jetmoe", "qwen4_exp_text", "mpt", "openai-gpt", "xlstm"]
STAGES = (1, 2, 4)


def place(family, stages, rank, **more):
    """The layout of a global `rank` of two for each stage."""
    settings = {
        "model": {"path": "there"},
        "train": {"steps": 1, "gradient_accumulation_steps": 4},
        "data": {"packing": KINDS[family] == "packed", "max_length": 2048},
        "parallel": {"stage": "zero3", "pp_size": stages, **more},
        "precision": {"params": "bf16"},
    }
    recipe, config = resolve_precision(Recipe.model_validate(settings), "cuda"), families.small_config(family)
    check_recipe(recipe, config)
    world = 2 * stages
    return place_model(recipe, World(world, world, rank, None), config, None)


def names_of_moments(placed):
    recipe, config, layout = placed.recipe, placed.config, placed.layout
    moments = predict_moments(layout, config, recipe)
    predict_step(layout, config, recipe, placed.flops, 100.0, build_cluster("h100-80gb", 8))
    assert all(peak.total > 0 for peak in moments.values())
    return " ".join(moments)


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in FEW else [pytest.mark.slow]) for f in TRAINED])
def test_every_stage_of_it_has_a_plan(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for stages in STAGES:
            try:
                named = [names_of_moments(place(family, stages, 2 * stage)) for stage in range(stages)]
            except Unmeasured as error:
                assert family in NOT_MEASURED, error
            except RecipeError as error:  # it may not be split
                assert stages > 1 and "together" in json.loads(families.DATA.read_text())[family], error
            else:
                assert family not in NOT_MEASURED
                assert not [names for names in named[:-1] if "head" in names or "loss" in names], named
                assert "loss" in named[-1] and all("blocks" in names or "block" in names for names in named), named


def test_the_tied_weight_is_no_stack_of_experts():
    """Under ep the last stage has units of experts before its head."""
    for rank in range(4):
        placed = place("lfm2_moe", 2, rank, ep_size=2)
        config = placed.config
        assert config.tie_word_embeddings
        assert tied_numel(placed.layout, rank) == config.vocab_size // 2 * config.hidden_size


def test_experts_that_are_multiplied_one_by_one_are_refused_the_interleaved_schedule():
    """Their rows differ in each micro-batch, as those of experts in four bits do."""
    interleaved = {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}
    for family in ("dbrx", "jetmoe", "longcat_flash"):
        assert "multiplied one by one" in said_by(place, family, 2, 0, **interleaved)
        place(family, 2, 0)
    place("glm4_moe", 2, 0, **interleaved)
