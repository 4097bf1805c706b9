"""Tensor parallel: beside every stage one plain process's numbers, exact bytes, and files that know nothing of it."""

import pytest
import reference
import tensor_cases
import torch
from cases import (
    DECAY,
    MAX_NORM,
    RATE,
    TOLERANCE,
    Case,
    assert_case,
    assert_events,
    assert_exact_bytes,
    assert_parity,
    assert_replicas_agree,
    outcomes_of,
    run_cases,
)
from pairs import DIFFERENCE, pair_rows_of_steps
from tiny import write_pairs
from world import metrics, run_train, run_world


def slow(values):
    return pytest.param(*values, marks=pytest.mark.slow)


AXIS = tensor_cases


def test_parity_and_exact_bytes(case, outcomes, wanted_of):
    worst = assert_case(case, outcomes(case), wanted_of(case))
    assert_events(outcomes(case))
    print(f"\nworst {worst:.1e}  {case.name}")


PREFERENCES = [("dpo", "zero3", 1, 3, "full"), ("orpo", "zero1", 1, 1, "none"), ("dpo", "ddp", 2, 3, "none")]


@pytest.mark.parametrize("method, stage, ranks, micros, checkpointing", [PREFERENCES[0], *map(slow, PREFERENCES[1:])])
def test_preferences(method, stage, ranks, micros, checkpointing, recipe, tiny, tmp_path):
    """Where each answer's loss has a slope of its own, logits are made again in backward; the reference is asked."""
    file = write_pairs(tmp_path / "pairs.jsonl", 24)
    words = (f"method={method}", f"data.train={file}", "data.max_length=96", "train.loss_chunk_tokens=32")
    layout = (ranks, 1) if stage == "ddp" else (1, ranks)
    case = Case(stage, *layout, micros, True, True, checkpointing, words, tp=2)
    assert run_world(case.world, run_cases, recipe, tiny, [case], tmp_path) == [[]] * case.world
    rows = pair_rows_of_steps(recipe, tiny, words, case.rows)
    load = reference.AutoModelForCausalLM.from_pretrained
    model = load(tiny / "model", dtype=torch.float64, attn_implementation="eager")
    steps = [[pair for row in step for pair in row] for step in rows]
    want = reference.train_pairs(model, steps, method, "sigmoid", RATE, DECAY, MAX_NORM)
    want.rows = [[answer for pair in row for answer in pair] for row in rows[0]]
    worst = assert_case(case, outcomes_of(case, tmp_path), want, DIFFERENCE)
    print(f"\nworst {worst:.1e}  {method} {case.layout}")


def exact(case: Case, *given) -> list:
    """The outcomes of a case whose numbers are not the reference's."""
    recipe, models, results = given
    assert run_world(case.world, run_cases, recipe, models, [case], results) == [[]] * case.world
    found = outcomes_of(case, results)
    assert_replicas_agree(found)
    assert_exact_bytes(found)
    return found


KNOBS = [
    (
        1e-6,
        Case("zero3", 1, 2, 3, True, extra=("parallel.reshard_min_params=3000", "parallel.forward_prefetch=1"), tp=2),
    ),
    (1e-6, Case("zero3", 1, 2, 3, checkpointing="full", extra=("offload.activations=cpu",), tp=2)),
    (None, Case("zero3", 1, 2, 3, True, extra=("precision.params=bf16",), tp=2)),
    (None, Case("zero1", 1, 2, 3, True, extra=("precision.params=bf16", "precision.reduce=bf16"), tp=2)),
    (None, Case("zero3", 1, 1, 1, True, extra=("optim.name=lion", "optim.learning_rate=1e-4"), tp=2)),
    (None, Case("zero3", 1, 2, 2, True, extra=("optim.name=adamw_bf16",), tp=2)),
    (None, Case("zero1", 1, 1, 2, extra=("optim.name=adamw_bf16", "precision.master=bf16"), tp=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("tolerance, knobs", KNOBS, ids=lambda value: getattr(value, "name", None))
def test_other_knobs_and_exact_bytes(tolerance, knobs, recipe, models, tmp_path, wanted_of):
    got, want = exact(knobs, recipe, models, tmp_path)[0].result, wanted_of(knobs)
    if tolerance:
        assert_parity(got, want, tolerance)
    else:
        assert got.losses[0] == pytest.approx(want.losses[0], rel=5e-3)


@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_norm_loss_and_tokens_are_those_without_it(axis, recipe):
    """Clipped at each step. Tokens are counted once, trained ones and rows' alike."""
    words = ("train.steps=3", "train.eval_steps=1", "optim.max_grad_norm=0.2", "data.eval_size=3", "train.export=false")
    runs = [
        run_train(world, recipe, f"{axis}-counted-{world}", *words, *more)
        for world, more in ((1, ["parallel.stage=ddp"]), (2, [f"parallel.{axis}_size=2"]))
    ]
    for one, two in zip(*map(metrics, runs), strict=True):
        assert one.get("train/tokens") == two.get("train/tokens")
        for key in ("train/loss", "train/grad_norm", "eval/loss"):
            assert (key in one) == (key in two) and one.get(key, 0) == pytest.approx(two.get(key, 0), rel=TOLERANCE)
    for world, run in enumerate(runs, start=1):
        row = metrics(run)[-1]  # 128 tokens of one row, whoever computes them
        rate = row["perf/tokens_per_second_per_device"] * row["perf/step_seconds"]
        assert rate == pytest.approx(128 / world, rel=1e-6)
