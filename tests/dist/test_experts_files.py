"""Files know nothing of the ranks that share experts: what was saved, exported or evaluated with them is what one
process reads and writes."""

import json

import pytest
import torch
from families import write_family
from safetensors.torch import load_file
from test_eval import evaluated, last
from test_tensor_files import LOADED, RANDOM, cut_back, export_of, move, saved_tensors
from transformers import AutoModelForCausalLM
from world import losses, run_train, run_world

SAVING = ("train.steps=5", "train.save_steps=2", "train.eval_steps=2", "data.eval_size=6")
ROWS = "train.gradient_accumulation_steps="
# four rows a step in each: world, words
LAYOUTS = {
    "ep2 x dp2": (4, ["parallel.ep_size=2"]),
    "ep4": (4, ["parallel.ep_size=4"]),
    "one": (1, [f"{ROWS}4"]),
    "zero3": (2, [f"{ROWS}2"]),
    "ddp, ep2": (2, ["parallel.ep_size=2", "parallel.stage=ddp", f"{ROWS}2"]),
    "zero1, ep2": (2, ["parallel.ep_size=2", "parallel.stage=zero1", f"{ROWS}2"]),
    "hsdp, ep2": (4, ["parallel.ep_size=2", "parallel.stage=hsdp", "parallel.dp_shard_size=2"]),
}
FIRST = "ep2 x dp2"


@pytest.fixture(scope="module")
def folder(tiny):
    return write_family(tiny / "mixtral", "mixtral")


@pytest.fixture(scope="module")
def of_model(folder):
    return (f"model.path={folder}", *SAVING)


@pytest.fixture(scope="module")
def straight(recipe, of_model):
    """Five steps without a stop, on ep 2 with zero3 on four ranks; checkpoints at 2, 4 and 5."""
    world, words = LAYOUTS[FIRST]
    return run_train(world, recipe, "straight", *of_model, *words)


def test_a_run_goes_on_in_its_world_to_the_bit(recipe, of_model, straight):
    run = cut_back(straight, "again")
    world, words = LAYOUTS[FIRST]
    run_train(world, recipe, run.name, *of_model, *words)
    ours, theirs = export_of(run), export_of(straight)
    assert losses(run) == losses(straight) and len(losses(run)) == 5
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp, ep2", "one"])
def test_a_run_goes_on_in_another_layout(name, recipe, of_model, straight):
    run = cut_back(straight, f"to {name}".replace(",", "").replace(" ", "-"))
    world, words = LAYOUTS[name]
    run_train(world, recipe, run.name, *of_model, *words)
    assert losses(run) == pytest.approx(losses(straight), rel=1e-6)
    assert last(run)["loss"] == pytest.approx(last(straight)["loss"], rel=1e-6)


@pytest.mark.parametrize(
    "way",
    [
        ["ep4", "ddp, ep2", "one"],
        pytest.param(["zero3", "hsdp, ep2", "zero1, ep2", FIRST], marks=pytest.mark.slow),
    ],
    ids=["few", "others"],
)
def test_a_checkpoint_is_the_same_to_the_bit_from_layout_to_layout(way, recipe, of_model, straight, tmp_path):
    """Each saves what it loaded of the one before."""
    newest = straight / "checkpoints" / "step-000004"
    wanted = saved_tensors(newest)
    for number, name in enumerate(way):
        world, words = LAYOUTS[name]
        run_world(world, move, [*of_model, *words], recipe, newest, tmp_path / str(number))
        newest = tmp_path / str(number) / "step-000004"
        found = saved_tensors(newest)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name


@pytest.mark.parametrize(
    "family", ["mixtral", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3_moe", "granitemoe", "gpt_oss"))]
)
def test_an_export_has_the_files_of_transformers(family, recipe, tmp_path):
    """Names, shapes and values of weights that a rate of 1e-30 moves none of; and the loss is that without ep."""
    source = write_family(tmp_path / family, family)
    words = (*LOADED, f"model.path={source}")
    run = run_train(2, recipe, f"{family}-ep2", *words, "parallel.ep_size=2")
    plain = run_train(1, recipe, f"{family}-ep1", *words, f"{ROWS}2")
    assert losses(run) == pytest.approx(losses(plain), rel=1e-6)
    AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32).save_pretrained(tmp_path / "theirs")
    files = sorted(file.name for file in source.glob("*.safetensors"))
    for theirs in (source, tmp_path / "theirs"):
        assert files == sorted(file.name for file in theirs.glob("*.safetensors"))
        for file in files:
            ours, wanted = load_file(run / "export" / file), load_file(theirs / file)
            assert ours.keys() == wanted.keys()
            assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    shown, given = (json.loads((each / "config.json").read_text()) for each in (run / "export", source))
    assert shown["architectures"] == given["architectures"]


@pytest.mark.slow
def test_drawn_experts_are_those_of_one_process(recipe, folder):
    words = (*LOADED, *RANDOM, f"model.path={folder}")
    ours = export_of(run_train(4, recipe, "drawn-ep2", *words, "parallel.ep_size=2"))
    theirs = export_of(run_train(1, recipe, "drawn-one", *words))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_is_evaluated_by_ranks_that_share_experts(straight):
    """By the ep of the run's own recipe, under another stage, on fewer ranks than the run had."""
    found = evaluated(2, straight, "parallel.stage=ddp")
    assert found["weights"] == str(straight / "checkpoints" / "step-000005") and found["stage"] == "ddp"
    assert found["loss"] == pytest.approx(last(straight)["loss"], rel=1e-6)
