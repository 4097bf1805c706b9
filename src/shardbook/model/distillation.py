"""Distillation's loss of a chunk of logits: cross-entropy beside the divergence from a teacher's distribution.

Hinton et al., arXiv 1503.02531, section 2. Invariant: as cross_entropy.py, of a whole vocabulary or of one in parts;
the teacher's logits of a chunk are whole everywhere.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardbook.comm.compile_on_cuda import fused
from shardbook.model.cross_entropy import ChunkLoss, Total, VocabularyPart, subtract_one, subtract_one_of_part


class TeacherOutput(NamedTuple):
    """A teacher's hidden states at n trained positions and its head, to make its logits; and its part in the loss."""

    hidden: Tensor  # [n, teacher's hidden size]
    logits: Callable[[Tensor, int], Tensor]  # of its hidden states [m, hidden size]: those of the first tokens
    temperature: float
    ratio: float  # share of the teacher in the loss (kd_ratio)

    def of_targets(self, part: VocabularyPart, targets: Tensor) -> tuple[ChunkLoss, Total]:
        """Returns the loss of a chunk of `targets`, and the total of the losses of all: three sums, see
        `total_with_teacher`."""
        divergences = torch.zeros(len(targets), device=targets.device)
        if part.gather is None:
            chunk_loss: ChunkLoss = partial(chunk_distillation_loss, self, targets, divergences)
        else:
            chunk_loss = partial(distillation_of_part, part, self, targets - part.first, divergences)
        return chunk_loss, partial(total_with_teacher, self, divergences)


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


def chunk_distillation_loss(
    teacher: TeacherOutput, targets: Tensor, divergences: Tensor, logits: Tensor, chunk: slice, trains: bool
) -> tuple[Tensor, Tensor]:
    """Returns `chunk_cross_entropy` of the rows `chunk` beside a teacher, and writes their `divergences`. The logits of
    both models exist for these rows only. Where one vocabulary is padded further than the other, the divergence is over
    the tokens that both have."""
    teacher_logits = teacher.logits(teacher.hidden[chunk], logits.shape[1])
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


def distillation_of_part(
    part: VocabularyPart,
    teacher: TeacherOutput,
    targets: Tensor,
    divergences: Tensor,
    logits: Tensor,
    chunk: slice,
    trains: bool,
) -> tuple[Tensor, Tensor]:
    """Returns `chunk_distillation_loss` where a vocabulary is in parts, with the logits [n, V] of one of them;
    `targets` count from its first token. It gathers five numbers a row, and then one."""
    assert part.gather is not None, "it is the whole"
    device_type, teacher_logits = logits.device.type, teacher.logits(teacher.hidden[chunk], part.size)
    # fewer columns where the teacher has fewer tokens
    both = logits, teacher_logits[:, part.first : part.first + logits.shape[1]]
    stats = fused(row_stats, device_type, static_widths=True)(*both, targets[chunk], teacher.temperature)
    log_sum, scaled_log_sum, picked = combine_row_stats(part.gather(stats))
    slopes = fused(divergence_of_part, device_type, static_widths=True)
    rows = teacher_logits, targets[chunk], log_sum, scaled_log_sum
    divergence, grad_logits = slopes(*both, *rows, teacher.temperature, teacher.ratio, trains)
    divergences[chunk] = part.gather(divergence[None]).sum(0)[0]
    return log_sum - picked, grad_logits


def row_stats(logits: Tensor, teacher_part: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Returns of each row of logits [n, V], fp32 [5, n]: the largest, the sum of exponentials, the target's logit (0
    where another part has it); and the first two, at the temperature, of the columns that `teacher_part` has too."""
    values, count = logits.float(), teacher_part.shape[1]
    outside, where = (targets < 0) | (targets >= values.shape[1]), targets.clamp(0, values.shape[1] - 1)
    picked = values.gather(1, where[:, None])[:, 0].masked_fill(outside, 0.0)
    largest = values.amax(-1)
    sums = (values - largest[:, None]).exp().sum(-1)
    if not count:
        none = torch.zeros_like(picked)
        return torch.stack([largest, sums, picked, none - torch.inf, none])
    scaled = values[:, :count] / temperature
    scaled_largest = scaled.amax(-1)
    return torch.stack([largest, sums, picked, scaled_largest, (scaled - scaled_largest[:, None]).exp().sum(-1)])


def combine_row_stats(gathered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns of the `row_stats` of all parts [parts, 5, n]: the logarithms of the sums of exponentials, without and
    with the temperature, and the targets' logits; [n] each."""
    largest, sums, picked, scaled_largest, scaled_sums = gathered.unbind(1)

    def log_sum(largest: Tensor, sums: Tensor) -> Tensor:
        peak = largest.amax(0)
        return peak + (sums * (largest - peak).exp()).sum(0).log()

    return log_sum(largest, sums), log_sum(scaled_largest, scaled_sums), picked.sum(0)


def divergence_of_part(
    logits: Tensor,
    teacher_part: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    scaled_log_sum: Tensor,
    temperature: float,
    ratio: float,
    trains: bool,
) -> tuple[Tensor, Tensor]:
    """Returns this part's summands of the divergences, fp32 [n], and the gradient of its logits [n, V] (not `trains`:
    the logits). `teacher_part`: of the teacher's logits [n, W] those of this part's first columns."""
    teacher_log_sum = (teacher_logits.float() / temperature).logsumexp(-1, keepdim=True)
    log_shares = teacher_part.float() / temperature - teacher_log_sum
    shares, count = log_shares.exp(), log_shares.shape[1]
    values = logits.float()
    ours = values[:, :count] / temperature - scaled_log_sum[:, None]
    divergence = (shares * (log_shares - ours)).sum(-1)
    if not trains:
        return divergence, logits
    grad_logits = subtract_one_of_part((values - log_sum[:, None]).exp(), targets)
    grad_logits *= 1 - ratio
    grad_logits[:, :count] += ratio * temperature * (ours.exp() - shares)  # T^2 of the loss, 1 / T of the scaling
    return divergence, grad_logits.to(logits.dtype)
