"""The teaching literature's transformer, 260 parameters, on two ranks: every byte by hand, by formula, measured."""

from pathlib import Path

import pytest
from smallest import PARTS, STAGES, measure, table, traffic
from toys import Smallest
from world import run_world

PAGE = Path(__file__).parents[2] / "docs" / "260-parameters.md"


@pytest.fixture(scope="module")
def measured():
    found = {stage: run_world(2, measure, stage, {}) for stage in STAGES}
    assert all(first == second for first, second in found.values())
    return {stage: ranks[0] for stage, ranks in found.items()}


def test_the_model_is_that_of_the_literature():
    model = Smallest()
    counts = {name: sum(p.numel() for p in getattr(model, name).parameters()) for name in PARTS}
    assert counts == PARTS == {"output": 32, "norm1": 8, "attention": 64, "norm2": 8, "ffn": 148}
    assert sum(p.numel() for p in model.parameters()) == 260


def test_traffic_of_a_step(measured):
    assert {stage: traffic(of) for stage, of in measured.items()} == {
        "ddp": 1040,
        "zero1": 1040,
        "zero2": 1040,
        "zero3": 1496,
    }
    assert measured["ddp"]["all_reduce"] == 520
    assert (measured["zero3"]["all_gather"], measured["zero3"]["reduce_scatter"]) == (520 + 520 - 64, 520)


def test_memory_of_the_paper_and_ours(measured):
    assert {stage: of["paper"] for stage, of in measured.items()} == {
        "ddp": 4160,
        "zero1": 2600,
        "zero2": 2340,
        "zero3": 2080,
    }
    tensors = 1 + 2 + 4 + 2 + 4  # the tied matrix, two norms, attention, FFN: each has a step count of 4 bytes
    for stage, of in measured.items():
        share = 1 if stage == "ddp" else 2
        assert (of["params"], of["grads"]) == (1040 // share, 1040 // share)
        assert of["optimizer"] == 2080 // share + 4 * tensors


def test_gathered_at_most(measured):
    """The root keeps its 64 bytes; beside it zero3 holds the FFN's 296, and by default what it gathers ahead, 16."""
    assert measured["zero1"]["gathered_peak"] == measured["zero2"]["gathered_peak"] == 520
    assert measured["zero3"]["gathered_peak"] == 64 + 296 + 16
    for of in run_world(2, measure, "zero3", {"backward_prefetch": 0}):
        assert of["gathered_peak"] == 64 + 296


def test_the_page_shows_what_is_measured(measured):
    assert table(measured) in PAGE.read_text()
