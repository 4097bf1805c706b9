"""The loss head: a chunked cross-entropy, fused with the head's linear, that never holds all logits at once; and the
arithmetic of a cross-entropy over a vocabulary in parts."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardbook.comm.compile_on_cuda import fused

PRODUCT_ROWS = 32_768  # rows of the head's gradient that one product makes
# (a chunk's logits, the rows that it has, whether gradients are wanted) -> (losses, gradient of the logits)
ChunkLoss = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor]]
LogitTransform = Callable[[Tensor], Tensor]  # what a family's forward does with its head's logits [n, vocabulary]


class TeacherOutput(NamedTuple):
    """A teacher's hidden states at n trained positions and its head, to make its logits; and its part in the loss."""

    hidden: Tensor  # [n, teacher's hidden size]
    weight: Tensor  # [teacher's vocabulary, teacher's hidden size]
    temperature: float
    ratio: float  # share of the teacher in the loss (kd_ratio)
    bias: Tensor | None = None
    logit_transform: "LogitTransform | None" = None  # of its head's logits


class LossHead(nn.Linear):
    """The language-model head as a loss: hidden [n, hidden] and targets [n], int64 -> negative log-likelihood, fp32.

    Logits exist for `chunk_tokens` rows at a time (0: all); with a vocabulary of 128k and 8k trained tokens the whole
    fp32 matrix and its gradient would be 8 GB.
    """

    chunk_tokens: int = 0
    logit_transform: LogitTransform | None = None

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, summed: bool = False, teacher: TeacherOutput | None = None
    ) -> Tensor:
        """Returns the loss of each target [n] or, `summed`, their sum: then forward makes the gradients too, from the
        logits that it has; otherwise backward computes each chunk's logits again. Without targets: logits [n,
        vocabulary]. With a `teacher` three sums [3]: the loss, which alone has a gradient, and the negative
        log-likelihood and the divergence that it is made of."""
        weight = self.local_weight
        if targets is None:
            logits = F.linear(hidden, weight, self.bias)
            return self.logit_transform(logits) if self.logit_transform else logits
        rows = self.chunk_tokens or max(1, len(targets))
        chunk_loss = self.chunk_loss_of(targets)
        total: Callable[[Tensor], Tensor] | None = torch.sum if summed else None
        if teacher:
            divergences = torch.zeros(len(targets), device=hidden.device)
            chunk_loss = partial(chunk_distillation_loss, teacher, targets, divergences)
            total = partial(total_with_teacher, teacher, divergences)
        if self.logit_transform:
            chunk_loss = partial(transformed_chunk_loss, self.logit_transform, chunk_loss)
        return _ChunkedLoss.apply(hidden, weight, self.bias, rows, chunk_loss, total, torch.is_grad_enabled())

    @property
    def local_weight(self) -> Tensor:
        """The rows of the weight that are here, as a plain tensor: all of them."""
        return self.weight

    def chunk_loss_of(self, targets: Tensor) -> ChunkLoss:
        return partial(chunk_cross_entropy, targets)


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
        total: Callable[[Tensor], Tensor] | None,
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


def subtract_one(grad_logits: Tensor, where: Tensor) -> Tensor:
    """Returns `grad_logits` [n, V] less one at `where` [n, 1]. It works in place or, compiled, inside the fused kernel
    around it, which a scatter would end, with its result written in fp32. Both give the same bits."""
    if torch.compiler.is_compiling():
        return torch.where(
            torch.arange(grad_logits.shape[1], device=grad_logits.device) == where, grad_logits - 1, grad_logits
        )
    return grad_logits.scatter_add_(1, where, torch.full_like(where, -1, dtype=grad_logits.dtype))


def cross_entropy(logits: Tensor, targets: Tensor, trains: bool) -> tuple[Tensor, Tensor]:
    """Returns the losses of logits [n, V], fp32 [n], and the gradient of the losses' sum [n, V] in the logits' dtype
    (not `trains`: the logits). It makes one fp32 tensor of their size, or none: fp32 logits are overwritten."""
    grad_logits, where = logits.float(), targets[:, None]
    grad_logits -= grad_logits.amax(-1, keepdim=True)
    picked = grad_logits.gather(1, where)
    sums = grad_logits.exp_().sum(-1, keepdim=True)
    losses = (sums.log() - picked)[:, 0]
    if not trains:
        return losses, logits  # not `grad_logits`: a compiled function would write it to memory
    grad_logits /= sums
    return losses, subtract_one(grad_logits, where).to(logits.dtype)


def distillation_loss(
    logits: Tensor, teacher_logits: Tensor, targets: Tensor, temperature: float, ratio: float, trains: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for logits [n, V] and teacher logits [n, W], W <= V: the losses and the divergences KL(teacher ||
    student) over the first W tokens (F.kl_div), both fp32 [n], and, as cross_entropy, the gradient of the weighted sum.
    At most four fp32 tensors of that size exist at once."""
    grad_logits, where, both = logits.float(), targets[:, None], teacher_logits.shape[1]
    ours = grad_logits[:, :both] / temperature
    ours -= ours.logsumexp(-1, keepdim=True)
    teacher = teacher_logits.float()
    teacher /= temperature
    teacher -= teacher.logsumexp(-1, keepdim=True)
    probabilities = teacher.exp()
    teacher -= ours
    teacher *= probabilities
    divergences = teacher.sum(-1)
    del teacher
    grad_logits -= grad_logits.logsumexp(-1, keepdim=True)
    losses = -grad_logits.gather(1, where)[:, 0]
    if not trains:
        return losses, divergences, logits
    grad_logits = subtract_one(grad_logits.exp_(), where)
    grad_logits *= 1 - ratio
    ours.exp_()
    ours -= probabilities
    ours *= ratio * temperature  # T^2 of the loss, times the 1 / T of the logits' scaling
    grad_logits[:, :both] += ours
    return losses, divergences, grad_logits.to(logits.dtype)


def chunk_cross_entropy(targets: Tensor, logits: Tensor, chunk: slice, trains: bool) -> tuple[Tensor, Tensor]:
    return fused(cross_entropy, logits.device.type, static_widths=True)(logits, targets[chunk], trains)


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


def chunk_distillation_loss(
    teacher: TeacherOutput, targets: Tensor, divergences: Tensor, logits: Tensor, chunk: slice, trains: bool
) -> tuple[Tensor, Tensor]:
    """Returns `chunk_cross_entropy` of the rows `chunk` beside a teacher, and writes their `divergences`. The logits of
    both models exist for these rows only. Where one vocabulary is padded further than the other, the divergence is over
    the tokens that both have."""
    both = slice(logits.shape[1])
    teacher_logits = F.linear(
        teacher.hidden[chunk], teacher.weight[both], None if teacher.bias is None else teacher.bias[both]
    )
    if teacher.logit_transform:
        teacher_logits = teacher.logit_transform(teacher_logits)
    loss = fused(distillation_loss, logits.device.type, static_widths=True)
    losses, divergences[chunk], grad_logits = loss(
        logits, teacher_logits, targets[chunk], teacher.temperature, teacher.ratio, trains
    )
    return losses, grad_logits


def total_with_teacher(teacher: TeacherOutput, divergences: Tensor, losses: Tensor) -> Tensor:
    """Returns [3]: the loss (1 - ratio) * NLL + ratio * T^2 * KL(teacher || student), both distributions at temperature
    T (Hinton et al., arXiv 1503.02531, section 2); the NLL; and the KL."""
    ratio, likelihood, divergence = teacher.ratio, losses.sum(), divergences.sum()
    return torch.stack([(1 - ratio) * likelihood + ratio * teacher.temperature**2 * divergence, likelihood, divergence])


def local_exponentials(logits: Tensor, targets: Tensor, trains: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns exp(logits - their largest) [n, V] (not `trains`: the logits); and, each fp32 [n], the largest logit, the
    sum of the exponentials, and the target's logit, or 0 where another rank has it."""
    grad_logits = logits.float()
    outside, where = (targets < 0) | (targets >= grad_logits.shape[1]), targets.clamp(0, grad_logits.shape[1] - 1)
    largest = grad_logits.amax(-1, keepdim=True)
    picked = grad_logits.gather(1, where[:, None])[:, 0].masked_fill(outside, 0.0)
    grad_logits = (grad_logits - largest).exp_() if grad_logits is logits else grad_logits.sub_(largest).exp_()
    return grad_logits if trains else logits, largest[:, 0], grad_logits.sum(-1), picked


def combine_ranks(gathered: Tensor, local_largest: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the losses, and the factor that makes probabilities of this rank's exponentials; [n] both. `gathered`
    [ranks, 3, n]: the three numbers of each rank; `local_largest` [n]: this rank's largest logits."""
    largest, sums, picked = gathered.unbind(1)
    peak = largest.amax(0)
    total = (sums * (largest - peak).exp()).sum(0)
    return peak + total.log() - picked.sum(0), (local_largest - peak).exp() / total


def local_grad_logits(grad_logits: Tensor, share: Tensor, targets: Tensor) -> Tensor:
    grad_logits *= share[:, None]
    if torch.compiler.is_compiling():
        return subtract_one(grad_logits, targets[:, None])  # a target of another rank matches no column
    inside = (targets >= 0) & (targets < grad_logits.shape[1])
    where = targets.clamp(0, grad_logits.shape[1] - 1)[:, None]
    return grad_logits.scatter_add_(1, where, -inside.to(grad_logits.dtype)[:, None])
