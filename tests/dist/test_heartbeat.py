"""A rank that vanishes ends the others within a bound, with one line; a healthy run is never ended."""

import os
import signal
import socket
import time

import pytest
from planted import replace
from world import losses, run_train, start_ranks

LOST_SECONDS = 6  # on a busy machine a thread may stand still for a while, and none is lost then
HOST = socket.gethostname()


def read(path):
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("frozen", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_not_heard_of(recipe, tmp_path, frozen):
    """Stopped, its connections stay open: as with a machine that has lost its link."""
    words = [str(recipe), f"run.name=frozen-{frozen}", "train.steps=100000", f"run.lost_seconds={LOST_SECONDS}"]
    ranks = start_ranks(2, words, tmp_path)
    try:
        deadline = time.monotonic() + 240
        while "step 3/" not in read(tmp_path / "0") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "step 3/" in read(tmp_path / "0")
        began = time.monotonic()
        os.kill(ranks[frozen].pid, signal.SIGSTOP)
        ranks[1 - frozen].join(240)
        took = time.monotonic() - began
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1 - frozen].exitcode == 1, read(tmp_path / str(1 - frozen))
    assert took >= LOST_SECONDS
    last = f"rank {frozen} (host {HOST}) has not been heard of for {LOST_SECONDS} s; run the same command again"
    assert read(tmp_path / str(1 - frozen)).splitlines()[-1] == f"shardbook: run failed: {last}"


def dawdle():
    """Rank 0 ends later than its peer by more than the limit, and rank 1 takes its second step so late."""
    from shardbook.optim.clip import clip_gradients
    from shardbook.run.directory import RunDirectory

    finish, steps = RunDirectory.finish, []

    def clip_late(*words):
        steps.append(1)
        if os.environ["RANK"] == "1" and len(steps) == 2:
            time.sleep(LOST_SECONDS + 1)
        return clip_gradients(*words)

    def finish_late(*words):
        time.sleep(LOST_SECONDS + 1)
        return finish(*words)

    replace(clip_gradients, clip_late)
    RunDirectory.finish = finish_late


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_are_alive(recipe, tmp_path):
    words = [str(recipe), "run.name=slow", f"run.lost_seconds={LOST_SECONDS}"]
    ranks = start_ranks(2, words, tmp_path, dawdle)
    for rank in ranks:
        rank.join(240)
    said = [read(tmp_path / str(rank)) for rank in range(2)]
    assert [rank.exitcode for rank in ranks] == [0, 0], said
    assert "not been heard of" not in "".join(said)
    assert losses(recipe.parent / "slow") == losses(run_train(2, recipe, "plain"))


def leave_early():
    """Rank 0 is done while rank 1 still is not."""
    from shardbook.ranks.distributed import stop_distributed

    def stop_late(ranks):
        time.sleep(8 * ranks.rank)
        stop_distributed(ranks)

    replace(stop_distributed, stop_late)


def test_rank_0_stays_for_those_who_are_not_done(recipe, tmp_path):
    words = [str(recipe), "run.name=stays", "run.lost_seconds=20"]
    ranks = start_ranks(2, words, tmp_path, leave_early)
    deadline = time.monotonic() + 240
    while "done     5 steps" not in read(tmp_path / "0") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "done     5 steps" in read(tmp_path / "0")
    time.sleep(1.5)
    assert ranks[0].is_alive() and ranks[1].is_alive()
    for rank in ranks:
        rank.join(240)
    assert [rank.exitcode for rank in ranks] == [0, 0], [read(tmp_path / str(rank)) for rank in range(2)]


def build_late():
    """Rank 1 finds out a second later than rank 0 what is wrong."""
    from shardbook.parallel import placement

    build = placement.build_layout

    def build_layout(*words):
        time.sleep(int(os.environ["RANK"]))
        return build(*words)

    placement.build_layout = build_layout


def test_a_refused_recipe_stays_one_line(recipe, tmp_path):
    """Rank 0 says it first, and the store ends with it: not before rank 1, which is late, no longer beats on it."""
    words = [str(recipe), "run.name=refused", "parallel.dp_shard_size=3", "run.lost_seconds=8"]
    ranks = start_ranks(2, words, tmp_path, build_late)
    for rank in ranks:
        rank.join(240)
    assert [rank.exitcode for rank in ranks] == [2, 2]
    for rank in range(2):
        said = (
            "mesh dp_replicate 1 x dp_shard 3 needs 3 ranks, the world has 2: "
            "start 3 ranks, or set parallel.dp_shard_size=-1"
        )
        assert read(tmp_path / str(rank)) == f"shardbook: {said}\n"
