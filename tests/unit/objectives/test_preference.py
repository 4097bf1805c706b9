"""Losses of preferences against TRL's own numbers (tests/fixtures/trl_preferences.py), however the pairs are split."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardbook.data.tokenized import Totals
from shardbook.objectives import build_objective
from shardbook.objectives.preference import LOSSES, METRICS
from shardbook.recipe import Preference

TRL = json.loads((Path(__file__).parents[2] / "fixtures" / "trl_preferences.json").read_text())
PAIRS = len(TRL["lengths"]) // 2
TOLERANCE = 1e-6


def objective_of(kind):
    """TRL's words, as ours."""
    if kind in ("orpo", "simpo"):
        return build_objective(kind, Preference(beta=TRL["beta"], simpo_gamma=TRL["simpo_gamma"]))
    more = {"label_smoothing": TRL["label_smoothing"]} if kind == "robust" else {}
    more |= {"rpo_alpha": TRL["rpo_alpha"]} if kind == "rpo" else {}
    loss_type = "sigmoid" if kind == "rpo" else kind
    return build_objective("dpo", Preference(beta=TRL["beta"], loss_type=loss_type, **more))


def shares_of(kind, micros, totals=None):
    """Shares of all `micros`, lists of pairs, and the gradient of each token's log-probability."""
    objective, lengths = objective_of(kind), TRL["lengths"]
    tokens, reference = torch.tensor(TRL["tokens"]).requires_grad_(), torch.tensor(TRL["reference"])
    chosen_tokens = sum(lengths[pair] for pairs in micros for pair in pairs)
    totals = totals or Totals(sum(lengths), sum(map(len, micros)), chosen_tokens)
    seen = torch.zeros(1 + len(METRICS))
    for pairs in micros:
        rows = [row for pair in pairs for row in (pair, PAIRS + pair)]
        losses = [-tokens[row, : lengths[row]] for row in rows]
        trained = tuple(lengths[row] for row in rows)
        counts = torch.tensor(trained, dtype=torch.float32)
        micro = SimpleNamespace(inputs=(), trained=trained, counts=counts, reference=reference[rows])
        seen = seen + objective.terms(lambda *given, of=losses: torch.cat(of), micro, totals)
    return seen.detach(), torch.autograd.grad(seen[0], tokens)[0]


@pytest.mark.parametrize("kind", TRL["found"])
def test_loss_gradient_and_metrics_are_trls(kind):
    want = TRL["found"][kind]
    if kind == "orpo":  # TRL adds the likelihood of prompt and answer elsewhere; the paper's is the answer's
        likelihood, of_likelihood = shares_of_likelihood()
    else:
        likelihood, of_likelihood = 0.0, 0.0
    seen, gradient = shares_of(kind, [range(PAIRS)])
    assert seen[0].item() == pytest.approx(want["loss"] + likelihood, rel=TOLERANCE)
    expected = torch.tensor(want["gradient"]) + of_likelihood
    assert ((gradient - expected).norm() / expected.norm()).item() < TOLERANCE
    for name, got in zip(METRICS, seen[1:].tolist(), strict=True):
        assert got == pytest.approx(want["metrics"][name], rel=TOLERANCE), name


def shares_of_likelihood():
    tokens, lengths = torch.tensor(TRL["tokens"]).requires_grad_(), TRL["lengths"][:PAIRS]
    picked = torch.cat([tokens[row, :length] for row, length in enumerate(lengths)])
    loss = -picked.mean()
    return loss.item(), torch.autograd.grad(loss, tokens)[0]


@pytest.mark.parametrize("kind", TRL["found"])
@pytest.mark.parametrize("split", [[3, 5], [1, 1, 6], [1] * PAIRS])
def test_any_split_gives_the_same(kind, split):
    """What mean of means does not: TRL's own, with unequal micro-batches."""
    pairs = list(range(PAIRS))
    micros = [[pairs.pop(0) for _ in range(size)] for size in split]
    (whole, gradients), (parts, of_parts) = shares_of(kind, [range(PAIRS)]), shares_of(kind, micros, totals())
    assert torch.allclose(parts, whole, rtol=TOLERANCE, atol=1e-7)
    assert ((of_parts - gradients).norm() / gradients.norm()).item() < TOLERANCE


def totals():
    return Totals(sum(TRL["lengths"]), PAIRS, sum(TRL["lengths"][:PAIRS]))


@pytest.mark.parametrize("kind", [*TRL["found"]])
def test_chosen_and_rejected_swapped_is_seen(kind, monkeypatch):
    real = TRL["tokens"], TRL["reference"], TRL["lengths"]
    swapped = [each[PAIRS:] + each[:PAIRS] for each in real]
    for name, value in zip(("tokens", "reference", "lengths"), swapped, strict=True):
        monkeypatch.setitem(TRL, name, value)
    with pytest.raises(AssertionError):
        test_loss_gradient_and_metrics_are_trls(kind)


def test_a_mean_a_micro_batch_is_seen(monkeypatch):
    real = build_objective

    def mean(method, preference):
        made = real(method, preference)

        def terms(model, micro, totals):
            pairs = len(micro.trained) // 2
            return made.terms(model, micro, Totals(1, pairs, sum(micro.trained[::2]))) / 3  # of three micro-batches

        return SimpleNamespace(terms=terms)

    monkeypatch.setitem(globals(), "build_objective", mean)
    with pytest.raises(AssertionError):
        test_any_split_gives_the_same("sigmoid", [1, 1, 6])


def test_every_loss_type_is_compared():
    assert set(LOSSES) | {"rpo", "orpo", "simpo"} == set(TRL["found"])
