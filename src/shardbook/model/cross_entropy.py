"""Cross-entropy: the losses of a chunk of logits with their gradient, of a whole vocabulary or of one in parts.

Invariant: every part of a vocabulary has the same losses, from three numbers a row of all parts, and the gradient of
its own logits.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shardbook.comm.compile_on_cuda import fused

# (a chunk's logits, the rows that it has, whether gradients are wanted) -> (losses, gradient of the logits)
ChunkLoss = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor]]
Total = Callable[[Tensor], Tensor]  # of the losses of all targets, fp32 [n]
# of numbers [k, n] of one part of a vocabulary: those of all parts, [parts, k, n]
GatherParts = Callable[[Tensor], Tensor]
LogitTransform = Callable[[Tensor], Tensor]  # what a family's forward does with its head's logits [n, vocabulary]


class VocabularyPart(NamedTuple):
    """The part of a vocabulary that logits are of."""

    first: int  # its first token id
    size: int  # of the whole vocabulary
    gather: GatherParts | None  # None: it is the whole


class LossOfLogits(Protocol):
    """A loss that is made of logits, beside the targets of these."""

    def of_targets(self, part: VocabularyPart, targets: Tensor) -> tuple[ChunkLoss, Total]:
        """Returns the loss of a chunk of `targets`, and the total of the losses of all."""
        ...


def cross_entropy_of(part: VocabularyPart, targets: Tensor) -> ChunkLoss:
    """Returns the cross-entropy of a chunk of `targets`."""
    if part.gather is None:
        return partial(chunk_cross_entropy, targets)
    return partial(cross_entropy_of_part, part.gather, targets - part.first)


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


def chunk_cross_entropy(targets: Tensor, logits: Tensor, chunk: slice, trains: bool) -> tuple[Tensor, Tensor]:
    return fused(cross_entropy, logits.device.type, static_widths=True)(logits, targets[chunk], trains)


def cross_entropy_of_part(
    gather: GatherParts, targets: Tensor, logits: Tensor, chunk: slice, trains: bool
) -> tuple[Tensor, Tensor]:
    """Returns `chunk_cross_entropy` of the rows `chunk` where the vocabulary is in parts, each with its logits [n, V],
    and `targets` count from the first of these. `gather` returns three numbers a row of all parts, [parts, 3, n], of
    those of this one, [3, n] (Megatron-LM, arXiv 1909.08053, section 3, has two all-reduces). The losses are the same
    of every part, the gradient is that of its own logits."""
    device_type = logits.device.type
    exponentials = fused(local_exponentials, device_type, static_widths=True)
    grad_logits, *row_stats = exponentials(logits, targets[chunk], trains)
    losses, share = fused(combine_parts, device_type)(gather(torch.stack(row_stats)), row_stats[0])
    if trains:
        slopes = fused(local_grad_logits, device_type, static_widths=True)
        grad_logits = slopes(grad_logits, share, targets[chunk]).to(logits.dtype)
    return losses, grad_logits


def local_exponentials(logits: Tensor, targets: Tensor, trains: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns exp(logits - their largest) [n, V] (not `trains`: the logits); and, each fp32 [n], the largest logit, the
    sum of the exponentials, and the target's logit, or 0 where another part has it."""
    grad_logits = logits.float()
    outside, where = (targets < 0) | (targets >= grad_logits.shape[1]), targets.clamp(0, grad_logits.shape[1] - 1)
    largest = grad_logits.amax(-1, keepdim=True)
    picked = grad_logits.gather(1, where[:, None])[:, 0].masked_fill(outside, 0.0)
    grad_logits = (grad_logits - largest).exp_() if grad_logits is logits else grad_logits.sub_(largest).exp_()
    return grad_logits if trains else logits, largest[:, 0], grad_logits.sum(-1), picked


def combine_parts(gathered: Tensor, local_largest: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the losses, and the factor that makes probabilities of this part's exponentials; [n] both. `gathered`
    [parts, 3, n]: the three numbers of each part; `local_largest` [n]: this part's largest logits."""
    largest, sums, picked = gathered.unbind(1)
    peak = largest.amax(0)
    total = (sums * (largest - peak).exp()).sum(0)
    return peak + total.log() - picked.sum(0), (local_largest - peak).exp() / total


def local_grad_logits(grad_logits: Tensor, share: Tensor, targets: Tensor) -> Tensor:
    grad_logits *= share[:, None]
    return subtract_one_of_part(grad_logits, targets)


def subtract_one_of_part(grad_logits: Tensor, targets: Tensor) -> Tensor:
    """Returns `subtract_one` at the `targets` [n] that are in this part, in place unless it is compiled."""
    if torch.compiler.is_compiling():
        return subtract_one(grad_logits, targets[:, None])  # a target of another part matches no column
    inside = (targets >= 0) & (targets < grad_logits.shape[1])
    where = targets.clamp(0, grad_logits.shape[1] - 1)[:, None]
    return grad_logits.scatter_add_(1, where, -inside.to(grad_logits.dtype)[:, None])
