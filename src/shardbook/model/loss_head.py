"""The loss head: a loss of logits in chunks, fused with the head's linear, that never holds all logits at once. What is
computed of a chunk's logits is cross_entropy.py's, or distillation.py's."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardbook.model.cross_entropy import (
    ChunkLoss,
    GatherParts,
    LogitTransform,
    LossOfLogits,
    Total,
    VocabularyPart,
    cross_entropy_of,
)

PRODUCT_ROWS = 32_768  # rows of the head's gradient that one product makes


class LossHead(nn.Linear):
    """The language-model head as a loss: hidden [n, hidden] and targets [n], int64 -> negative log-likelihood, fp32.

    Logits exist for `chunk_tokens` rows at a time (0: all); with a vocabulary of 128k and 8k trained tokens the whole
    fp32 matrix and its gradient would be 8 GB.
    """

    chunk_tokens: int = 0
    logit_transform: LogitTransform | None = None
    first: int = 0  # the first token id of the rows that are here
    gather_parts: GatherParts | None = None  # where other parts of the vocabulary lie elsewhere

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, summed: bool = False, loss: LossOfLogits | None = None
    ) -> Tensor:
        """Returns the loss of each target [n] or, `summed`, their sum: then forward makes the gradients too, from the
        logits that it has; otherwise backward computes each chunk's logits again. Without targets: logits [n,
        vocabulary]. `loss`: returns what that makes of the logits, in place of cross-entropy; its first number alone
        has a gradient, which forward makes."""
        if targets is None:
            return self.logits(hidden)
        rows = self.chunk_tokens or max(1, len(targets))
        part = VocabularyPart(self.first, self.out_features, self.gather_parts)
        if loss is None:
            total: Total | None = torch.sum if summed else None
            chunk_loss = cross_entropy_of(part, targets)
        else:
            chunk_loss, total = loss.of_targets(part, targets)
        if self.logit_transform:
            chunk_loss = partial(transformed_chunk_loss, self.logit_transform, chunk_loss)
        weight = self.local_weight
        return _ChunkedLoss.apply(hidden, weight, self.bias, rows, chunk_loss, total, torch.is_grad_enabled())

    def logits(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """Returns the logits [n, vocabulary] of hidden [n, hidden]; `count`: those of the first so many tokens."""
        logits = F.linear(hidden, self.local_weight[:count], None if self.bias is None else self.bias[:count])
        return self.logit_transform(logits) if self.logit_transform else logits

    @property
    def local_weight(self) -> Tensor:
        """The rows of the weight that are here, as a plain tensor: all of them."""
        return self.weight


class ScoreHead(nn.Linear):
    """A reward model's head: hidden [n, hidden] -> scores [n], fp32. Takes what LossHead takes."""

    # which of n scores pass a gradient on, where others have the same scores and gradients are summed; None: all do
    share_of: Callable[[int], slice] | None = None

    def forward(self, hidden: Tensor, targets: Tensor, summed: bool = False) -> Tensor:  # type: ignore[override]
        # A copy: FSDP warns of a view, whose hook an operation in place would drop.
        scores = F.linear(hidden, self.weight)[:, 0].to(torch.float32, copy=True)
        if self.share_of is None:
            return scores
        in_share = torch.zeros_like(scores, dtype=torch.bool)
        in_share[self.share_of(len(scores))].fill_(True)  # of none, where there are more ranks than scores
        return torch.where(in_share, scores, scores.detach())


class _ChunkedLoss(torch.autograd.Function):
    """The losses of n targets, through logits of `rows` of them at a time.

    With a `total` of the losses, whose gradient for each loss is 1, forward makes the gradients too: three products of
    [rows, vocabulary] in place of the four that recomputing takes (Hsu et al., Liger Kernel, arXiv 2410.10989, section
    3.2). Without one it returns each loss; what backward then multiplies them by is not known before, so each chunk's
    logits are computed again there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: int,
        chunk_loss: ChunkLoss,
        total: Total | None,
        trains: bool,
    ) -> Tensor:
        wanted = [trains and total is not None and needed for needed in ctx.needs_input_grad[:3]]
        losses, *ctx.gradients = chunked_loss(hidden, weight, rows, wanted, chunk_loss, None, bias)
        ctx.dtype, ctx.again = weight.dtype, None
        if total is not None:
            return total(losses)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.again = rows, chunk_loss  # not with a total: it would keep a teacher's output until backward
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if ctx.again:
            rows, chunk_loss = ctx.again
            hidden, weight, bias = ctx.saved_tensors
            wanted = ctx.needs_input_grad[:3]
            _, *gradients = chunked_loss(hidden, weight, rows, wanted, chunk_loss, grad_output, bias)
        elif ctx.gradients is None:
            raise RuntimeError("LossHead: this loss went backward already, and its gradients are gone")
        else:
            gradients, ctx.gradients = ctx.gradients, None
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(grad_output.flatten()[0])  # of the loss: a teacher's total has metrics after it
        of_hidden, *others = gradients
        return of_hidden, *(None if each is None else each.to(ctx.dtype) for each in others), None, None, None, None


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    rows: int,
    wanted: Sequence[bool],
    chunk_loss: ChunkLoss,
    grad_outputs: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Returns the loss of each target, fp32 [n], by `chunk_loss` of the logits of `rows` targets at a time; and, where
    `wanted`, the gradients of hidden states, of the weight and of the bias: of the sum of the losses, each times its
    `grad_outputs` [n] where given.

    Gradients of weight and bias are added up in fp32: a sum of 64 chunks in bf16 would lose small ones.
    """
    losses = torch.empty(len(hidden), device=hidden.device)
    of_hidden = torch.empty_like(hidden) if wanted[0] else None
    of_weight = of_bias = None
    if wanted[1]:
        fills = torch.empty if len(hidden) else torch.zeros  # the first chunk writes, the others add
        of_weight = fills(weight.shape, dtype=torch.float32, device=weight.device)
    if bias is not None and wanted[2]:
        of_bias = torch.zeros_like(bias, dtype=torch.float32)
    for first in range(0, len(hidden), rows):
        chunk = slice(first, first + rows)
        losses[chunk], grad_logits = chunk_loss(F.linear(hidden[chunk], weight, bias), chunk, any(wanted))
        if grad_outputs is not None:
            grad_logits *= grad_outputs[chunk, None]
        if of_hidden is not None:
            torch.mm(grad_logits, weight, out=of_hidden[chunk])
        if of_weight is not None:
            add_product(of_weight, grad_logits.t(), hidden[chunk], is_first=not first)
        if of_bias is not None:
            of_bias += grad_logits.sum(0, dtype=of_bias.dtype)
        del grad_logits  # else it is in memory beside the next chunk's logits
    return losses, of_hidden, of_weight, of_bias


def add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """Adds left [m, k] @ right [k, n] to `total` [m, n], fp32; `is_first`: overwrites it instead."""
    beta = 0 if is_first else 1
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
        return
    if total.is_cuda and adds_casted(total.device, left.dtype):
        torch.addmm(total, left, right, total.dtype, beta=beta, out=total)
        return
    for first in range(0, len(total), PRODUCT_ROWS):  # in pieces: a product of a whole vocabulary takes gigabytes
        piece = slice(first, first + PRODUCT_ROWS)
        if is_first:
            total[piece].copy_(left[piece] @ right)
        else:
            total[piece] += left[piece] @ right


@cache
def adds_casted(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch adds a product of `dtype` to an fp32 sum in one call: not where its cuBLAS call wants a sum
    of `dtype`, which only a call can tell. Otherwise each product is written, read and added."""
    few, total = torch.ones(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, few, few, torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def transformed_chunk_loss(
    logit_transform: LogitTransform, chunk_loss: ChunkLoss, logits: Tensor, chunk: slice, trains: bool
) -> tuple[Tensor, Tensor]:
    """Returns what `chunk_loss` does of a chunk's logits after the family's own `logit_transform`. The gradient is of
    the logits before it."""
    with torch.set_grad_enabled(trains):
        transformed = logit_transform(logits.requires_grad_(trains))
    losses, grad_logits = chunk_loss(transformed.detach(), chunk, trains)
    if trains:
        (grad_logits,) = torch.autograd.grad(transformed, logits, grad_logits)
    return losses, grad_logits
