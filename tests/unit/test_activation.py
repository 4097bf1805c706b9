"""Checkpointing by its effect: FLOPs computed again, bytes kept between forward and backward, gradients bit for bit."""

import pytest
import torch
from recompute import (
    FORWARD,
    HEAD,
    HEADS,
    INNER,
    LAYERS,
    LENGTH,
    ROWS,
    WIDTH,
    build,
    build_batch,
    flops,
    gradients,
    kept_bytes,
)


@pytest.fixture(scope="module")
def micro():
    return build_batch()


@pytest.mark.parametrize("checkpointing", ["full", "every:2", "every:3", "selective"])
def test_gradients_are_bitwise_those_without(checkpointing, micro):
    plain, again = gradients(build("none"), micro), gradients(build(checkpointing), micro)
    assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())


@pytest.mark.parametrize(
    "checkpointing, expected",
    [("full", LAYERS * FORWARD), ("every:2", 2 * FORWARD), ("every:3", 2 * FORWARD), ("selective", 0)],
)
def test_flops_computed_again(checkpointing, expected, micro):
    """selective runs no matmul and no attention again: only norms, activations and rotations."""
    # torch's checkpoint stops as soon as it has what backward needs, which is before the block's last matmul
    last = 2 * ROWS * LENGTH * WIDTH * INNER
    blocks = expected // FORWARD
    assert flops(checkpointing, micro) - flops("none", micro) == expected - blocks * last


def test_bytes_kept(micro):
    plain, full, half, selective = (kept_bytes(kind, micro) for kind in ("none", "full", "every:2", "selective"))
    assert half - full == (plain - full) // 2
    # selective, beyond full: what a block's matmuls give (q, k, v, o, gate, up, down), its attention's result, and the
    # attention's one number a row and head for the softmax; for each token, in fp32
    matmuls = HEADS * HEAD + 2 * 2 * HEAD + WIDTH + 2 * INNER + WIDTH
    assert selective - full == LAYERS * ROWS * LENGTH * 4 * (matmuls + HEADS * HEAD + HEADS)
    assert full < selective < plain


@pytest.mark.slow
def test_budget_is_met_by_the_compiler(micro, monkeypatch):
    """The private knob acts: less memory with a smaller budget, nothing lost in the gradients."""
    monkeypatch.setattr(torch._functorch.config, "activation_memory_budget", 1.0)  # put back afterwards
    plain = gradients(build("none"), micro)
    kept = []
    for budget in ("budget:1.0", "budget:0.5", "budget:0"):
        torch._dynamo.reset()
        again = gradients(build(budget, compiled=True), micro)
        for name, gradient in plain.items():  # the compiler fuses, so not to the bit
            assert (again[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
        kept.append(kept_bytes(budget, micro, compiled=True))
    assert kept[0] > kept[1] > kept[2], kept


def test_a_planted_bug_turns_it_red(micro, monkeypatch):
    """selective with an empty table keeps nothing: gradients stay right, FLOPs and bytes tell."""
    monkeypatch.setattr("shardbook.memory.activation.SAVED_OPS", set())
    assert flops("selective", micro) > flops("none", micro)
    assert kept_bytes("selective", micro) == kept_bytes("full", micro)
