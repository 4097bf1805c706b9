"""What a rank takes of its machine: its share of the cores."""

from shardbook.ranks.distributed import share_of_cores


def test_cores_that_several_may_use_are_shared():
    assert share_of_cores([range(8)] * 4, 2) == 2
    assert share_of_cores([range(4), range(4, 8)], 1) == 4
    assert share_of_cores([range(2)] * 3, 0) == 1
