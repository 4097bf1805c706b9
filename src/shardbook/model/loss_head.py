"""The loss head: hidden states and targets become losses, never all logits at once."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardbook.parallel.tensor import TensorAxis, gather_plain, local_part

PRODUCT_ROWS = 32_768  # of the head's gradient, made at once
# of a chunk's logits, which rows these are, and whether slopes are wanted: losses and slopes
Compare = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor]]


class Lesson(NamedTuple):
    """What a teacher says of n trained positions, as what its logits are made of, and how it counts."""

    hidden: Tensor  # [n, its width]
    weight: Tensor  # [its vocabulary, its width]
    temperature: float
    ratio: float  # of the teacher in the loss


class LossHead(nn.Linear):
    """The language-model head as a loss: hidden [n, hidden] and targets [n], int64 -> negative log-likelihood, fp32.

    Logits exist for `chunk_tokens` rows at a time (0: all); with a vocabulary of 128k and 8k trained tokens the whole
    fp32 matrix and its gradient would be 8 GB.
    """

    chunk_tokens: int = 0
    axis: TensorAxis | None = None  # whose ranks have each a part of the vocabulary
    first: int = 0  # of this rank's

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, summed: bool = False, lesson: Lesson | None = None
    ) -> Tensor:
        """The loss of each target [n], or, `summed`, their sum: then gradients are made with the logits at hand, where
        the other form makes each chunk's logits again in backward. Without targets: logits [n, vocabulary]. With a
        `lesson` three sums [3]: the loss, which alone has the gradient; likelihood and divergence that are in it."""
        weight, axis = local_part(self.weight), self.axis
        if targets is None:
            return F.linear(hidden, weight)
        rows = self.chunk_tokens or max(1, len(targets))
        if lesson:
            return _TaughtLoss.apply(hidden, weight, targets, lesson, rows, torch.is_grad_enabled())
        compare = partial(score_part, axis, targets - self.first) if axis else partial(score, targets)
        if summed:
            return _SummedLoss.apply(hidden, weight, rows, torch.is_grad_enabled(), compare)
        return _Losses.apply(hidden, weight, rows, compare)


class ScoreHead(nn.Linear):
    """A reward model's head: hidden [n, hidden] -> scores [n], fp32. Takes what LossHead takes."""

    def forward(self, hidden: Tensor, targets: Tensor, summed: bool = False) -> Tensor:  # type: ignore[override]
        # a copy: of a view FSDP warns that an operation in place would drop its hook
        return F.linear(hidden, self.weight)[:, 0].to(torch.float32, copy=True)


class _SummedLoss(torch.autograd.Function):
    """Loss and its gradients in one go over the chunks: three products of [rows, vocabulary] in place of the four that
    recomputing takes (Hsu et al., Liger Kernel, arXiv 2410.10989, section 3.2)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: int, trains: bool, compare: Compare) -> Tensor:
        wanted = [trains and needed for needed in ctx.needs_input_grad[:2]]
        losses, *ctx.gradients = score_chunks(hidden, weight, rows, wanted, compare)
        ctx.dtype = weight.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        return *made_in_forward(ctx, slope), None, None, None


def made_in_forward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden states and weight that forward left in `ctx`, times `slope`."""
    if ctx.gradients is None:
        raise RuntimeError("LossHead: this loss went backward already, and its gradients are gone")
    of_hidden, of_weight = ctx.gradients
    ctx.gradients = None
    if of_hidden is not None:
        of_hidden.mul_(slope)
    if of_weight is not None:
        of_weight = of_weight.mul_(slope).to(ctx.dtype)
    return of_hidden, of_weight


class _TaughtLoss(torch.autograd.Function):
    """The same of (1 - ratio) * NLL + ratio * T^2 * KL(teacher || student), both distributions at temperature T (Hinton
    et al., arXiv 1503.02531, section 2): the logits of both models exist for the rows of a chunk.

    Where one vocabulary is padded further than the other, the divergence is of what both have.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, lesson: Lesson, rows: int, trains: bool
    ) -> Tensor:
        wanted = [trains and needed for needed in ctx.needs_input_grad[:2]]
        theirs, temperature, ratio = lesson.weight[: len(weight)], lesson.temperature, lesson.ratio
        divergences = torch.zeros(len(targets), device=hidden.device)

        def compare(logits: Tensor, here: slice, trains: bool) -> tuple[Tensor, Tensor]:
            taught = F.linear(lesson.hidden[here], theirs)
            score = run_as_one(score_taught, logits.is_cuda)
            losses, divergences[here], slope = score(logits, taught, targets[here], temperature, ratio, trains)
            return losses, slope

        losses, *ctx.gradients = score_chunks(hidden, weight, rows, wanted, compare)
        ctx.dtype = weight.dtype
        likelihood, divergence = losses.sum(), divergences.sum()
        return torch.stack([(1 - ratio) * likelihood + ratio * temperature**2 * divergence, likelihood, divergence])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> Any:
        return *made_in_forward(ctx, slopes[0]), None, None, None, None


class _Losses(torch.autograd.Function):
    """The loss of each target, whose slopes are known in backward only: there each chunk's logits are made again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: int, compare: Compare) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.rows, ctx.compare = rows, compare
        return score_chunks(hidden, weight, rows, [False, False], compare)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        _, of_hidden, of_weight = score_chunks(hidden, weight, ctx.rows, wanted, ctx.compare, slopes)
        return of_hidden, of_weight.to(weight.dtype) if of_weight is not None else None, None, None


def score_chunks(
    hidden: Tensor, weight: Tensor, rows: int, wanted: Sequence[bool], compare: Compare, slopes: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss of each target, fp32 [n], with the logits of `rows` of them at a time, by `compare`; and, where
    `wanted`, gradients of hidden states and of the weight: of the sum of losses, or of each times its `slopes` [n].

    The weight's gradient is added up in fp32: 64 chunks in bf16 would lose small ones.
    """
    losses = torch.empty(len(hidden), device=hidden.device)
    of_hidden = torch.empty_like(hidden) if wanted[0] else None
    of_weight = None
    if wanted[1]:
        fills = torch.empty if len(hidden) else torch.zeros  # the first chunk writes, the others add
        of_weight = fills(weight.shape, dtype=torch.float32, device=weight.device)
    for first in range(0, len(hidden), rows):
        here = slice(first, first + rows)
        losses[here], slope = compare(F.linear(hidden[here], weight), here, any(wanted))
        if slopes is not None:
            slope *= slopes[here, None]
        if of_hidden is not None:
            torch.mm(slope, weight, out=of_hidden[here])
        if of_weight is not None:
            add_product(of_weight, slope.t(), hidden[here], is_first=not first)
        del slope  # before the next chunk's logits
    return losses, of_hidden, of_weight


def add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """`total` [m, n], fp32, plus left [m, k] @ right [k, n]; the first is written over whatever it holds."""
    beta = 0 if is_first else 1
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
        return
    if total.is_cuda and adds_casted(total.device, left.dtype):
        torch.addmm(total, left, right, total.dtype, beta=beta, out=total)
        return
    for first in range(0, len(total), PRODUCT_ROWS):  # not at once: a product of a whole vocabulary is gigabytes
        here = slice(first, first + PRODUCT_ROWS)
        if is_first:
            total[here].copy_(left[here] @ right)
        else:
            total[here] += left[here] @ right


@cache
def adds_casted(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch accumulates a product of `dtype` into an fp32 sum: not where its cuBLAS call wants a sum of
    `dtype` (a version says so only when it is called). Else each product is written, read and added."""
    few, total = torch.ones(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, few, few, torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def subtract_one(slope: Tensor, where: Tensor) -> Tensor:
    """`slope` [n, V], less one at `where` [n, 1]: in place or, compiled, as a part of the kernel around it, which would
    end at a scatter and be written in fp32. The same bits."""
    if torch.compiler.is_compiling():
        return torch.where(torch.arange(slope.shape[1], device=slope.device) == where, slope - 1, slope)
    return slope.scatter_add_(1, where, torch.full_like(where, -1, dtype=slope.dtype))


def score_plain(logits: Tensor, targets: Tensor, trains: bool) -> tuple[Tensor, Tensor]:
    """Returns the losses of logits [n, V], fp32 [n], and the gradient of their sum [n, V] in their dtype (not `trains`:
    the logits). One fp32 tensor of their size is made, or none: logits in fp32 are written over."""
    slope, where = logits.float(), targets[:, None]
    slope -= slope.amax(-1, keepdim=True)
    picked = slope.gather(1, where)
    sums = slope.exp_().sum(-1, keepdim=True)
    losses = (sums.log() - picked)[:, 0]
    if not trains:
        return losses, logits  # a compiled function writes what it returns
    slope /= sums
    return losses, subtract_one(slope, where).to(logits.dtype)


def score_taught(
    logits: Tensor, theirs: Tensor, targets: Tensor, temperature: float, ratio: float, trains: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits [n, V] and a teacher's [n, W], W <= V: the losses, the divergences KL(teacher || student) of the first
    W, both fp32 [n], and as score_plain the gradient of the sum. At most four fp32 tensors of that size are there."""
    slope, where, both = logits.float(), targets[:, None], theirs.shape[1]
    ours = slope[:, :both] / temperature
    ours -= ours.logsumexp(-1, keepdim=True)
    theirs = theirs.float()
    theirs /= temperature
    theirs -= theirs.logsumexp(-1, keepdim=True)
    shares = theirs.exp()
    theirs -= ours
    theirs *= shares
    divergences = theirs.sum(-1)
    del theirs
    slope -= slope.logsumexp(-1, keepdim=True)
    losses = -slope.gather(1, where)[:, 0]
    if not trains:
        return losses, divergences, logits
    slope = subtract_one(slope.exp_(), where)
    slope *= 1 - ratio
    ours.exp_()
    ours -= shares
    ours *= ratio * temperature  # temperature squared, and one divided by it
    slope[:, :both] += ours
    return losses, divergences, slope.to(logits.dtype)


@cache
def run_as_one(function: Any, is_cuda: bool) -> Any:
    """On a GPU one kernel in place of many passes over [rows, vocabulary]; dynamic: the last chunk's length differs
    each time. Not at import, which would pull the compiler into every process."""
    return torch.compile(function, dynamic=True) if is_cuda else function


def score(targets: Tensor, logits: Tensor, here: slice, trains: bool) -> tuple[Tensor, Tensor]:
    scored: tuple[Tensor, Tensor] = run_as_one(score_plain, logits.is_cuda)(logits, targets[here], trains)
    return scored


def score_part(axis: TensorAxis, targets: Tensor, logits: Tensor, here: slice, trains: bool) -> tuple[Tensor, Tensor]:
    """score of the rows `here`, where each rank has the logits [n, V] of its own part of the vocabulary and `targets`
    count from the first of these: one gather of three numbers a row (Megatron-LM, arXiv 1909.08053, section 3, has two
    all-reduces). The same losses on every rank; slopes of its own part."""
    slope, *own = run_as_one(begin_part, logits.is_cuda)(logits, targets[here], trains)
    told = gather_plain(torch.stack(own)[None], axis).view(axis.size, 3, -1)
    losses, share = run_as_one(end_part, logits.is_cuda)(told, own[0])
    if trains:
        slope = run_as_one(slope_of_part, logits.is_cuda)(slope, share, targets[here]).to(logits.dtype)
    return losses, slope


def begin_part(logits: Tensor, targets: Tensor, trains: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """exp(logits - their largest) [n, V] (not `trains`: what lies there); that, their sum, and the logit of the target
    or 0: each fp32 [n]."""
    slope = logits.float()
    outside, where = (targets < 0) | (targets >= slope.shape[1]), targets.clamp(0, slope.shape[1] - 1)
    largest = slope.amax(-1, keepdim=True)
    picked = slope.gather(1, where[:, None])[:, 0].masked_fill(outside, 0.0)
    slope = (slope - largest).exp_() if slope is logits else slope.sub_(largest).exp_()
    return slope if trains else logits, largest[:, 0], slope.sum(-1), picked


def end_part(told: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """From what each rank `told` [ranks, 3, n], with the `own` largest logit: losses, and what makes shares of the
    whole of this rank's exponentials, [n] both."""
    largest, sums, picked = told.unbind(1)
    peak = largest.amax(0)
    total = (sums * (largest - peak).exp()).sum(0)
    return peak + total.log() - picked.sum(0), (own - peak).exp() / total


def slope_of_part(slope: Tensor, share: Tensor, targets: Tensor) -> Tensor:
    slope *= share[:, None]
    if torch.compiler.is_compiling():
        return subtract_one(slope, targets[:, None])  # one outside is at no place
    inside = (targets >= 0) & (targets < slope.shape[1])
    where = targets.clamp(0, slope.shape[1] - 1)[:, None]
    return slope.scatter_add_(1, where, -inside.to(slope.dtype)[:, None])
