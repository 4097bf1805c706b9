"""The loader: a step is the same rows however ranks split it, each row comes once an epoch, and a place is found."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from shardbook.data.loader import Batching, Loader, build_micro_batch, eval_micro_batches, permute
from shardbook.data.tokenized import Documents
from shardbook.recipe import RecipeError


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 50))
def test_order_is_a_permutation(size, seed, epoch):
    assert sorted(permute(index, size, seed, epoch) for index in range(size)) == list(range(size))


def test_order_depends_on_seed_and_epoch_and_looks_random():
    def order(seed, epoch):
        return np.array([permute(i, 1000, seed, epoch) for i in range(1000)])

    base = order(1, 0)
    for other in (order(2, 0), order(1, 1), np.arange(1000)):
        assert (base == other).sum() < 10  # two random permutations agree in one place on average
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.1  # three standard deviations of 1/sqrt(1000)


def fake_documents(count: int) -> Documents:
    rows = [{"input_ids": [number] * 3, "mask": [True] * 3} for number in range(count)]
    return Documents(Dataset.from_list(rows), [(number,) for number in range(count)], 3.0, "")


def seen(ranks: int, accumulation: int, batch: int, steps: int, start: int = 0) -> list[list[int]]:
    """The documents of each step, over all ranks, in stream order."""
    loaders = [Loader(fake_documents(11), Batching(None, batch, r, ranks), accumulation, 5) for r in range(ranks)]
    result = []
    for loader in loaders:
        loader.load_state_dict(loader.state_dict() | {"consumed_rows": start})
    for _ in range(steps):
        micros = [loader.step_at(loader.consumed_rows) for loader in loaders]
        for loader in loaders:
            loader.consumed_rows += loader.rows_per_step
        order = [micros[rank][m].input_ids[:, 0].tolist() for m in range(accumulation) for rank in range(ranks)]
        result.append([document for part in order for document in part])
    return result


def test_a_step_is_the_same_rows_for_every_split():
    whole = seen(1, 1, 12, 4)
    assert seen(4, 1, 3, 4) == seen(2, 3, 2, 4) == seen(3, 4, 1, 4) == whole
    assert seen(2, 3, 2, 2, start=24) == whole[2:]  # seeking gives the tail of the straight run
    stream = [document for step in whole for document in step]
    assert sorted(stream[:11]) == sorted(stream[11:22]) == list(range(11))  # each epoch is every row once
    assert stream[:11] != stream[11:22]


def test_a_place_in_another_stream_is_refused():
    loader = Loader(fake_documents(11), Batching(None, 1, 0, 1), 1, seed=5)
    for other in ({"rows": 12}, {"seed": 6}):
        with pytest.raises(RecipeError, match=r"the checkpoint was made with .* this recipe has 11 rows and seed 5"):
            loader.load_state_dict(loader.state_dict() | other)


def test_other_data_of_as_many_rows_is_refused():
    loader = Loader(replace(fake_documents(11), digest="ours"), Batching(None, 1, 0, 1), 1, seed=5)
    with pytest.raises(
        RecipeError, match=r"made with other data \(theirs there, ours here; as many rows\): keep \[data\]"
    ):
        loader.load_state_dict(loader.state_dict() | {"data": "theirs"})
    loader.load_state_dict(loader.state_dict() | {"consumed_rows": 3})
    assert loader.consumed_rows == 3


def test_a_packed_micro_batch():
    documents = Dataset.from_list(
        [
            {"input_ids": [5, 6, 7], "mask": [False, True, True]},
            {"input_ids": [8, 9], "mask": [True, True]},
            {"input_ids": [3, 4], "mask": [False, False]},
        ]
    )
    micro = build_micro_batch(documents, [(0, 1), (2,)], Batching(6, 2, 0, 1, documents=2, multiple=1))
    assert micro.input_ids.tolist() == [[5, 6, 7, 8, 9, 0], [3, 4, 0, 0, 0, 0]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0]]
    # where documents begin, then padding, in either row, and the end as often as there is room for documents
    assert micro.cu_seqlens.tolist() == [0, 3, 5, 6, 8, 12, 12] and micro.cu_seqlens.dtype == torch.int32
    assert (micro.packed, micro.pairs) == (True, 9 + 4 + 4)
    # 7 does not predict 8: the first token of a document has no past, even where its mask is on
    assert (micro.positions.tolist(), micro.targets.tolist()) == ([0, 1, 3], [6, 7, 9])


@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 3), (4, 2), (16, 1)])
def test_evaluation_sees_every_row_once_and_ranks_agree_on_the_count(ranks, batch):
    documents = fake_documents(11)
    every = [list(eval_micro_batches(documents, Batching(None, batch, rank, ranks))) for rank in range(ranks)]
    assert len({len(micros) for micros in every}) == 1
    assert all(micro.ends.dtype == torch.int64 for micros in every for micro in micros)  # also where it has no row
    targets = torch.cat([micro.targets for micros in every for micro in micros])
    assert sorted(targets.tolist()) == sorted(list(range(11)) * 2)
