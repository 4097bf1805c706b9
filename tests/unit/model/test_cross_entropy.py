"""Cross-entropy and a teacher's divergence as a GPU computes them: what is compiled there, and what comes back."""

import pytest
import torch

from shardbook.model import cross_entropy, distillation

ROWS, VOCABULARY = 37, 300


def logits_and_targets(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return (3 * torch.randn(ROWS, VOCABULARY)).to(dtype), torch.randint(0, VOCABULARY, (ROWS,))


def local_grad_logits(logits, targets):
    grad_output, *_ = cross_entropy.local_exponentials(logits, targets, True)
    return cross_entropy.local_grad_logits(grad_output, torch.full((ROWS,), 0.3), targets)


FUNCTIONS = {
    "plain": lambda logits, targets: cross_entropy.cross_entropy(logits, targets, True),
    "taught": lambda logits, targets: distillation.distillation_loss(
        logits, logits.flip(1)[:, :290], targets, 2.0, 0.3, True
    ),
    "part": lambda logits, targets: local_grad_logits(logits, targets - 100),  # of some rows the target is elsewhere
    "taught part": lambda logits, targets: taught_part(logits, targets - 100),
}


def taught_part(logits, targets):
    teacher, sums = logits.flip(1), torch.full((2, ROWS), 9.0)
    return distillation.divergence_of_part(logits, teacher[:, :290], teacher, targets, *sums, 2.0, 0.3, True)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_without_a_scatter_the_bits_are_the_same(name, dtype):
    logits, targets = logits_and_targets(dtype)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    torch._dynamo.reset()
    found = torch.compile(FUNCTIONS[name], backend=keep)(logits.clone(), targets)
    wanted = FUNCTIONS[name](logits.clone(), targets)
    for one, other in zip(*([each] if name == "part" else each for each in (found, wanted)), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert len(graphs) == 1 and "scatter" not in graphs[0] and "where" in graphs[0]


@pytest.mark.slow
def test_compiled_the_loss_is_one_kernel():
    """A scatter would be a second one, between which the gradient is written in fp32."""
    from torch._inductor.utils import run_and_get_code

    logits, targets = logits_and_targets()
    torch._dynamo.reset()
    _, (code,) = run_and_get_code(torch.compile(cross_entropy.cross_entropy, dynamic=True), logits, targets, True)
    assert code.count('extern "C"') == 1


def test_where_nothing_is_trained_nothing_of_the_logits_size_comes_back():
    logits, targets = logits_and_targets()
    assert cross_entropy.cross_entropy(logits, targets, False)[1] is logits
    assert distillation.distillation_loss(logits, logits, targets, 1.0, 0.5, False)[2] is logits
    assert cross_entropy.local_exponentials(logits, targets, False)[0] is logits
