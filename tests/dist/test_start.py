"""Ranks that were not started alike are told so at once, each of them, and by what."""

import os

import pytest
from world import run_world, train_rank


def start_unlike(recipe, words, module):
    """Rank 1 gets `words` too, and finds another version of `module`."""
    mine = [str(recipe), "run.name=unlike"]
    if os.environ["RANK"] == "1":
        import shardbook.run.directory as rundir

        real, mine = rundir.version, mine + words
        rundir.environment.cache_clear()  # the server that ranks are forked from has asked
        rundir.version = lambda name: "9.9" if name == module else real(name)
    return train_rank(mine)


@pytest.mark.parametrize(
    "words, module, said",
    [
        (["optim.learning_rate=1.0"], "", "optim.learning_rate is 1.0 there, 0.003 here"),
        (["parallel.stage=ddp"], "", "parallel.stage is 'ddp' there, 'zero3' here"),
        ([], "transformers", "transformers is '9.9' there, '"),
    ],
)
def test_ranks_that_differ(recipe, words, module, said):
    for code, _, errors in run_world(2, start_unlike, recipe, words, module):
        assert code == 2 and f"shardbook: rank 1 is not started like rank 0: {said}" in errors, errors


def test_nodes_of_unlike_size(recipe):
    for code, _, errors in run_world(2, start_with_own_node, recipe):
        assert code == 2 and "ranks of a node is 2 there, 1 here" in errors


def start_with_own_node(recipe):
    os.environ["LOCAL_WORLD_SIZE"] = str(int(os.environ["RANK"]) + 1)
    return train_rank([str(recipe), "run.name=unlike"])
