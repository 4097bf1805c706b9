"""The shapes and schedules that broke others, in every stage, against one plain process to 1e-6."""

import pytest
import torch
from cases import assert_parity
from torch.distributed.fsdp import FSDPModule
from toys import Scenario, Toy, train_toy
from world import run_world

STEPS, MAX_NORM = 4, 0.5
LAYOUTS = [("ddp", 4, 1), ("zero1", 1, 4), ("zero2", 1, 4), ("zero3", 1, 4), ("hsdp", 2, 2)]
SCENARIOS = {
    # on four ranks: matrices and biases of 2 rows leave two ranks with empty shards
    "empty-shards": Scenario(),
    "frozen-subset": Scenario(frozen=("layers.0", "norm.bias", "up.weight")),
    "block-called-three-times": Scenario(build=lambda: Toy(turns=3)),
    "unused-on-some-steps": Scenario(gated=lambda step, rank: step % 2 == 0),
    "unused-on-some-ranks": Scenario(gated=lambda step, rank: rank == step % 3),
    "unequal-tokens-one-rank-none": Scenario(length=lambda step, rank: 1 if rank == 2 else 3 + 4 * rank),
    "two-forwards-before-a-backward": Scenario(forwards=2),
    "everything-at-once": Scenario(
        build=lambda: Toy(turns=2),
        frozen=("layers.0.up",),
        gated=lambda step, rank: (step + rank) % 2 == 0,
        length=lambda step, rank: 1 if rank == step % 4 else 5 + rank,
        forwards=2,
        micros=3,
    ),
}
# torch before 2.13 reduces no parameter that a rank did not use; our own models use all of theirs, on every rank
if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
    SCENARIOS = {name: scenario for name, scenario in SCENARIOS.items() if scenario.gated is Scenario().gated}


def train_all(layouts_by_name, folder):
    from shardbook.ranks.distributed import start_distributed

    rank = start_distributed().rank
    for name, layouts in layouts_by_name.items():
        for layout in layouts:
            result = train_toy(SCENARIOS[name], *layout, STEPS, MAX_NORM)[0]
            torch.save(result, folder / f"{name}-{layout[0]}.{rank}")  # tensors do not travel through a pipe


def results(folder, name, layouts, world):
    for layout in layouts:
        for rank in range(world):
            yield torch.load(folder / f"{name}-{layout[0]}.{rank}", weights_only=False)


def assert_as_one_process(name, layouts, folder):
    expected = SCENARIOS[name].reference(4, STEPS, MAX_NORM)
    assert any(expected.norms[step] > MAX_NORM for step in range(STEPS)), "clipping never acts"
    trainable = {n for n, p in SCENARIOS[name].model().named_parameters() if p.requires_grad}
    for result in results(folder, name, layouts, 4):
        assert result.gradients[0].keys() == trainable
        assert_parity(result, expected)


# everything at once under each stage; one thing alone, which says what it was, under two with all the table's parts
IN_MAKE_TEST = {name: [LAYOUTS[1], LAYOUTS[4]] for name in SCENARIOS} | {list(SCENARIOS)[-1]: LAYOUTS}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hard")
    run_world(4, train_all, IN_MAKE_TEST, folder)
    return folder


@pytest.mark.parametrize("name", SCENARIOS)
def test_four_ranks(name, trained):
    assert_as_one_process(name, IN_MAKE_TEST[name], trained)


@pytest.mark.slow
def test_four_ranks_under_every_stage(tmp_path):
    left = {name: [layout for layout in LAYOUTS if layout not in done] for name, done in IN_MAKE_TEST.items()}
    run_world(4, train_all, left, tmp_path)
    for name, layouts in left.items():
        assert_as_one_process(name, layouts, tmp_path)


def test_vocabulary_of_257_on_three_ranks(tmp_path):
    layouts = [("ddp", 3, 1), ("zero1", 1, 3), ("zero2", 1, 3), ("zero3", 1, 3), ("hsdp", 1, 3)]
    run_world(3, train_all, {"empty-shards": layouts}, tmp_path)
    expected = Scenario().reference(3, STEPS, MAX_NORM)
    for result in results(tmp_path, "empty-shards", layouts, 3):
        assert_parity(result, expected)
