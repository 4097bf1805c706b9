"""A kernel that is told document boundaries, through the whole of train(): the reference's numbers, the same bytes."""

import dataclasses

from cases import Case, assert_case, outcomes_of, run_cases
from varlen import plain_varlen_attn
from world import run_world


def through_the_stand_in(*words):
    from shardbook.model import attention

    attention.KERNELS["varlen"] = dataclasses.replace(
        attention.KERNELS["varlen"], needs=(), make=lambda: attention.make_varlen(plain_varlen_attn)
    )
    return run_cases(*words)


def test_packed_rows_without_a_dense_mask_train_as_the_reference(recipe, tiny, tmp_path, wanted):
    cases = [
        Case("zero3", 1, 2, 3, clips=True, checkpointing="full", extra=("model.attention=varlen",)),
        Case("zero2", 1, 2, 1, extra=("model.attention=auto",)),  # the first that can run: the stand-in
    ]
    assert run_world(2, through_the_stand_in, recipe, tiny, cases, tmp_path) == [[], []]
    for case in cases:
        assert_case(case, outcomes_of(case, tmp_path), wanted(case))
