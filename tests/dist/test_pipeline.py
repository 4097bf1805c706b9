"""Pipeline parallel: beside every stage the numbers of one plain process, exact bytes, and what composes with it."""

import shutil

import pipeline_cases
import pytest
from cases import (
    TOLERANCE,
    Case,
    assert_case,
    assert_events,
    assert_exact_bytes,
    assert_parity,
    assert_replicas_agree,
    outcomes_of,
    relative_error,
    run_cases,
    same_bits,
)
from pipeline_cases import deep
from planted import replace
from safetensors.torch import load_file, save_file
from world import metrics, run_train, run_world, train_rank

AXIS = pipeline_cases


def test_parity_and_exact_bytes(case, outcomes, wanted_of):
    worst = assert_case(case, outcomes(case), wanted_of(case))
    assert_events(outcomes(case))
    print(f"\nworst {worst:.1e}  {case.name}")


def found_of(cases: list[Case], *given) -> list[list]:
    """The outcomes of `cases` of one world, on every rank, whose numbers are not the reference's."""
    recipe, models, results = given
    world = cases[0].world
    assert run_world(world, run_cases, recipe, models, cases, results) == [[]] * world
    found = [outcomes_of(case, results) for case in cases]
    for outcomes in found:
        assert_replicas_agree(outcomes)
        assert_exact_bytes(outcomes)
    return found


LOW = ("optim.name=adamw_bf16", "precision.master=bf16")
MUON = ("optim.name=muon", "optim.learning_rate=1e-4")
ORDERS = {"gpipe": {"schedule": "gpipe"}, "1f1b": {}, "interleaved": {"schedule": "interleaved", "chunks": 2}}


@pytest.mark.parametrize(
    ("stage", "ranks", "extra"),
    [
        ("zero3", 1, ()),
        ("zero1", 1, LOW),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in (("zero2", 2, ()), ("ddp", 2, ()), ("zero3", 2, LOW), ("zero2", 1, MUON), ("zero3", 2, MUON))
        ),
    ],
)
def test_every_schedule_has_the_bits_of_one_stage(stage, ranks, extra, recipe, models, tmp_path):
    """Where no weight is tied nothing is added in another order, nor rounded in another way."""
    layout = (ranks, 1) if stage == "ddp" else (1, ranks)
    (alone,) = found_of([deep(stage, *layout, 4, tied=False, extra=extra)], recipe, models, tmp_path)
    cases = [deep(stage, *layout, 4, tied=False, extra=extra, pp=2, **order) for order in ORDERS.values()]
    for case, found in zip(cases, found_of(cases, recipe, models, tmp_path), strict=True):
        assert same_bits(found[0].result, alone[0].result), case.name


def test_gpipe_and_1f1b_have_the_same_bits(recipe, models, tmp_path):
    """Clipped, and of a tied weight, whose copies stay the same: digests of both would differ."""
    cases = [Case("zero2", 1, 1, 3, True, pp=2, schedule=schedule) for schedule in ("gpipe", "1f1b")]
    one, other = found_of(cases, recipe, models, tmp_path)
    assert same_bits(one[0].result, other[0].result) and one[0].result.norms == other[0].result.norms


def test_what_the_last_stage_lacks_every_rank_refuses(recipe, tiny, tmp_path):
    """Each looks at all names: none is left waiting."""
    model, lacks = tmp_path / "lacks", "model.norm.weight"
    shutil.copytree(tiny / "untied", model)
    weights = load_file(model / "model.safetensors")
    del weights[lacks]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    words = [str(recipe), "parallel.pp_size=2", f"model.path={model}", "run.name=lacks"]
    for code, _, said in run_world(2, train_rank, words):
        assert code == 2 and f"do not fit the model: missing {lacks}\n" in said, said


def a_backward_breaks():
    """In the middle of a model, whose first and last chunk of layers are then asked for a forward."""
    import torch

    from shardbook.parallel.step import run_step
    from shardbook.ranks.exits import RunFailed

    def break_in_the_middle(sharded, micros, loss_function, device, *mark):
        micro, place = micros[0], sharded.layout.pipeline.rank
        middle, outer = (sharded.chunks[number] for number in (1 - place, place))
        width = middle.model.config.hidden_size
        hidden = torch.ones(*micro.input_ids.shape, width, requires_grad=True, device=device)
        made = middle.model(micro.to(device), hidden=hidden)
        made.register_hook(lambda _: 1 / 0)
        try:
            made.sum().backward()
        except ZeroDivisionError:
            outer.model()
        raise RunFailed("gone on")

    replace(run_step, break_in_the_middle)


def test_what_broke_in_a_chunk_of_layers_broke_the_model(recipe, models):
    case = deep("zero1", 1, 1, 2, pp=2, chunks=2, schedule="interleaved")
    for code, _, said in run_world(
        2, train_planted, a_backward_breaks, [str(recipe), *case.words(models), "run.name=broke"]
    ):
        assert code == 1 and "a backward of this model ended in an error" in said.splitlines()[-1], said


def skips_evaluation():
    """Planted bug: what has no backward runs on one stage."""
    import torch

    from shardbook.run.eval import observer

    observer.run_forward = lambda *given: torch.zeros(())


def shares_evaluation():
    """Planted bug: a loss of the last stage alone is taken for one that each stage has a part of."""
    from shardbook.run.eval import observer

    real = observer.run_forward
    observer.run_forward = lambda *given: real(*given) / 2


def train_planted(plan, words):
    plan()
    return train_rank(words)


def eval_losses(run) -> list[float]:
    return [row["eval/loss"] for row in metrics(run) if "eval/loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("bug", [skips_evaluation, shares_evaluation])
def test_an_evaluation_gone_wrong_turns_it_red(bug, recipe):
    """tests/dist/test_tensor.py compares losses of evaluations with and without a pipeline."""
    words = ("train.steps=2", "train.eval_steps=1", "train.export=false")
    want = eval_losses(run_train(1, recipe, f"{bug.__name__}-one", *words))
    name = f"{bug.__name__}-two"
    for plan, wrong in ((tuple, False), (bug, True)):
        given = [str(recipe), f"run.name={name}-{wrong}", "parallel.pp_size=2", *words]
        assert [code for code, _, _ in run_world(2, train_planted, plan, given)] == [0, 0]
        assert (eval_losses(recipe.parent / f"{name}-{wrong}") != pytest.approx(want, rel=TOLERANCE)) is wrong


KNOBS = [
    (
        1e-6,
        Case("zero3", 1, 2, 3, True, extra=("parallel.reshard_min_params=3000", "parallel.forward_prefetch=1"), pp=2),
    ),
    (None, Case("zero3", 1, 2, 3, True, extra=("precision.params=bf16",), pp=2)),
    (None, Case("zero1", 1, 1, 3, extra=("precision.params=bf16", "precision.reduce=bf16"), pp=2)),
    (None, Case("ddp", 2, 1, 3, extra=("precision.params=bf16",), pp=2)),
    (None, Case("zero2", 1, 1, 3, True, extra=("optim.name=adamw_bf16",), pp=2)),
    (None, Case("zero2", 1, 2, 3, True, extra=LOW, pp=2)),  # tied: both ends round alike
    (None, deep("zero3", 1, 1, 2, extra=LOW, pp=2, chunks=2, schedule="interleaved")),
    (None, Case("zero3", 1, 1, 1, True, extra=("optim.name=lion", "optim.learning_rate=1e-4"), pp=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("tolerance, knobs", KNOBS, ids=lambda value: getattr(value, "name", None))
def test_other_knobs_and_exact_bytes(tolerance, knobs, recipe, models, tmp_path, wanted_of):
    """`cases.joined` finds both ends of a tied weight alike to the bit."""
    (found,), want = found_of([knobs], recipe, models, tmp_path), wanted_of(knobs)
    if tolerance:
        assert_parity(found[0].result, want, tolerance)
        return
    assert found[0].result.losses[0] == pytest.approx(want.losses[0], rel=5e-3)
    first = found[0].result.gradients[0]
    errors = {name: relative_error(first[name].float(), gradient) for name, gradient in want.gradients[0].items()}
    assert max(errors.values()) < 0.05, errors
