"""What a sharded model keeps while forwards run without backward ends with them, however they end."""

from types import SimpleNamespace

import pytest

from shardbook.parallel.sharding import ShardedModel


class Handle:
    def __init__(self):
        self.frees = True

    def set_reshard_after_forward(self, value, recurse):
        assert not recurse
        self.frees = value


def test_parameters_are_freed_again_after_forwards_that_failed():
    units = [SimpleNamespace(handle=Handle(), reshard_after_forward=frees) for frees in (True, True, False)]
    layout, resharded = SimpleNamespace(units=units, switches=SimpleNamespace(secondary=0)), []
    sharded = SimpleNamespace(replicated=None, layout=layout, reshard=lambda: resharded.append(True))
    sharded.chunks = [sharded]
    with pytest.raises(MemoryError), ShardedModel.gathered_once(sharded):
        assert [unit.handle.frees for unit in units] == [False, False, True]
        raise MemoryError
    assert [unit.handle.frees for unit in units] == [True] * 3 and resharded == [True]
