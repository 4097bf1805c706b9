"""What a rank sends to other nodes, by hand; and that the parity matrix's covering part covers."""

from itertools import combinations

import pytest
from cases import CHECKPOINTING, CLIPS, MICROS, STEPS, TIED, covering_cases, layouts

from shardbook.comm.ledger import Volume, sent_between_nodes, traffic_metrics
from shardbook.parallel.mesh import axis_groups

# eight ranks, four a node; a ring over all of them crosses from rank 3 to 4 and from 7 to 0
ALL = list(range(8))
HAND = [
    ("all_gather", 3, 700),  # 800 bytes: 7/8 of them go round
    ("all_gather", 2, 0),
    ("all_gather", 7, 700),
    ("reduce_scatter", 3, 700),
    ("all_reduce", 3, 1400),
    ("all_reduce", 4, 0),
    ("all_to_all", 0, 400),  # four of eight parts go to the other node
    ("all_to_all", 5, 400),
]


@pytest.mark.parametrize("op, rank, sent", HAND)
def test_sent_to_other_nodes(op, rank, sent):
    assert sent_between_nodes({(op, "dp_shard"): Volume(3, 800)}, {"dp_shard": ALL}, rank, 4) == sent


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_inside_a_node_and_alone_nothing_crosses(op):
    for ranks, rank in ([4, 5, 6, 7], 5), ([3], 3):
        assert sent_between_nodes({(op, "dp_shard"): Volume(1, 800)}, {"dp_shard": ranks}, rank, 4) == 0


def test_replicas_across_nodes():
    """dp_replicate 2 x dp_shard 4 on nodes of 4: shards inside, replicas in pairs across."""
    groups = axis_groups({"dp_replicate": 2, "dp_shard": 4}, 6, 4)
    assert groups == {"dp_replicate": [2, 6], "dp_shard": [4, 5, 6, 7]}
    traffic = {("all_gather", "dp_shard"): Volume(2, 800), ("all_reduce", "dp_replicate"): Volume(1, 100)}
    assert sent_between_nodes(traffic, groups, 6, 4) == 100  # 2 x 100 x 1/2


def test_dp_shard_in_two():
    groups = axis_groups({"dp_replicate": 1, "dp_shard": 8}, 6, 4)
    assert groups["dp_shard_inside"] == [4, 5, 6, 7] and groups["dp_shard_across"] == [2, 6]
    assert "dp_shard_inside" not in axis_groups({"dp_replicate": 1, "dp_shard": 8}, 6, 8)


def test_metrics_add_up_the_axes():
    traffic = {("all_reduce", "dp_shard"): Volume(1, 8), ("all_reduce", "world"): Volume(2, 24)}
    metrics = traffic_metrics(traffic, 5)
    assert metrics["comm/all_reduce_calls"] == 3 and metrics["comm/all_reduce_bytes"] == 32
    assert metrics["comm/all_gather_calls"] == 0 and metrics["comm/inter_node_bytes"] == 5


def test_the_covering_cases_cover():
    """And one goes on for more steps, of an odd number of micro-batches."""
    options = {"micros": MICROS, "clips": CLIPS, "tied": TIED, "checkpointing": CHECKPOINTING}
    cases = covering_cases()
    assert [case.micros for case in cases if case.steps > STEPS] == [3]
    for world in (1, 2, 3, 4):
        here = [case for case in cases if case.world == world]
        assert {(case.stage, case.replicas, case.shards) for case in here} == set(layouts(world))
        for one, other in combinations(options, 2):
            seen = {(getattr(case, one), getattr(case, other)) for case in here}
            assert seen >= {(a, b) for a in options[one] for b in options[other]}, (world, one, other)
