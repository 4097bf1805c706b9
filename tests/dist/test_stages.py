"""Every stage computes the same numbers and sends and keeps exactly what was predicted: the parity matrix.

Three optimizer steps of a tiny Llama, or five, through the whole of `train()`, an evaluation in between, against one
plain process: losses, whole gradients, norms and weights to 1e-6; bit for bit among themselves where they add in the
same order.
"""

from functools import cache

import pytest
import reference
import torch
from cases import (
    Case,
    assert_case,
    assert_events,
    bitwise_cases,
    covering_cases,
    documents_of_steps,
    every_case,
    outcomes_of,
    run_cases,
    same_bits,
)
from world import losses, run_train, run_world


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = every_case() if metafunc.config.getoption("everything") else covering_cases()
        metafunc.parametrize("case", [pytest.param(case, marks=slow(case), id=case.name) for case in cases])


def slow(case: Case) -> list[pytest.MarkDecorator]:
    """Of four ranks make test has zero3, and copies of shards; the others are in the slow run."""
    return [pytest.mark.slow] * (case.world == 4 and (case.stage, case.replicas) not in (("zero3", 1), ("hsdp", 2)))


@pytest.fixture(scope="module")
def outcomes(recipe, tiny, tmp_path_factory, request):
    """The outcomes of a case by rank; the first case of a world runs all of that world's that were asked for."""
    results = tmp_path_factory.mktemp("results")
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    cases = [item.callspec.params["case"] for item in items if "case" in item.callspec.params]
    cases += bitwise_cases()

    @cache
    def run(world: int) -> None:
        chosen = [case for case in dict.fromkeys(cases) if case.world == world]
        assert run_world(world, run_cases, recipe, tiny, chosen, results) == [[]] * world

    def of(case: Case):
        run(case.world)
        return outcomes_of(case, results)

    return of


def test_parity_and_exact_bytes(case, outcomes, wanted):
    assert_case(case, outcomes(case), wanted(case))
    assert_events(outcomes(case))


@pytest.mark.parametrize(
    ("stage", "mistake"),
    [
        ("zero3", "an event forgotten"),
        ("zero3", "a prefetch one unit too early"),
        ("zero1", "a reduction in every micro-batch"),
    ],
)
def test_a_list_of_events_with_a_mistake_turns_it_red(stage, mistake, outcomes):
    for outcome in outcomes(Case(stage, 1, 2, 3)):
        assert "happened" in outcome.events[mistake] and not outcome.events[""]


@pytest.mark.parametrize("micros", [1, 3])
def test_two_ranks_bitwise(micros, outcomes):
    """Rule 2: one class with one micro-batch; two with accumulation, those that reduce once a step and the others."""
    stages = ["ddp", "zero1", "zero2", "zero3"]
    for group in [stages] if micros == 1 else [stages[:2], stages[2:]]:
        first, *others = [
            outcomes(Case(stage, *((2, 1) if stage == "ddp" else (1, 2)), micros))[0].result for stage in group
        ]
        assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize(
    "checkpointing", ["full", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("every:2", "selective"))]
)
def test_checkpointing_changes_no_bit(checkpointing, recipe, tiny, tmp_path):
    cases = [Case("zero3", 1, 2, 3, checkpointing=kind) for kind in ("none", checkpointing)]
    assert run_world(2, run_cases, recipe, tiny, cases, tmp_path) == [[], []]
    plain, recomputed = (outcomes_of(case, tmp_path)[0] for case in cases)
    assert same_bits(plain.result, recomputed.result)
    assert plain.traffic == recomputed.traffic  # not one gather more


def test_step_zero_loss_is_that_of_transformers(recipe, tiny):
    run = run_train(1, recipe, "one", "train.steps=1", "train.gradient_accumulation_steps=2")
    with torch.no_grad():
        model = reference.AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
        documents = documents_of_steps(recipe, tiny, rows=2)[0]
        parts = [reference.document_loss(model, document) for document in documents]
    assert losses(run) == pytest.approx([(sum(p for p, _ in parts) / sum(n for _, n in parts)).item()], rel=1e-6)
