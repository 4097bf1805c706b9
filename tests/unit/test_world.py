"""The worlds of ranks that tests run in."""

from world import run_world


def asks_late():
    """What rank 1 reads from the store of rank 0, which has answered by then."""
    import time

    import torch.distributed as dist

    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("word", "kept")
        return "kept"
    time.sleep(0.5)
    return store.get("word").decode()


def test_a_late_rank_finds_the_store_of_rank_0():
    assert run_world(2, asks_late) == ["kept", "kept"]


def waits_for_one_that_is_gone():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        return "gone"
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return "noticed"


def test_who_waits_for_a_rank_that_has_answered_sees_its_end():
    assert run_world(2, waits_for_one_that_is_gone, seconds=120) == ["noticed", "gone"]
