"""Axis sizes: inferred where -1, refused where they cannot be."""

import pytest

from shardbook.parallel.mesh import resolve_sizes
from shardbook.recipe import STAGES, Parallel, RecipeError, check_parallel, find_stage


def sizes(stage: str, world: int | None, replicate: int = -1, shard: int = -1) -> tuple[int, ...]:
    parallel = Parallel(stage=stage, dp_replicate_size=replicate, dp_shard_size=shard)
    check_parallel(parallel)
    return tuple(resolve_sizes(parallel, find_stage(stage).axes, world).values())


def test_inferred_sizes():
    assert sizes("ddp", 6) == (6, 1)
    assert sizes("zero1", 6) == sizes("zero2", 6) == sizes("zero3", 6) == sizes("fsdp", 6) == (1, 6)
    assert sizes("hsdp", 6, replicate=2) == (2, 3)
    assert sizes("hsdp", 6, shard=2) == (3, 2)
    assert sizes("hsdp", 6, 2, 3) == (2, 3)
    assert sizes("hsdp", None, 2, 3) == (2, 3)
    assert sizes("zero3", None) == (1, -1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zero3", 4, -1, 3), "mesh dp_replicate 1 x dp_shard 3 needs 3 ranks, the world has 4"),
        (("hsdp", 6, 4), "4 does not divide the world of 6 ranks"),
        (("hsdp", 6), "set at least one of parallel.dp_replicate_size and parallel.dp_shard_size"),
        (("zero3", 4, 2), "parallel.dp_replicate_size = 2: stage zero3 has no such axis; .* parallel.stage=hsdp"),
        (("ddp", 4, -1, 2), "parallel.dp_shard_size = 2: stage ddp"),
        (("zero3", 4, -1, 0), "parallel.dp_shard_size = 0"),
        (("zero33", 4), "parallel.stage = 'zero33': must be one of ddp, .*; did you mean zero3?"),
    ],
)
def test_refused_sizes(arguments, message):
    with pytest.raises(RecipeError, match=message):
        sizes(*arguments)


def test_the_table_is_the_design():
    """Gathered between micro-batches, reduced every micro-batch: the columns that tell the stages apart."""
    table = {name: (row.reshard_after_forward, row.syncs(False)) for name, row in STAGES.items()}
    expected = {"zero1": (False, False), "zero2": (False, True)} | dict.fromkeys(
        ("zero3", "hsdp", "zeropp"), (True, True)
    )
    assert table == {"ddp": (False, True), **expected}
    assert all(row.syncs(True) for row in STAGES.values())
