"""Checkpointing by its effect: FLOPs computed again, bytes kept between forward and backward, gradients bit for bit."""

import pytest
import torch
from families import small_config
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
from torch.utils._python_dispatch import TorchDispatchMode

from shardbook.data.loader import Batching, build_micro_batch
from shardbook.memory.activation import apply_checkpointing, recomputed
from shardbook.model.causal_lm import build_model, materialize
from shardbook.objectives.sft import sft_loss
from shardbook.recipe import Activation


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
@torch._functorch.config.patch(activation_memory_budget=1.0)  # put back afterwards
def test_budget_is_met_by_the_compiler(micro):
    """The private knob acts: less memory with a smaller budget, nothing lost in the gradients."""
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


def routed(checkpointing: str, patch) -> dict[str, torch.Tensor]:
    """The gradients of a small Mixtral three of whose four experts are alike to the router. A tie falls to the first
    ones in forward, to the last ones when backward runs the block again, as it may where kernels differ."""
    torch.manual_seed(0)
    model = build_model(small_config("mixtral"), "fp32")
    materialize(model, torch.device("cpu"))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        if name.endswith("gate.weight"):
            parameter.data[2:] = parameter.data[1]
    apply_checkpointing(model.blocks, Activation(checkpointing=checkpointing))
    real, sign = torch.topk, [-1]

    def topk(scores, *given, **named):
        return real(scores + sign[0] * 1e-6 * torch.arange(scores.shape[-1]), *given, **named)

    patch.setattr(torch, "topk", topk)
    ids = torch.arange(3, 3 + 2 * LENGTH).view(2, LENGTH).remainder(125).tolist()
    documents = [{"input_ids": row, "mask": [True] * LENGTH} for row in ids]
    loss = sft_loss(model, build_micro_batch(documents, [(0,), (1,)], Batching(None, 2, 0, 1)))
    sign[0] = 1
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_a_recomputed_router_chooses_the_same_experts(checkpointing, monkeypatch):
    def errors() -> float:
        with monkeypatch.context() as patch:
            plain = routed("none", patch)
        with monkeypatch.context() as patch:
            again = routed(checkpointing, patch)
        size = torch.stack([gradient.norm() for gradient in plain.values()]).norm()
        return max(float((again[name] - gradient).norm() / size) for name, gradient in plain.items())

    assert errors() < 1e-5
    monkeypatch.setattr("shardbook.memory.activation.stacked_parameters", lambda block: {})  # planted: nothing is kept
    assert errors() > 1e-2


@pytest.mark.parametrize(("has_router", "runs"), [(True, [1, 1]), (False, [2, 2])])  # planted: nothing is kept
def test_a_compiled_block_keeps_its_experts_too(has_router, runs):
    """torch's own selective contexts do, since compiled code has nothing in place: its top-k runs once a block."""
    counts = [0, 0]

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            counts[self.phase] += op is torch.ops.aten.topk.default
            return op(*args, **(kwargs or {}))

    def routed_twice(hidden):
        weights, ids = torch.topk(hidden.softmax(-1), 2)
        weights /= weights.sum(-1, keepdim=True)
        return (hidden * hidden[:, ids[0]].sum(-1, keepdim=True) * weights.sum(-1, keepdim=True)).sin()

    hidden = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    found = []
    for compiled in (False, True):
        function = recomputed(routed_twice, has_router=has_router)
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager") if compiled else function
        given = hidden.clone().requires_grad_()
        mode = Count()
        mode.phase = int(compiled)
        with mode:
            function(given).sum().backward()
        found.append(given.grad)
    plain = hidden.clone().requires_grad_()
    routed_twice(plain).sum().backward()
    assert all((each - plain.grad).norm() < 1e-6 * plain.grad.norm() for each in found)
    assert counts == runs
