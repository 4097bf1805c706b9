"""The loss head: hidden states and targets become losses, never all logits at once."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardbook.parallel.tensor import TensorAxis, gather_plain, local_part

PRODUCT_ROWS = 32_768  # rows of the head's gradient that one product makes
# (a chunk's logits, the rows that it has, whether gradients are wanted) -> (losses, gradient of the logits)
Compare = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor]]


class TeacherOutput(NamedTuple):
    """A teacher's hidden states at n trained positions and its head, to make its logits; and its part in the loss."""

    hidden: Tensor  # [n, teacher's hidden size]
    weight: Tensor  # [teacher's vocabulary, teacher's hidden size]
    temperature: float
    ratio: float  # share of the teacher in the loss (kd_ratio)


class LossHead(nn.Linear):
    """The language-model head as a loss: hidden [n, hidden] and targets [n], int64 -> negative log-likelihood, fp32.

    Logits exist for `chunk_tokens` rows at a time (0: all); with a vocabulary of 128k and 8k trained tokens the whole
    fp32 matrix and its gradient would be 8 GB.
    """

    chunk_tokens: int = 0
    axis: TensorAxis | None = None  # set where each tensor-parallel rank has a part of the vocabulary
    first: int = 0  # the first token id of this rank's part

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, summed: bool = False, teacher: TeacherOutput | None = None
    ) -> Tensor:
        """Returns the loss of each target [n] or, `summed`, their sum: then forward makes the gradients too, from the
        logits that it has; otherwise backward computes each chunk's logits again. Without targets: logits [n,
        vocabulary]. With a `teacher` three sums [3]: the loss, which alone has a gradient, and the negative
        log-likelihood and the divergence that it is made of."""
        weight, axis = local_part(self.weight), self.axis
        if targets is None:
            return F.linear(hidden, weight)
        rows = self.chunk_tokens or max(1, len(targets))
        if teacher:
            return _DistillLoss.apply(hidden, weight, targets, teacher, rows, torch.is_grad_enabled())
        compare = partial(score_part, axis, targets - self.first) if axis else partial(score, targets)
        if summed:
            return _SummedLoss.apply(hidden, weight, rows, torch.is_grad_enabled(), compare)
        return _Losses.apply(hidden, weight, rows, compare)


class ScoreHead(nn.Linear):
    """A reward model's head: hidden [n, hidden] -> scores [n], fp32. Takes what LossHead takes."""

    def forward(self, hidden: Tensor, targets: Tensor, summed: bool = False) -> Tensor:  # type: ignore[override]
        # A copy: FSDP warns of a view, whose hook an operation in place would drop.
        return F.linear(hidden, self.weight)[:, 0].to(torch.float32, copy=True)


class _SummedLoss(torch.autograd.Function):
    """The summed loss and its gradients in one pass over the chunks: three products of [rows, vocabulary] in place of
    the four that recomputing takes (Hsu et al., Liger Kernel, arXiv 2410.10989, section 3.2)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: int, trains: bool, compare: Compare) -> Tensor:
        wanted = [trains and needed for needed in ctx.needs_input_grad[:2]]
        losses, *ctx.gradients = score_chunks(hidden, weight, rows, wanted, compare)
        ctx.dtype = weight.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return *made_in_forward(ctx, grad_output), None, None, None


def made_in_forward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of hidden states and weight that forward left in `ctx`, times `grad_output`. Raises
    RuntimeError in a second backward: the first one took them."""
    if ctx.gradients is None:
        raise RuntimeError("LossHead: this loss went backward already, and its gradients are gone")
    of_hidden, of_weight = ctx.gradients
    ctx.gradients = None
    if of_hidden is not None:
        of_hidden.mul_(grad_output)
    if of_weight is not None:
        of_weight = of_weight.mul_(grad_output).to(ctx.dtype)
    return of_hidden, of_weight


class _DistillLoss(torch.autograd.Function):
    """The summed loss (1 - ratio) * NLL + ratio * T^2 * KL(teacher || student) and its gradients in one pass, both
    distributions at temperature T (Hinton et al., arXiv 1503.02531, section 2). The logits of both models exist for the
    rows of one chunk at a time.

    Where one vocabulary is padded further than the other, the divergence is over the tokens that both have.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, teacher: TeacherOutput, rows: int, trains: bool
    ) -> Tensor:
        wanted = [trains and needed for needed in ctx.needs_input_grad[:2]]
        theirs, temperature, ratio = teacher.weight[: len(weight)], teacher.temperature, teacher.ratio
        divergences = torch.zeros(len(targets), device=hidden.device)

        def compare(logits: Tensor, here: slice, trains: bool) -> tuple[Tensor, Tensor]:
            taught = F.linear(teacher.hidden[here], theirs)
            score = run_as_one(score_distilled, logits.is_cuda)
            losses, divergences[here], grad_output = score(logits, taught, targets[here], temperature, ratio, trains)
            return losses, grad_output

        losses, *ctx.gradients = score_chunks(hidden, weight, rows, wanted, compare)
        ctx.dtype = weight.dtype
        likelihood, divergence = losses.sum(), divergences.sum()
        return torch.stack([(1 - ratio) * likelihood + ratio * temperature**2 * divergence, likelihood, divergence])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: Tensor) -> Any:
        return *made_in_forward(ctx, grad_outputs[0]), None, None, None, None


class _Losses(torch.autograd.Function):
    """The loss of each target. grad_output is known in backward only: there each chunk's logits are computed again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: int, compare: Compare) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.rows, ctx.compare = rows, compare
        return score_chunks(hidden, weight, rows, [False, False], compare)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        _, of_hidden, of_weight = score_chunks(hidden, weight, ctx.rows, wanted, ctx.compare, grad_outputs)
        return of_hidden, of_weight.to(weight.dtype) if of_weight is not None else None, None, None


def score_chunks(
    hidden: Tensor,
    weight: Tensor,
    rows: int,
    wanted: Sequence[bool],
    compare: Compare,
    grad_outputs: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the loss of each target, fp32 [n], by `compare` of the logits of `rows` targets at a time; and, where
    `wanted`, the gradients of hidden states and of the weight: of the sum of the losses, each times its
    `grad_outputs` [n] where given.

    The weight's gradient is added up in fp32: a sum of 64 chunks in bf16 would lose small ones.
    """
    losses = torch.empty(len(hidden), device=hidden.device)
    of_hidden = torch.empty_like(hidden) if wanted[0] else None
    of_weight = None
    if wanted[1]:
        fills = torch.empty if len(hidden) else torch.zeros  # the first chunk writes, the others add
        of_weight = fills(weight.shape, dtype=torch.float32, device=weight.device)
    for first in range(0, len(hidden), rows):
        here = slice(first, first + rows)
        losses[here], grad_output = compare(F.linear(hidden[here], weight), here, any(wanted))
        if grad_outputs is not None:
            grad_output *= grad_outputs[here, None]
        if of_hidden is not None:
            torch.mm(grad_output, weight, out=of_hidden[here])
        if of_weight is not None:
            add_product(of_weight, grad_output.t(), hidden[here], is_first=not first)
        del grad_output  # else it is in memory beside the next chunk's logits
    return losses, of_hidden, of_weight


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
        here = slice(first, first + PRODUCT_ROWS)
        if is_first:
            total[here].copy_(left[here] @ right)
        else:
            total[here] += left[here] @ right


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


def subtract_one(grad_output: Tensor, where: Tensor) -> Tensor:
    """Returns `grad_output` [n, V] less one at `where` [n, 1]. It works in place or, compiled, inside the fused kernel
    around it, which a scatter would end, with its result written in fp32. Both give the same bits."""
    if torch.compiler.is_compiling():
        return torch.where(
            torch.arange(grad_output.shape[1], device=grad_output.device) == where, grad_output - 1, grad_output
        )
    return grad_output.scatter_add_(1, where, torch.full_like(where, -1, dtype=grad_output.dtype))


def score_plain(logits: Tensor, targets: Tensor, trains: bool) -> tuple[Tensor, Tensor]:
    """Returns the losses of logits [n, V], fp32 [n], and the gradient of the losses' sum [n, V] in the logits' dtype
    (not `trains`: the logits). It makes one fp32 tensor of their size, or none: fp32 logits are overwritten."""
    grad_output, where = logits.float(), targets[:, None]
    grad_output -= grad_output.amax(-1, keepdim=True)
    picked = grad_output.gather(1, where)
    sums = grad_output.exp_().sum(-1, keepdim=True)
    losses = (sums.log() - picked)[:, 0]
    if not trains:
        return losses, logits  # not `grad_output`: a compiled function would write it to memory
    grad_output /= sums
    return losses, subtract_one(grad_output, where).to(logits.dtype)


def score_distilled(
    logits: Tensor, theirs: Tensor, targets: Tensor, temperature: float, ratio: float, trains: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for logits [n, V] and teacher logits [n, W], W <= V: the losses and the divergences KL(teacher ||
    student) over the first W tokens, both fp32 [n], and, as score_plain, the gradient of the weighted sum. At most four
    fp32 tensors of that size exist at once."""
    grad_output, where, both = logits.float(), targets[:, None], theirs.shape[1]
    ours = grad_output[:, :both] / temperature
    ours -= ours.logsumexp(-1, keepdim=True)
    theirs = theirs.float()
    theirs /= temperature
    theirs -= theirs.logsumexp(-1, keepdim=True)
    shares = theirs.exp()
    theirs -= ours
    theirs *= shares
    divergences = theirs.sum(-1)
    del theirs
    grad_output -= grad_output.logsumexp(-1, keepdim=True)
    losses = -grad_output.gather(1, where)[:, 0]
    if not trains:
        return losses, divergences, logits
    grad_output = subtract_one(grad_output.exp_(), where)
    grad_output *= 1 - ratio
    ours.exp_()
    ours -= shares
    ours *= ratio * temperature  # T^2 of the loss, times the 1 / T of the logits' scaling
    grad_output[:, :both] += ours
    return losses, divergences, grad_output.to(logits.dtype)


@cache
def run_as_one(function: Any, is_cuda: bool) -> Any:
    """Returns `function`, on a GPU compiled to one kernel in place of many passes over [rows, vocabulary]. dynamic: the
    last chunk's length differs each time. Not at import: that would load the compiler in every process."""
    return torch.compile(function, dynamic=True) if is_cuda else function


def score(targets: Tensor, logits: Tensor, here: slice, trains: bool) -> tuple[Tensor, Tensor]:
    scored: tuple[Tensor, Tensor] = run_as_one(score_plain, logits.is_cuda)(logits, targets[here], trains)
    return scored


def score_part(axis: TensorAxis, targets: Tensor, logits: Tensor, here: slice, trains: bool) -> tuple[Tensor, Tensor]:
    """Returns `score` of the rows `here` where each tensor-parallel rank has the logits [n, V] of its own part of the
    vocabulary, and `targets` count from the first of these: with one all-gather of three numbers a row (Megatron-LM,
    arXiv 1909.08053, section 3, has two all-reduces). The losses are the same on every rank, the gradient is that of
    its own logits. Collective."""
    grad_output, *own = run_as_one(begin_part, logits.is_cuda)(logits, targets[here], trains)
    told = gather_plain(torch.stack(own)[None], axis).view(axis.size, 3, -1)
    losses, share = run_as_one(end_part, logits.is_cuda)(told, own[0])
    if trains:
        grad_output = run_as_one(slope_of_part, logits.is_cuda)(grad_output, share, targets[here]).to(logits.dtype)
    return losses, grad_output


def begin_part(logits: Tensor, targets: Tensor, trains: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns exp(logits - their largest) [n, V] (not `trains`: the logits); and, each fp32 [n], the largest logit, the
    sum of the exponentials, and the target's logit, or 0 where another rank has it."""
    grad_output = logits.float()
    outside, where = (targets < 0) | (targets >= grad_output.shape[1]), targets.clamp(0, grad_output.shape[1] - 1)
    largest = grad_output.amax(-1, keepdim=True)
    picked = grad_output.gather(1, where[:, None])[:, 0].masked_fill(outside, 0.0)
    grad_output = (grad_output - largest).exp_() if grad_output is logits else grad_output.sub_(largest).exp_()
    return grad_output if trains else logits, largest[:, 0], grad_output.sum(-1), picked


def end_part(told: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, from the three numbers of each rank, `told` [ranks, 3, n], and this rank's `own` largest logit: the
    losses, and the factor that makes probabilities of this rank's exponentials; [n] both."""
    largest, sums, picked = told.unbind(1)
    peak = largest.amax(0)
    total = (sums * (largest - peak).exp()).sum(0)
    return peak + total.log() - picked.sum(0), (own - peak).exp() / total


def slope_of_part(grad_output: Tensor, share: Tensor, targets: Tensor) -> Tensor:
    grad_output *= share[:, None]
    if torch.compiler.is_compiling():
        return subtract_one(grad_output, targets[:, None])  # a target of another rank matches no column
    inside = (targets >= 0) & (targets < grad_output.shape[1])
    where = targets.clamp(0, grad_output.shape[1] - 1)[:, None]
    return grad_output.scatter_add_(1, where, -inside.to(grad_output.dtype)[:, None])
