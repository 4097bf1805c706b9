"""The loss head's work as a GPU does it: a product that is added as it is made."""

import pytest
import torch

from shardbook.model import cross_entropy, loss_head
from shardbook.model.loss_head import LossHead, chunked_loss

ROWS, VOCABULARY = 37, 300


def logits_and_targets(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return (3 * torch.randn(ROWS, VOCABULARY)).to(dtype), torch.randint(0, VOCABULARY, (ROWS,))


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
        return cross_entropy.chunk_cross_entropy(targets, chunk, here, trains)

    _, _, got, _ = chunked_loss(hidden, weight, 10, [False, True, False], compare)
    wanted = torch.zeros(VOCABULARY, 16)
    for first in range(0, ROWS, 10):
        here = slice(first, first + 10)
        _, grad_output = cross_entropy.cross_entropy(hidden[here] @ weight.t(), targets[here], True)
        wanted += grad_output.t() @ hidden[here]
    assert torch.equal(got, wanted)


def of_head(head, hidden, targets, summed):
    head.weight.grad = hidden.grad = None
    loss = head(hidden, targets, summed).sum() / 3
    loss.backward()
    return loss.detach(), hidden.grad, head.weight.grad


def random_head(dtype=torch.float32, count=37):
    torch.manual_seed(0)
    head = LossHead(16, 101, bias=False).to(dtype)
    hidden = torch.randn(count, 16).to(dtype).requires_grad_()
    return head, hidden, torch.randint(0, 101, (count,))


@pytest.mark.parametrize("chunk", [0, 8, 37, 100])
def test_gradients_made_in_forward_are_those_of_cross_entropy(chunk):
    head, hidden, targets = random_head()
    plain = torch.nn.functional.cross_entropy(hidden.double() @ head.weight.double().t(), targets, reduction="sum") / 3
    expected = plain, *torch.autograd.grad(plain, (hidden, head.weight))
    head.chunk_tokens = chunk
    for got, wanted in zip(of_head(head, hidden, targets, summed=True), expected, strict=True):
        assert ((got - wanted).norm() / wanted.norm()).item() < 3e-7


def test_64_chunks_in_bf16_add_up_in_fp32():
    """Against fp64 of the same bf16 numbers: 64 sums in bf16 are wrong by 5e-3 and more, one rounding by 2^-9 at most;
    slopes of single losses are rounded once more."""
    head, hidden, targets = random_head(torch.bfloat16, count=64 * 16)
    wide, weight = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    plain = torch.nn.functional.cross_entropy(wide @ weight.t(), targets, reduction="sum") / 3
    (wanted,) = torch.autograd.grad(plain, weight)
    head.chunk_tokens = 16
    got = of_head(head, hidden, targets, summed=True)[2]
    per_token = of_head(head, hidden, targets, summed=False)[2]
    in_bf16 = torch.zeros_like(head.weight)
    for rows, wants in zip(hidden.split(16), targets.split(16), strict=True):
        chunk = torch.nn.functional.cross_entropy(rows @ head.weight.t(), wants, reduction="sum") / 3
        in_bf16 += torch.autograd.grad(chunk, head.weight)[0]
    errors = [((found.double() - wanted).norm() / wanted.norm()).item() for found in (got, per_token, in_bf16)]
    assert max(errors[:2]) < 4e-3 < errors[2], errors


def test_a_lost_chunk_is_seen(monkeypatch):
    from shardbook.model import loss_head

    head, hidden, targets = random_head()
    whole = of_head(head, hidden, targets, summed=True)[2]
    head.chunk_tokens, real = 8, loss_head.add_product
    monkeypatch.setattr(
        loss_head, "add_product", lambda total, left, right, is_first: real(total, left, right, is_first=True)
    )
    lost = of_head(head, hidden, targets, summed=True)[2]
    assert ((lost - whole).norm() / whole.norm()).item() > 0.1


def test_an_evaluation_makes_no_gradient_and_a_frozen_head_none_of_its_own(monkeypatch):
    from shardbook.model import loss_head

    head, hidden, targets = random_head()
    monkeypatch.setattr(loss_head, "add_product", lambda *given: pytest.fail("made a gradient of the weight"))
    with torch.no_grad():
        alone = head(hidden, targets, summed=True)
    assert alone.item() == pytest.approx(head(hidden, targets).sum().item(), rel=1e-6)
    head.weight.requires_grad_(False)
    head(hidden, targets, summed=True).backward()
    assert hidden.grad.any() and head.weight.grad is None


def test_a_loss_goes_backward_once():
    head, hidden, targets = random_head()
    loss = head(hidden, targets, summed=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="went backward already"):
        loss.backward()
