"""Context parallel without ranks: what is refused, who has which rows, slices and heads, and what lies where."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny import config, said_by, write_recipe

from shardbook.axes import CP, DP_REPLICATE, DP_SHARD, TP
from shardbook.data.loader import Batching, build_micro_batch, count_totals
from shardbook.data.tokenized import Totals
from shardbook.objectives import build_objective
from shardbook.parallel.context import apply_context_parallel, own_heads, partition_heads
from shardbook.parallel.layout import Layout
from shardbook.parallel.mesh import DataRank, fold_sizes, resolve_sizes, unfold_sizes
from shardbook.parallel.zeropp import read_switches
from shardbook.recipe import STAGES, Parallel, Precision, Preference, find_stage, load_recipe

BESIDE = {  # what a recipe may not have beside cp_size = 2, and what the error says
    "zeropp": (["parallel.stage=zeropp"], ["parallel.stage = 'zeropp'", "set parallel.stage=zero3"]),
    "qwZ": (["parallel.stage=hsdp", "parallel.quantize_weights=8"], ["a switch of ZeRO++", "leave parallel.quantize"]),
    "qgZ": (["parallel.quantize_gradients=[8, 4]"], ["a switch of ZeRO++", "leave parallel.quantize"]),
    "hpZ": (["parallel.stage=hsdp", "parallel.secondary_shard=2"], ["a switch of ZeRO++", "leave parallel.quantize"]),
    "eager": (["model.attention=eager"], ["model.attention = 'eager'", "set model.attention=sdpa"]),
    "length": (["data.max_length=127"], ["data.max_length = 127", "must be a multiple of 2"]),
    "both": (["parallel.tp_size=3"], ["parallel.tp_size = 3 and parallel.cp_size = 2", "must be a multiple of 6"]),
    "none": (["parallel.cp_size=0"], ["parallel.cp_size = 0", "greater than or equal to 1"]),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_does_not_compose_is_refused_in_one_line(name, tiny, tmp_path):
    words, parts = BESIDE[name]
    said = said_by(load_recipe, write_recipe(tiny, tmp_path), ["parallel.cp_size=2", *words])
    assert "parallel.cp_size = " in said and all(part in said for part in parts), said


def test_a_world_that_it_does_not_divide_is_refused():
    said = said_by(resolve_sizes, Parallel(cp_size=2), (DP_SHARD,), 3)
    assert "parallel.cp_size = 2: 2 does not divide the world of 3 ranks" in said
    said = said_by(resolve_sizes, Parallel(cp_size=2, tp_size=2), (DP_SHARD,), 6)
    assert "parallel.cp_size = 2, parallel.tp_size = 2: 4 does not divide the world of 6 ranks" in said
    said = said_by(resolve_sizes, Parallel(cp_size=2, dp_shard_size=2), (DP_SHARD,), 2)
    assert "dp_shard 2 x cp 2 needs 4 ranks, the world has 2" in said


@pytest.mark.parametrize(
    ("heads", "parallel", "said"),
    [
        (4, {"cp_size": 5}, "it has 4; must be at most 4"),
        (4, {"cp_size": 3, "tp_size": 2}, "each of 2 ranks along tp has 2 of 4; must be at most 2"),
        (9, {"cp_size": 5, "tp_size": 2}, "each of 2 ranks along tp has 4 of 9; must be at most 4"),
    ],
)
def test_more_ranks_than_heads_are_refused_on_each(heads, parallel, said):
    parallel = Parallel(**parallel)
    model = SimpleNamespace(config=config(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=1))
    for rank in range(parallel.cp_size * parallel.tp_size):
        refused = said_by(apply_context_parallel, model, parallel, rank)
        assert refused.startswith(f"parallel.cp_size = {parallel.cp_size}: ") and refused.endswith(said), refused


HEADS = [(4, 2), (4, 1), (9, 3), (6, 3), (6, 2), (32, 8), (8, 8), (14, 2), (5, 5)]


@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
def test_each_head_is_computed_once_with_its_own_keys(heads, key_heads):
    for size in range(1, heads + 1):
        shares = partition_heads(heads, key_heads, size)
        counts = [own for own, _ in shares]
        assert sum(counts) == heads and max(counts) - min(counts) <= 1 and len(shares) == size
        # transformers repeats each head of keys as often as a rank has queries for it
        served = [keys[number // (own // len(keys))] for own, keys in shares for number in range(own)]
        assert all(own % len(keys) == 0 for own, keys in shares)
        assert served == [head // (heads // key_heads) for head in range(heads)]


@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
def test_beside_tp_heads_of_each_rank_are_dealt_out(heads, key_heads):
    model = config(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=key_heads)
    for tp_size in range(1, heads + 1):
        own = [own_heads(model, tp_size, place) for place in range(tp_size)]
        assert sum(count for count, _ in own) == heads
        for count, keys in own:
            for size in range(1, count + 1):
                assert sum(dealt for dealt, _ in partition_heads(count, keys, size)) == count


SIZES = [(1, 4, 2, 1), (2, 2, 2, 1), (3, 1, 4, 2), (1, 1, 2, 1), (1, 1, 1, 1), (2, 3, 5, 7)]


@pytest.mark.parametrize("shards", [True, False])
@pytest.mark.parametrize(("replicate", "shard", "context", "tp_size"), SIZES)
def test_folding_is_undone(shards, replicate, shard, context, tp_size):
    sizes = {DP_REPLICATE: replicate, DP_SHARD: shard} | ({CP: context} if context > 1 else {})
    sizes |= {TP: tp_size} if tp_size > 1 else {}
    folded = fold_sizes(sizes, shards)
    assert CP not in folded and list(unfold_sizes(folded, shards, context).items()) == list(sizes.items())
    assert folded[DP_SHARD] == shard * (context if shards else 1)
    assert folded[DP_REPLICATE] == replicate * (1 if shards else context)


def layout_of(stage: str, world: int, **sizes) -> Layout:
    parallel, row = Parallel(stage=stage, **sizes), find_stage(stage)
    on = fold_sizes(resolve_sizes(parallel, row.axes, world), row.shards)
    switches = read_switches(parallel, on[DP_SHARD], world)
    return Layout(row, on, (), parallel, Precision(), switches, world, cp_size=parallel.cp_size)


@pytest.mark.parametrize("stage", [name for name in STAGES if name != "zeropp"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_who_sees_which_rows_and_what_of_each(stage, tp_size):
    """Neighbours along tp see the same, then neighbours along cp slices of one row, and all others other rows."""
    world = 8 * tp_size
    more = {"dp_replicate_size": 2, "dp_shard_size": 2} if stage == "hsdp" else {}
    layout = layout_of(stage, world, cp_size=2, tp_size=tp_size, **more)
    assert layout.world_size == world and layout.mesh[CP] == 2
    for rank in range(world):
        place = rank // tp_size
        assert layout.data_rank(rank) == DataRank(place // 2, 4, tp_size, place % 2, 2), rank
        first = rank - place % 2 * tp_size
        assert layout.groups(rank)[CP] == [first, first + tp_size]


def test_ranks_that_hold_the_model_are_those_of_both_axes():
    on = layout_of("zero3", 16, cp_size=2, tp_size=2)
    assert (on.shards, on.replicas, on.tp_size) == (8, 1, 2)
    on = layout_of("hsdp", 16, cp_size=2, tp_size=2, dp_shard_size=2)
    assert (on.shards, on.replicas, on.tp_size) == (4, 2, 2)
    on = layout_of("ddp", 16, cp_size=2, tp_size=2)
    assert (on.shards, on.replicas, on.tp_size) == (1, 8, 2)


DOCUMENTS = [  # length of each, and which of its tokens are trained
    (50, [1] * 50),
    (3, [1] * 3),
    (97, [0] * 40 + [1] * 57),
    (1, [1]),  # which nothing predicts
    (41, [0] * 41),
    (23, [0] * 22 + [1]),  # one
]
ROWS = {  # of a micro-batch, by document
    "a row of several": ([[0, 1, 2, 3]], True),
    "two rows, with padding": ([[0, 5, 1], [4, 2, 3]], True),
    "not packed": ([[2], [0], [3], [5]], False),
    "nothing trained": ([[4]], False),
    "no rows": ([], True),
    "no rows, not packed": ([], False),
}


PAIRS = [([50, 3], [1] * 53), ([97, 2], [0] * 40 + [1] * 57 + [0, 1]), ([10, 60], [0] * 9 + [1] + [0] * 59 + [1])]


def slices_of_pairs(rows, packed: bool, slices: int):
    """The micro-batch whole, and each slice, of pairs whose reference is known."""
    ids = iter(range(1, 1000))
    documents = [
        {"input_ids": [next(ids) for _ in mask], "mask": [bool(x) for x in mask], "lengths": lengths}
        for lengths, mask in PAIRS
    ]
    reference = np.arange(2 * len(PAIRS), dtype=np.float32).reshape(-1, 2)
    encoded = Dataset.from_list(documents)
    whole = Batching(192 if packed else None, 2, 0, 1, documents=2, multiple=64 * slices, sequences=2)
    parts = [replace(whole, slice_number=number, slices=slices) for number in range(slices)]
    built = [build_micro_batch(encoded, rows, each, reference) for each in (whole, *parts)]
    return built[0], built[1:]


@pytest.mark.parametrize("slices", [2, 3, 4])
@pytest.mark.parametrize("packed", [True, False])
def test_slices_of_pairs_know_what_is_of_whole_answers(packed, slices):
    whole, parts = slices_of_pairs([[0, 2], [1]] if packed else [[0], [1]], packed, slices)
    length = whole.input_ids.shape[1]
    each = length // slices
    ends = torch.full_like(whole.ends, -1)
    for number, part in enumerate(parts):
        assert torch.equal(part.counts, whole.counts) and torch.equal(part.reference, whole.reference)
        here = part.ends >= 0
        assert (ends[here] == -1).all()  # each on one slice alone
        ends[here] = (part.ends // each * length + number * each + part.ends % each)[here]
        assert torch.equal(part.input_ids.flatten()[part.ends[here]], whole.input_ids.flatten()[whole.ends[here]])
    assert torch.equal(ends, whole.ends)
    counts = [count_totals([part], 2, number) for number, part in enumerate(parts)]
    assert tuple(map(sum, zip(*counts, strict=True))) == count_totals([whole], 2)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("method", ["dpo", "orpo", "simpo", "reward"])
def test_terms_of_slices_that_are_summed_are_those_of_whole_rows(packed, method):
    """Each slice has all terms; of its own tokens' numbers it has the whole gradient, of others none."""
    whole, parts = slices_of_pairs([[0, 2], [1]] if packed else [[0], [1]], packed, 3)
    numbers = torch.linspace(-3, -0.1, whole.input_ids.numel()).view(whole.input_ids.shape)
    totals, objective = Totals(100, 3, 50), build_objective(method, Preference(rpo_alpha=float(method == "dpo")))
    each = whole.input_ids.shape[1] // 3
    seen = [of[:, at : at + each] for of in [numbers] for at in (0, each, 2 * each)]

    def model_of(tokens):
        return lambda micro: (1 if method == "reward" else -1) * tokens.flatten()[micro.positions]

    tokens = numbers.clone().requires_grad_()
    terms = objective.with_totals(totals)(model_of(tokens), whole)
    (gradient,) = torch.autograd.grad(terms[0], tokens)
    gathered = list[torch.Tensor]()  # what each slice has of every answer

    def note(part):
        gathered.append(part.detach())
        return part

    for part, of in zip(parts, seen, strict=True):
        objective.with_totals(totals, note)(model_of(of), part)
    for part, of, own in zip(parts, seen, gradient.split(each, 1), strict=True):
        tokens = of.clone().requires_grad_()

        def sum_slices(own):
            return own + (sum(gathered) - own).detach()

        shares = objective.with_totals(totals, sum_slices)(model_of(tokens), part)
        torch.testing.assert_close(shares, terms)
        torch.testing.assert_close(torch.autograd.grad(shares[0], tokens)[0], own)


def slices_of(rows, packed: bool, slices: int):
    """The micro-batch whole, and each slice."""
    ids = iter(range(1, 1000))
    documents = [{"input_ids": [next(ids) for _ in range(n)], "mask": [bool(x) for x in mask]} for n, mask in DOCUMENTS]
    encoded = Dataset.from_list(documents)
    whole = Batching(192 if packed else None, 2, 0, 1, documents=4, multiple=64 * slices)
    parts = [replace(whole, slice_number=number, slices=slices) for number in range(slices)]
    return build_micro_batch(encoded, rows, whole), [build_micro_batch(encoded, rows, part) for part in parts]


@pytest.mark.parametrize("slices", [2, 3, 4])
@pytest.mark.parametrize("name", ROWS)
def test_slices_have_every_target_once(name, slices):
    whole, parts = slices_of(*ROWS[name], slices)
    rows, length = whole.input_ids.shape
    each = length // slices
    assert {tuple(part.input_ids.shape) for part in parts} == {(rows, each)}
    assert torch.equal(torch.cat([part.input_ids for part in parts], 1), whole.input_ids)
    assert torch.equal(torch.cat([part.position_ids for part in parts], 1), whole.position_ids)
    found = {}
    for number, part in enumerate(parts):
        assert (part.packed, part.max_seqlen) == (whole.packed, whole.max_seqlen)
        assert torch.equal(part.cu_seqlens, whole.cu_seqlens)
        assert part.targets.dtype == part.positions.dtype == torch.int64
        for at, target in zip(part.positions.tolist(), part.targets.tolist(), strict=True):
            row, column = divmod(at, each)
            assert found.setdefault(row * length + number * each + column, target) == target
    assert sum(len(part.targets) for part in parts) == len(found)  # none twice
    assert found == dict(zip(whole.positions.tolist(), whole.targets.tolist(), strict=True))
    assert sum(part.pairs for part in parts) == whole.pairs


@pytest.mark.parametrize("slices", [2, 3, 4])
@pytest.mark.parametrize("name", ROWS)
def test_slices_count_what_is_trained_of_each_sequence(name, slices):
    whole, parts = slices_of(*ROWS[name], slices)
    assert tuple(map(sum, zip(*(part.trained for part in parts), strict=True))) == whole.trained
    assert all(sum(part.trained) == len(part.targets) for part in parts)
    length = whole.input_ids.shape[1]
    starts = [at for at in whole.cu_seqlens.tolist() if at < whole.input_ids.numel()]
    for number, part in enumerate(parts):  # by where a document begins and ends, in the whole row
        each = length // slices
        places = [at // each * length + number * each + at % each for at in part.positions.tolist()]
        own = [sum(start <= at < end for at in places) for start, end in zip(starts, [*starts[1:], 10**6], strict=True)]
        assert [count for count in own if count] == [count for count in part.trained if count]


def test_the_last_token_of_a_slice_predicts_the_first_of_the_next():
    whole, (left, right) = slices_of([[2], [2]], False, 2)
    cut = whole.input_ids.shape[1] // 2
    assert cut == 64 and left.positions.tolist()[-1] == 2 * cut - 1  # of the second row
    assert left.targets[-1] == right.input_ids[1, 0] == whole.input_ids[1, cut]
    assert right.position_ids[0, 0] == cut  # a document goes on, and does not begin again
