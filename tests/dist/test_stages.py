"""Every stage computes the same numbers: bitwise among themselves where the order of additions is the same, to 1e-6
against one plain process."""

import pytest
import reference
import torch
from safetensors.torch import load_file
from tiny import write_recipe
from transformers import AutoTokenizer
from world import losses, metrics, run_train, run_world, train_rank

from shardbook.data.loader import Batching, Loader
from shardbook.data.tokenized import build_documents
from shardbook.recipe import load_recipe

STAGES = ["ddp", "zero1", "zero2", "zero3"]


@pytest.fixture(scope="module")
def recipe(tiny, tmp_path_factory):
    return write_recipe(tiny, tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def steps(recipe, tiny):
    """The documents of each optimizer step of `rows` rows, as the reference wants them."""
    data = load_recipe(recipe).data
    documents, _ = build_documents(data, AutoTokenizer.from_pretrained(tiny / "model"), tiny / "model")

    def of(rows: int) -> list[list[reference.Document]]:
        loader = Loader(documents, Batching(data.max_length, 1, 0, 1), rows, seed=42)
        picked = [[loader.row_at(step * rows + row) for row in range(rows)] for step in range(5)]
        encoded = documents.encoded
        return [[(encoded[i]["input_ids"], encoded[i]["mask"]) for row in step for i in row] for step in picked]

    return of


def compare(run, expected, tolerance=1e-6):
    """Losses, norms and final weights against the reference's, relative to each tensor's size."""
    want_losses, want_norms, model = expected
    assert losses(run) == pytest.approx(want_losses, rel=tolerance)
    got_norms = [row["train/grad_norm"] for row in metrics(run) if row["step"]]
    assert got_norms == pytest.approx(want_norms, rel=tolerance)
    weights = load_file(run / "export" / "model.safetensors")
    for name, parameter in model.named_parameters():
        error = ((weights[name] - parameter).norm() / parameter.norm()).item()
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_ranks_bitwise(recipe, steps, tiny, accumulation):
    runs = {}
    for stage in STAGES:
        words = (f"parallel.stage={stage}", f"train.gradient_accumulation_steps={accumulation}")
        runs[stage] = run_train(2, recipe, f"{stage}-{accumulation}", *words)
    # rule 2: one class with one micro-batch; two with accumulation, those that reduce once a step and the others
    classes = [STAGES] if accumulation == 1 else [["ddp", "zero1"], ["zero2", "zero3"]]
    for alike in classes:
        first = runs[alike[0]]
        weights = load_file(first / "export" / "model.safetensors")
        for stage in alike[1:]:
            assert losses(runs[stage]) == losses(first), stage
            other = load_file(runs[stage] / "export" / "model.safetensors")
            assert all(torch.equal(weights[name], other[name]) for name in weights), stage
    expected = reference.train(tiny / "model", steps(2 * accumulation), rate=3e-3, decay=0.1)
    for stage in STAGES:
        compare(runs[stage], expected)


@pytest.mark.parametrize("words", [(), ("train.gradient_accumulation_steps=2",)], ids=["one-micro", "two-micros"])
def test_hybrid_shard_two_by_two(recipe, steps, tiny, words):
    sizes = ("parallel.stage=hsdp", "parallel.dp_replicate_size=2", "parallel.dp_shard_size=2")
    run = run_train(4, recipe, f"hsdp-{len(words)}", *sizes, *words)
    compare(run, reference.train(tiny / "model", steps(4 * (1 + len(words))), rate=3e-3, decay=0.1))


def test_untied_odd_vocabulary_with_clipping_and_recomputation(recipe, steps, tiny):
    """287 rows do not divide by 3; the last shard is smaller."""
    words = (f"model.path={tiny}/untied", "optim.max_grad_norm=0.5", "activation.checkpointing=full")
    run = run_train(3, recipe, "untied", *words)
    compare(run, reference.train(tiny / "untied", steps(3), rate=3e-3, decay=0.1, max_norm=0.5))


def test_step_zero_loss_is_that_of_transformers(recipe, steps, tiny):
    run = run_train(1, recipe, "one", "train.steps=1", "train.gradient_accumulation_steps=2")
    with torch.no_grad():
        model = reference.AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
        parts = [reference.document_loss(model, document) for document in steps(2)[0]]
    assert losses(run) == pytest.approx([(sum(p for p, _ in parts) / sum(n for _, n in parts)).item()], rel=1e-6)


BUGS = {}


def bug(fn):
    BUGS[fn.__name__] = fn
    return fn


@bug
def mean_over_ranks(train, stages):
    before = stages.apply_stage

    def planted(model, *args):
        before(model, *args)
        for module in stages.sharded_modules(model):
            module.set_gradient_divide_factor(2.0)

    train.apply_stage = planted


@bug
def token_count_not_summed(train, stages):
    train.sum_over_ranks = lambda *values: [float(value) for value in values]


@bug
def no_sync_on_the_last_micro(train, stages):
    before = stages.set_schedule
    train.set_schedule = lambda model, stage, is_last_micro: before(model, stage, False)


@bug
def local_norm(train, stages):
    import torch

    def local(parameters, limit):
        parameters = [p for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad.to_local() for p in parameters])
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    train.clip_gradients = local


@bug
def stale_gathered_weights(train, stages):
    before = stages.set_schedule

    def planted(model, stage, is_last_micro):
        before(model, stage, is_last_micro)
        model.set_reshard_after_backward(False)

    train.set_schedule = planted


def train_with_bug(name: str, words: list[str]):
    import shardbook.stages as stages
    import shardbook.train as train

    BUGS[name](train, stages)
    return train_rank(words)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_turns_this_suite_red(recipe, steps, tiny, name):
    words = [str(recipe), f"run.name=bug-{name}", "parallel.stage=zero1", "optim.max_grad_norm=0.5"]
    results = run_world(2, train_with_bug, name, words)
    assert [code for code, _, _ in results] == [0, 0], results  # it must run, and be wrong
    expected = reference.train(tiny / "model", steps(2), rate=3e-3, decay=0.1, max_norm=0.5)
    with pytest.raises(AssertionError):
        compare(recipe.parent / f"bug-{name}", expected)
