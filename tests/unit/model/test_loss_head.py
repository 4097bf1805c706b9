"""The loss head's work as a GPU does it: what is compiled there, and a product that is added as it is made."""

import pytest
import torch

from shardbook.model import loss_head
from shardbook.model.loss_head import chunked_loss

ROWS, VOCABULARY = 37, 300


def logits_and_targets(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return (3 * torch.randn(ROWS, VOCABULARY)).to(dtype), torch.randint(0, VOCABULARY, (ROWS,))


def local_grad_logits(logits, targets):
    grad_output, *_ = loss_head.local_exponentials(logits, targets, True)
    return loss_head.local_grad_logits(grad_output, torch.full((ROWS,), 0.3), targets)


FUNCTIONS = {
    "plain": lambda logits, targets: loss_head.cross_entropy(logits, targets, True),
    "taught": lambda logits, targets: loss_head.distillation_loss(
        logits, logits.flip(1)[:, :290], targets, 2.0, 0.3, True
    ),
    "part": lambda logits, targets: local_grad_logits(logits, targets - 100),  # of some rows the target is elsewhere
}


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
    _, (code,) = run_and_get_code(torch.compile(loss_head.cross_entropy, dynamic=True), logits, targets, True)
    assert code.count('extern "C"') == 1


def test_where_nothing_is_trained_nothing_of_the_logits_size_comes_back():
    logits, targets = logits_and_targets()
    assert loss_head.cross_entropy(logits, targets, False)[1] is logits
    assert loss_head.distillation_loss(logits, logits, targets, 1.0, 0.5, False)[2] is logits
    assert loss_head.local_exponentials(logits, targets, False)[0] is logits


def test_a_product_is_added_to_fp32_as_it_is_made_where_torch_has_it(monkeypatch):
    """With a stand-in of CUDA's kernel, by the names that torch's own schema has: no product beside, none rounded."""

    class OnCuda(torch.Tensor):
        is_cuda = True

    products, arguments = [], torch.ops.aten.addmm.dtype_out._schema.arguments
    assert [each.name for each in arguments] == ["self", "mat1", "mat2", "out_dtype", "beta", "alpha", "out"]

    def addmm(total, left, right, dtype, *, beta, out):
        products.append(tuple(left.shape))
        plain = total.as_subclass(torch.Tensor)
        plain.copy_((beta * plain if beta else 0) + left.float() @ right.float())
        return out

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(loss_head, "adds_casted", lambda device, dtype: True)
    left, right = torch.randn(64, 8).bfloat16(), torch.randn(8, 5).bfloat16()
    total = torch.full((64, 5), torch.nan).as_subclass(OnCuda)  # as torch.empty may be
    loss_head.add_product(total, left, right, is_first=True)
    loss_head.add_product(total, left, right, is_first=False)
    assert (
        torch.equal(total.as_subclass(torch.Tensor), 2 * (left.float() @ right.float())) and products == [(64, 8)] * 2
    )


def test_a_device_that_cannot_add_so_is_known():
    """The CPU, and CUDA in versions that want a sum in the product's dtype."""
    assert not loss_head.adds_casted(torch.device("cpu"), torch.bfloat16)


def test_on_a_cpu_chunks_add_up_as_ever():
    """The product in bf16, then the sum in fp32."""
    _, targets = logits_and_targets()
    hidden, weight = torch.randn(ROWS, 16).bfloat16(), torch.randn(VOCABULARY, 16).bfloat16()

    def compare(chunk, here, trains):
        return loss_head.chunk_cross_entropy(targets, chunk, here, trains)

    _, _, got, _ = chunked_loss(hidden, weight, 10, [False, True, False], compare)
    wanted = torch.zeros(VOCABULARY, 16)
    for first in range(0, ROWS, 10):
        here = slice(first, first + 10)
        _, grad_output = loss_head.cross_entropy(hidden[here] @ weight.t(), targets[here], True)
        wanted += grad_output.t() @ hidden[here]
    assert torch.equal(got, wanted)
