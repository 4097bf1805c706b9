"""Ranks that cannot all meet say so in one line, each of them, in bounded time (a minute of waiting is red); threads
follow the cores."""

import os
import re
import socket
import time

import pytest
from world import run_world, train_rank


def start(recipe, seconds, changes):
    """A rank that waits `seconds` in place of minutes; `changes`: variables of some ranks, by their first RANK."""
    import shardbook.ranks.rendezvous as join

    join.SILENT_SECONDS, join.JOIN_SECONDS, join.TELL_SECONDS = seconds, seconds, seconds / 2
    os.environ.update(changes.get(os.environ["RANK"], {}))
    return train_rank([str(recipe), "run.name=unmet"])


def refused(recipe, size, said, seconds=2, changes=None, environment=None):
    for code, out, errors in run_world(size, start, recipe, seconds, changes or {}, environment=environment):
        assert code == 2 and re.search(f"^shardbook: {said}", errors) and errors.count("\n") == 1, (out, errors)
    assert not (recipe.parent / "unmet").exists()


def test_ranks_that_do_not_come(recipe):
    started = run_world(2, start, recipe, 6, {}, environment={"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"})
    for code, _, errors in started:
        assert code == 2
        said = r"shardbook: ranks 2, 3 of 4 did not come to 127\.0\.0\.1:\d+ in \d+ s; start the run on every node, "
        assert re.fullmatch(said + "with this address\n", errors), errors
    assert re.search(r"^waiting for ranks (1, )?2, 3 of 4 at 127\.0\.0\.1:\d+$", started[0][1], re.M)
    assert "waiting" not in started[1][1]


def test_rank_0_does_not_come(recipe):
    changes = {"0": {"RANK": "1"}}
    said = (
        r"127\.0\.0\.1:\d+: rank 1 on \S+ did not reach rank 0 there in \d+ s \(that machine answers, but rank 0 does"
    )
    refused(recipe, 1, said, 1, changes, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"})


@pytest.mark.slow
def test_two_that_claim_one_rank(recipe):
    refused(recipe, 3, r"RANK = 1 is claimed by two processes: \d+ on \S+, \d+ on \S+;", 20, {"2": {"RANK": "1"}})


@pytest.mark.slow
def test_worlds_of_unlike_size(recipe):
    said = (
        r"WORLD_SIZE is (4 on rank 1 \(\S+\) and 2 on rank 0|2 on rank 0 \(\S+\) and 4 on rank 1) \(\S+\); start every"
    )
    refused(recipe, 2, said, 20, {"1": {"WORLD_SIZE": "4"}})


@pytest.mark.slow
def test_machines_with_unlike_numbers_of_ranks(recipe):
    """Rank 0 knows of two ranks and waits for rank 1; the other machine calls its two 2 and 3 of four."""
    changes = {"1": {"RANK": "2", "WORLD_SIZE": "4"}, "2": {"RANK": "3", "WORLD_SIZE": "4"}}
    said = r"WORLD_SIZE is \d on rank \d \(\S+\) and \d on rank \d \(\S+\); start every node alike"
    refused(recipe, 3, said, 20, changes, {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"})


def test_rank_0_on_another_machine_than_the_head(recipe):
    said = r"no-such-host\.invalid:\d+: rank 0 finds no run there \(no address of this machine, where rank 0 listens\)"
    refused(recipe, 1, said, 1, {"0": {"MASTER_ADDR": "no-such-host.invalid"}})


def member(rank, world_size=4, **more):
    return {"rank": rank, "world_size": world_size, "host": "a", "pid": 7, "address": "10.0.0.1", **more}


@pytest.mark.parametrize(
    "members, said",
    [
        ([member(0), member(3)], ""),
        ([member(0), member(3, 2, host="b")], "WORLD_SIZE is 4 on rank 0 (a) and 2 on rank 3 (b); start every node"),
        ([member(1), member(1, pid=8), member(0, 2)], "RANK = 1 is claimed by two processes: 7 on a, 8 on a; each"),
        ([member(rank, address="127.0.1.1") for rank in range(4)], ""),
        ([member(rank, host="b", address="127.0.1.1") for rank in (3, 2)] + [member(0)], ""),  # not all came yet
        (
            [member(rank, host="b", address="127.0.1.1") for rank in (3, 2)] + [member(0), member(1)],
            "ranks 2, 3 would listen at 127.0.1.1, which is what b means there, and no other machine reaches that; set",
        ),
    ],
)
def test_what_each_rank_finds_wrong_is_the_same(members, said):
    """It depends on the beginning of what was written in order, not on how much more a rank has seen."""
    from shardbook.ranks.rendezvous import find_refusal

    refusal = find_refusal(members, 4)
    assert refusal.startswith(said) and bool(refusal) == bool(said)
    if said and "listen" not in said:
        assert find_refusal([*members, member(2, 9)], 4) == refusal


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_port_where_something_else_listens(recipe, rank):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{(port := taken.getsockname()[1])}"
        said = f"{address}: the port is taken on "
        if rank == "1":
            said = rf"{address}: rank 1 finds no run there \(what listens there says nothing\)"
        changes = {"0": {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": str(port)}}
        refused(recipe, 1, said, 1, changes)


def test_a_head_that_no_one_knows(recipe):
    changes = {"0": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "no-such-host.invalid"}}
    said = r"no-such-host\.invalid:\d+: rank 1 on \S+ did not reach rank 0 there in \d+ s \(no machine of that name\)"
    refused(recipe, 1, said, 0.5, changes)


def threads(variables, cores):
    import torch

    from shardbook.ranks.distributed import start_distributed

    if "OMP_NUM_THREADS" not in variables:
        del os.environ["OMP_NUM_THREADS"]
    os.environ.update(variables)
    os.sched_getaffinity = lambda pid: cores[int(os.environ["RANK"])]  # this machine may have fewer
    torch.set_num_threads(5)
    start_distributed()
    return torch.get_num_threads()


@pytest.mark.parametrize(
    "variables, cores, expected",
    [
        ({}, [range(8), range(8)], [4, 4]),
        ({}, [range(4), range(4, 8)], [4, 4]),  # bound to cores of their own by the launcher
        ({}, [range(1), range(1)], [1, 1]),
        ({"OMP_NUM_THREADS": "5"}, [range(8), range(8)], [5, 5]),  # the user's choice
        ({"OMP_NUM_THREADS": "1"}, [range(8), range(8)], [5, 5]),  # (torch has read it before)
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, [range(8), range(8)], [4, 4]),
    ],
)
def test_threads_are_the_share_of_the_cores(variables, cores, expected):
    assert run_world(2, threads, variables, cores) == expected


def connected():
    """When this rank had its process group, rank 1 late, and when it went on (one clock: one machine)."""
    import torch.distributed as dist

    from shardbook.ranks.distributed import start_distributed

    connect, times = dist.init_process_group, []

    def connect_late(*args, **named):
        connect(*args, **named)
        time.sleep(int(os.environ["RANK"]))
        times.append(time.monotonic())

    dist.init_process_group = connect_late
    start_distributed()
    return [*times, time.monotonic()]


def test_rank_0_goes_on_when_every_rank_is_connected():
    (_, first), (last, _) = run_world(2, connected)
    assert first >= last


def on_machines_of_their_own(recipe, interface):
    """Each rank on a machine of its own, whose name means a loopback address there, as Debian writes it."""
    name, addresses = f"node-{os.environ['RANK']}", socket.getaddrinfo
    socket.gethostname = lambda: name
    socket.getaddrinfo = lambda host, *rest, **named: addresses("127.0.1.1" if host == name else host, *rest, **named)
    return start(recipe, 20, {rank: {"GLOO_SOCKET_IFNAME": interface} for rank in "01" if interface})


def test_a_host_name_that_means_loopback_is_said_before_gloo_tries(recipe):
    said = "shardbook: ranks 0, 1 would listen at 127.0.1.1, which is what node-0 means there, and no other machine "
    said += "reaches that; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, on each machine, to its interface "
    for code, _, errors in run_world(2, on_machines_of_their_own, recipe, ""):
        assert code == 2 and errors.startswith(said) and errors.count("\n") == 1, errors
    assert [result[0] for result in run_world(2, on_machines_of_their_own, recipe, "lo")] == [0, 0]


def out_of_reach():
    """Rank 0 is told an address of rank 1 at which nobody listens."""
    import threading
    from datetime import timedelta

    import shardbook.ranks.distributed as distributed
    from shardbook.ranks.launchers import Rendezvous
    from shardbook.ranks.rendezvous import open_store
    from shardbook.recipe import RecipeError

    place = Rendezvous(0, 2, 0, 1, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store, other = open_store(place, is_host=True), open_store(place)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def play_rank_1():
        other.wait(["0//cpu//0/0"], timedelta(seconds=30))  # gloo's own key, under torch's prefix
        mine = other.get("0//cpu//0/0")
        at = mine.index(socket.inet_aton("127.0.0.1"))
        other.set("0//cpu//0/1", mine[: at - 2] + port.to_bytes(2, "big") + mine[at:])

    threading.Thread(target=play_rank_1, daemon=True).start()
    distributed.CONNECT_TIMEOUT = timedelta(seconds=1)
    try:
        distributed.connect(place, store, "gloo")
    except RecipeError as error:
        return str(error)


@pytest.mark.slow
def test_ranks_that_gloo_does_not_reach_are_said():
    (said,) = run_world(1, out_of_reach, environment={"GLOO_SOCKET_IFNAME": "lo"})
    start, way_out = (
        r"rank 0 on \S+: gloo does not reach the other ranks \(Gloo connectFullMesh failed",
        "; set GLOO_SOCKET",
    )
    assert re.match(start, said) and way_out in said and "\n" not in said, said


def test_a_rank_0_that_ends_meanwhile_is_no_refusal(monkeypatch):
    """Exit code 1, not 2: then --max-restarts starts the ranks again, on every node."""
    import torch.distributed as dist

    import shardbook.ranks.rendezvous as join
    from shardbook.ranks.exits import RunFailed
    from shardbook.ranks.launchers import Rendezvous

    class Gone:
        def add(self, key, count):
            raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(join, "_await_head", lambda place: None)
    monkeypatch.setattr(join, "open_store", lambda *words: Gone())
    said = "rank 0 at head:1 ended before all ranks had come, and said why where it ran; run the same command again"
    with pytest.raises(RunFailed, match=said):
        join.join_ranks(Rendezvous(1, 2, 1, 2, "head", 1))
