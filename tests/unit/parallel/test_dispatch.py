"""Sums and copies of rows, against torch's scatters in fp64; and the rows that a plan takes a rank to send."""

from itertools import combinations

import pytest
import torch

from shardbook.parallel.dispatch import CopyRows, SumRows, make_segments, mean_ranks, plan_splits, sum_segments

IDS = torch.tensor([2, 0, 2, 1, 0, 2, 4])  # segment 3 has no row


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_sums_and_copies_are_those_of_scatters():
    segments, rows = make_segments(IDS, 5), random(7, 3)
    assert segments.order.tolist() == [1, 4, 3, 0, 2, 5, 6] and segments.starts.tolist() == [0, 2, 3, 6, 6]
    want = torch.zeros(5, 3, dtype=torch.float64).index_add_(0, IDS, rows)
    torch.testing.assert_close(sum_segments(rows, segments), want)
    torch.testing.assert_close(SumRows.apply(rows, *segments), want)
    assert torch.equal(CopyRows.apply(want, *segments), want[IDS])


def test_each_is_the_gradient_of_the_other():
    segments = make_segments(IDS, 5)
    for function, rows in ((SumRows, 7), (CopyRows, 5)):
        given = random(rows, 3).requires_grad_()
        assert torch.autograd.gradcheck(lambda x, function=function: function.apply(x, *segments), (given,))


def test_a_sum_in_bf16_is_rounded_once():
    """To the nearest, though of two as near a CPU may take either: not at each addition."""
    rows = random(300, 8, dtype=torch.float32).bfloat16()
    want, each_rounded = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    for row in rows:
        want, each_rounded = want + row.float(), each_rounded + row
    found = sum_segments(rows, make_segments(torch.zeros(300, dtype=torch.int64), 1))[0]
    near = [((sums.float() - want).abs() <= want.abs() * 2**-8).all() for sums in (found, each_rounded)]
    assert near == [True, False]


def test_no_rows_have_sums_of_zero():
    none = make_segments(torch.zeros(0, dtype=torch.int64), 2)
    assert sum_segments(torch.zeros(0, 3), none).tolist() == [[0.0] * 3] * 2
    assert sum_segments(torch.zeros(0, 3), make_segments(none.ids, 0)).shape == (0, 3)


@pytest.mark.parametrize(
    ("experts", "ranks", "chosen"), [(8, 4, 2), (8, 2, 3), (6, 3, 1), (6, 6, 4), (6, 1, 2), (4, 2, 4)]
)
def test_the_mean_number_of_ranks_is_that_of_all_choices(experts, ranks, chosen):
    each = experts // ranks
    sizes = [len({expert // each for expert in choice}) for choice in combinations(range(experts), chosen)]
    assert mean_ranks(experts, ranks, chosen) == pytest.approx(sum(sizes) / len(sizes), rel=1e-12)


def test_a_plan_sends_what_routers_send_that_choose_at_random():
    even = plan_splits(1000, 2, 8, 4, 1.0)
    copies = round(1000 * mean_ranks(8, 4, 2))
    assert [sum(each) for each in even] == [copies, copies, 2000, 2000]
    assert max(even.tokens_sent) - min(even.tokens_sent) <= 1
    loaded = plan_splits(1000, 2, 8, 4, 1.5)
    assert [sum(each) for each in loaded] == [copies, round(1.5 * copies), 2000, 3000]
    # at worst each token of all ranks is here, with as many choices as a token can make of two experts
    worst = plan_splits(1000, 2, 8, 4, 4.0)
    assert [sum(each) for each in worst] == [copies, 4 * 1000, 2000, 8000]
