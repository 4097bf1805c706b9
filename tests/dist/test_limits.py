"""How long collectives may take: NCCL's limit comes down after the first step, gloo's stays."""

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from world import run_world


def late_after_a_limit(seconds):
    """A group of its own, as a mesh has, with a limit of `seconds`; how long rank 0 waits there for rank 1."""
    from shardbook.ranks.distributed import set_time_limit, start_distributed

    ranks = start_distributed()
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    set_time_limit("cpu", timedelta(seconds=seconds))
    store = dist.distributed_c10d._get_default_store()
    if ranks.rank:
        store.wait(["failed"], timedelta(seconds=60))
        return None
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        store.set("failed", "")
        return time.monotonic() - began, str(error)


@pytest.mark.slow
def test_the_limit_of_every_group():
    (took, said), _ = run_world(2, late_after_a_limit, 1)
    assert took >= 1 and "1000ms" in said, (took, said)


def limits_of_a_watch(device_type):
    """Of gloo, before, after the first and the second step, and at the end; the calls that were to set NCCL's."""
    import shardbook.ranks.distributed as distributed

    distributed.start_distributed()
    gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
    found, asked = [gloo.options._timeout], []
    distributed.set_time_limit = lambda device, limit: asked.append((device, limit))
    with distributed.watch_steps(SimpleNamespace(device=torch.device(device_type)), 240) as finish:
        for step in (1, 2):
            finish(step)
            found.append(gloo.options._timeout)
    return [*found, gloo.options._timeout], asked, distributed.TIMEOUT


def test_after_the_first_step_nccl_has_less_time_and_gloo_as_much():
    ((gloo, asked, long),) = run_world(1, limits_of_a_watch, "cpu")
    assert gloo == [long] * 4 and asked == []
    ((gloo, asked, long),) = run_world(1, limits_of_a_watch, "cuda")
    assert gloo == [long] * 4 and asked == [("cuda", timedelta(minutes=5)), ("cuda", long)]
