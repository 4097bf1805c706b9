"""Hardware: the seconds of a collective inside a node and between nodes."""

import pytest

from shardbook.plan.hardware import (
    ACROSS,
    ACROSS_SECONDS,
    GBIT,
    INSIDE,
    INSIDE_SECONDS,
    build_cluster,
)


def test_a_ring_inside_a_node_and_between_nodes():
    inside = build_cluster("h100", 8)
    sent = 8e9 * 7 / 8
    assert inside.ring_seconds(8e9, list(range(8))) == sent / (INSIDE * 450e9) + 7 * INSIDE_SECONDS
    assert inside.ring_seconds(8e9, [0]) == 0
    across = build_cluster("h100", 16)
    hops = ACROSS_SECONDS + 14 * INSIDE_SECONDS
    assert across.ring_seconds(16e9, list(range(16))) == pytest.approx(15e9 / (ACROSS * 3200 * GBIT) + hops)
    # one rank of each node: the eight groups of a node share its cards
    pair = across.ring_seconds(2e9, [0, 8])
    assert pair == pytest.approx(8 * 1e9 / (ACROSS * 3200 * GBIT) + ACROSS_SECONDS)
