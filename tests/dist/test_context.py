"""Context parallel: beside every stage the numbers of one plain process, exact bytes, and what composes with it."""

import context_cases
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
    run_cases,
)
from world import losses, run_train, run_world

AXIS = context_cases


def test_parity_and_exact_bytes(case, outcomes, wanted_of):
    worst = assert_case(case, outcomes(case), wanted_of(case))
    assert_events(outcomes(case))
    print(f"\nworst {worst:.1e}  {case.name}")


KNOBS = [
    (
        1e-6,
        Case("zero3", 1, 2, 3, True, extra=("parallel.reshard_min_params=3000", "parallel.forward_prefetch=1"), cp=2),
    ),
    (1e-6, Case("zero3", 1, 2, 3, checkpointing="full", extra=("offload.activations=cpu",), cp=2)),
    (None, Case("zero3", 1, 2, 3, True, extra=("precision.params=bf16",), cp=2)),
    (None, Case("zero3", 1, 1, 1, True, extra=("optim.name=muon", "optim.learning_rate=1e-4"), cp=2)),
    (None, Case("zero3", 1, 1, 3, extra=("lora.r=4", "lora.lora_alpha=8"), cp=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("tolerance, knobs", KNOBS, ids=lambda value: getattr(value, "name", None))
def test_other_knobs_and_exact_bytes(tolerance, knobs, recipe, models, tmp_path, wanted_of):
    assert run_world(knobs.world, run_cases, recipe, models, [knobs], tmp_path) == [[]] * knobs.world
    found, want = outcomes_of(knobs, tmp_path), wanted_of(knobs)
    assert_replicas_agree(found)
    assert_exact_bytes(found)
    if tolerance:
        assert_parity(found[0].result, want, tolerance)
    else:
        assert found[0].result.losses[0] == pytest.approx(want.losses[0], rel=5e-3)


@pytest.mark.slow
def test_state_may_be_away(recipe):
    """Masters and moments on the host, and parameters too: the same losses."""
    words = ("train.steps=3", "parallel.cp_size=2", "optim.max_grad_norm=0.2", "train.export=false")
    away = {"here": (), "state": ("offload.optimizer=cpu",)}
    away["all"] = (*away["state"], "offload.params=cpu")
    here, *there = (losses(run_train(4, recipe, name, *words, *more)) for name, more in away.items())
    assert there[0] == there[1] == pytest.approx(here, rel=TOLERANCE)
