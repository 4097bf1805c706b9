"""What the installed torch says of a peer that is gone, provoked: other words than ranks/peer_errors.py knows turn it
red. (A peer that gloo does not reach: tests/dist/test_join.py.)"""

import os
from datetime import timedelta

import pytest
import torch
from world import run_world

from shardbook.ranks.peer_errors import broken_connection, is_closed_store, is_lost_peer, is_out_of_reach


def of_each(calls):
    """Of what each of `calls` raises: its text, and what it is taken for."""
    found = []
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            taken = (
                is_lost_peer(error),
                bool(broken_connection(error)),
                is_closed_store(error),
                is_out_of_reach(error),
            )
            found.append((str(error), *taken))
        else:
            found.append(("nothing", False, False, False, False))
    return found


def store_of(is_host):
    from torch.distributed import TCPStore

    host, port, limit = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=20)
    return TCPStore(host, port, 2, is_host, limit, wait_for_workers=False)


def when_a_peer_has_ended():
    import torch.distributed as dist

    def connect(rank):
        store = store_of(rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        dist.barrier()

    if not (peer := os.fork()):
        try:
            connect(1)
        finally:
            os._exit(0)
    connect(0)
    os.waitpid(peer, 0)
    return of_each([lambda: dist.all_reduce(torch.zeros(4)), dist.barrier, lambda: dist.recv(torch.zeros(4), 1)])


def when_the_store_has_ended():
    read, write = os.pipe()
    if not (host := os.fork()):
        try:
            kept = store_of(True)
            os.read(read, 1)
            del kept
        finally:
            os._exit(0)
    one, other, third = (store_of(False) for _ in range(3))
    os.write(write, b" ")
    os.waitpid(host, 0)
    calls = [lambda: one.wait(["never"]), lambda: one.set("key", "value"), lambda: other.check(["key"])]
    # a first message is written before its end is known
    return of_each([*calls, lambda: third.multi_get(["key"]), lambda: third.get("key")])


@pytest.mark.parametrize("ends", [when_a_peer_has_ended, when_the_store_has_ended])
def test_what_torch_says_is_understood(ends):
    (found,) = run_world(1, ends)
    is_peer = ends is when_a_peer_has_ended
    for text, lost, broken, closed, unreached in found:
        assert lost and closed and not unreached, text
        assert broken or not is_peer, text


def test_what_is_not_a_peers_is_not_taken_for_one():
    for ours in (
        RuntimeError("expected a tensor"),
        OSError("/data/gloo/rows"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ):
        assert not is_lost_peer(ours) and not broken_connection(ours) and not is_out_of_reach(ours)
