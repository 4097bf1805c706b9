"""The loss beside a teacher of a vocabulary in parts is that of the whole, to rounding of fp32."""

from itertools import pairwise

import pytest
import torch

from shardbook.model.cross_entropy import VocabularyPart
from shardbook.model.distillation import (
    TeacherOutput,
    combine_row_stats,
    distillation_loss,
    distillation_of_part,
    divergence_of_part,
    row_stats,
)

ROWS, TEMPERATURE, RATIO = 11, 1.7, 0.3


def near(got, want):
    return (got - want).norm() <= 2e-6 * want.norm()


def of_parts(logits, teacher_logits, targets, ends):
    """Losses, divergences and the gradient of logits whose columns lie in parts that end at `ends`."""
    parts = [slice(first, end) for first, end in pairwise([0, *ends])]
    stats = [row_stats(logits[:, part], teacher_logits[:, part], targets - part.start, TEMPERATURE) for part in parts]
    sums = combine_row_stats(torch.stack(stats))
    both = [
        divergence_of_part(
            *(logits[:, part], teacher_logits[:, part], teacher_logits, targets - part.start, *sums[:2]),
            *(TEMPERATURE, RATIO, True),
        )
        for part in parts
    ]
    return sums[0] - sums[2], sum(divergence for divergence, _ in both), torch.cat([of for _, of in both], 1)


@pytest.mark.parametrize("ends", [(40,), (20, 40), (13, 26, 39, 40), (39, 40)])
@pytest.mark.parametrize("taught", [40, 33, 12])
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_parts_have_the_losses_and_slopes_of_the_whole(ends, taught, spread):
    """A part may lack the target, and all of a teacher's tokens."""
    torch.manual_seed(0)
    logits, teacher_logits = spread * torch.randn(ROWS, 40), spread * torch.randn(ROWS, taught)
    targets = torch.randint(0, 40, (ROWS,))
    wanted = distillation_loss(logits.double(), teacher_logits.double(), targets, TEMPERATURE, RATIO, True)
    exact = distillation_loss(logits.clone(), teacher_logits.clone(), targets, TEMPERATURE, RATIO, True)
    assert all(near(got, want) for got, want in zip(exact, wanted, strict=True))
    for got, want in zip(of_parts(logits, teacher_logits, targets, ends), wanted, strict=True):
        assert near(got, want.float())


def test_where_nothing_is_trained_the_logits_come_back():
    logits, divergences = torch.randn(ROWS, 40), torch.zeros(ROWS)
    teacher = TeacherOutput(torch.randn(ROWS, 4), lambda hidden, count: torch.randn(len(hidden), count), 1.0, 0.5)
    given = teacher, torch.zeros(ROWS, dtype=torch.int64), divergences, logits, slice(0, ROWS)
    losses, same = distillation_of_part(VocabularyPart(0, 40, lambda numbers: numbers[None]), *given, False)
    assert same is logits and losses.shape == (ROWS,) and divergences.min() > 0
