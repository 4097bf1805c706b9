"""Context parallel: beside every stage the numbers of one plain process, exact bytes, and what composes with it."""

import context_cases
import pytest
from cases import TOLERANCE, Case, assert_case, assert_exact_bytes, assert_parity, assert_replicas_agree, outcomes_of, run_cases
from world import losses, metrics, run_train, run_world

AXIS = context_cases


def test_parity_and_exact_bytes(case, outcomes, wanted_of):
    worst = assert_case(case, outcomes(case), wanted_of(case))
    print(f"\nworst {worst:.1e}  {case.name}")


KNOBS = [
    (1e-6, Case("zero3", 1, 2, 3, True, extra=("parallel.reshard_min_params=3000", "parallel.forward_prefetch=1"), cp=2)),
    (1e-6, Case("zero3", 1, 2, 3, checkpointing="full", extra=("offload.activations=cpu",), cp=2)),
    (1e-6, Case("zero3", 1, 1, 1, extra=("parallel.wrap=size:20000",), cp=2)),
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


def test_norm_loss_and_tokens_are_those_without_it(recipe):
    """Clipped at each step. Tokens are counted once, trained ones and rows' alike."""
    words = ("train.steps=3", "train.eval_steps=1", "optim.max_grad_norm=0.2", "data.eval_size=3", "train.export=false")
    runs = [
        run_train(world, recipe, f"counted-{world}", *words, *more)
        for world, more in ((1, ["parallel.stage=ddp"]), (2, ["parallel.cp_size=2"]))
    ]
    for one, two in zip(*map(metrics, runs), strict=True):
        assert one.get("train/tokens") == two.get("train/tokens")
        for key in ("train/loss", "train/grad_norm", "eval/loss"):
            assert (key in one) == (key in two) and one.get(key, 0) == pytest.approx(two.get(key, 0), rel=TOLERANCE)
    for world, run in enumerate(runs, start=1):
        row = metrics(run)[-1]  # 128 tokens of one row, whoever computes them
        rate = row["perf/tokens_per_second_per_device"] * row["perf/step_seconds"]
        assert rate == pytest.approx(128 / world, rel=1e-6)


@pytest.mark.slow
def test_state_may_be_away(recipe):
    """Masters and moments on the host, and parameters too: the same losses."""
    words = ("train.steps=3", "parallel.cp_size=2", "optim.max_grad_norm=0.2", "train.export=false")
    away = {"here": (), "state": ("offload.optimizer=cpu",)}
    away["all"] = (*away["state"], "offload.params=cpu")
    here, *there = (losses(run_train(4, recipe, name, *words, *more)) for name, more in away.items())
    assert there[0] == there[1] == pytest.approx(here, rel=TOLERANCE)
