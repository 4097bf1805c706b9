"""A rank that is alive and stands still ends the run within a bound, and the last line of every rank names it, its host
and its step; what only takes long does not."""

import dataclasses
import os
import pickle
import re
import socket
import time

import pytest
from planted import replace
from world import losses, run_train, start_ranks

HANG_SECONDS = 3
HOST = socket.gethostname()
STEP = 3  # at which somebody stands still
AGAIN = "run the same command again"


def stand_still():
    time.sleep(3600)


def stopping(real, ranks, last=STEP):
    """`real`, but on each of `ranks` its call number `last` does not end."""
    calls = []

    def stops(*words):
        calls.append(1)
        if len(calls) == last and int(os.environ["RANK"]) in ranks:
            stand_still()
        return real(*words)

    return stops


def rank_1_at_its_rows():
    from shardbook.data.loader import Loader

    Loader.step_at = stopping(Loader.step_at, [1], STEP + 1)  # a thread makes those of the next step


def stop_in_the_clip(*ranks):
    from shardbook.optim.clip import clip_gradients

    replace(clip_gradients, stopping(clip_gradients, ranks))


def rank_1_in_the_clip():
    stop_in_the_clip(1)


def ranks_1_and_2_in_the_clip():
    stop_in_the_clip(1, 2)


def all_at_the_loss():
    from shardbook.run.log.step_log import StepLog

    StepLog.end = stopping(StepLog.end, range(8))


def hang(recipe, folder, world, prepare):
    """The exit codes and what each of `world` ranks said, after `prepare()` in each."""
    name = f"{prepare.__name__}-{world}"
    words = [str(recipe), f"run.name={name}", "train.steps=100000", f"run.hang_seconds={HANG_SECONDS}"]
    ranks = start_ranks(world, words, folder, prepare)
    for rank in ranks:
        rank.join(240)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes, [(folder / str(rank)).read_text() for rank in range(world)], recipe.parent / name


def assert_named(codes, said, run, who, doing, others=""):
    assert codes == [1] * len(said), said
    for text in said:
        stands = rf"{who} stood still for (\d+) s at step {STEP}, {doing} \([\w/]+\.py:\d+\)"
        where = f"; stacks and records of collectives are in {re.escape(str(run / 'hang'))}"
        last = re.fullmatch(f"shardbook: run failed: {stands}{others}{where}; {AGAIN}", text.splitlines()[-1])
        assert last, text
        assert HANG_SECONDS <= int(last[1]) <= HANG_SECONDS + 60
        assert "Traceback" not in text


RANK_1 = rf"rank 1 \(host {HOST}\) has"
WAIT = "; the others wait for it"
ALL = ": a collective on the device that does not end, or a disk that does not answer"
CASES = [
    (rank_1_at_its_rows, 2, RANK_1, "at the rows of its next step", WAIT),
    # both have made the same marks: that rank 0 waits in a collective tells them apart
    (rank_1_in_the_clip, 2, RANK_1, "after its last micro-batch", WAIT),
    (
        ranks_1_and_2_in_the_clip,
        3,
        rf"ranks 1, 2 \(host {HOST}\) have",
        "after its last micro-batch",
        "; the others wait",
    ),
    (all_at_the_loss, 2, "all 2 ranks have", "after its last micro-batch", ALL),
    (all_at_the_loss, 1, rf"rank 0 \(host {HOST}\) has", "after its last micro-batch", ""),
]


IN_MAKE_TEST = CASES[:1]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case not in IN_MAKE_TEST)) for case in CASES],
    ids=lambda case: f"{case[0].__name__}-{case[1]}",
)
def test_a_rank_that_stands_still_is_named(recipe, tmp_path, case):
    prepare, world, who, doing, others = case
    codes, said, run = hang(recipe, tmp_path, world, prepare)
    assert_named(codes, said, run, who, doing, others)
    for rank in range(world):
        stacks = (run / "hang" / f"stacks-{rank}.txt").read_text()
        assert ("stand_still" in stacks) == (prepare is all_at_the_loss or str(rank) in who)
        record = pickle.loads((run / "hang" / f"collectives-{rank}").read_bytes())
        assert any("all_reduce" in entry["profiling_name"] for entry in record["entries"])


def positions_are_not_compared():
    """Planted bug: a stopped rank that nobody names."""
    import shardbook.ranks.heartbeat as heartbeat

    rank_1_at_its_rows()
    real = heartbeat.find_stragglers
    heartbeat.find_stragglers = lambda there, seconds: list(there) if real(there, seconds) else []


@pytest.mark.slow
def test_a_stopped_rank_that_nobody_names_turns_it_red(recipe, tmp_path):
    codes, said, run = hang(recipe, tmp_path, 2, positions_are_not_compared)
    assert codes == [1, 1] and "all 2 ranks have stood still" in said[0].splitlines()[-1], said
    with pytest.raises(AssertionError, match="all 2 ranks have stood still"):
        assert_named(codes, said, run, RANK_1, "at the rows of its next step", WAIT)


def take_long():
    """The first step, a checkpoint and each evaluation take longer than the limit; no held-out micro-batch does."""
    from shardbook.optim.clip import clip_gradients
    from shardbook.run import prepare
    from shardbook.run.checkpoint import save

    list_items, sft, steps = save.items_to_write, prepare.build_objective("sft", None), []

    def clip_late(*words):
        steps.append(1)
        time.sleep((HANG_SECONDS + 1) * (len(steps) == 1))
        return clip_gradients(*words)

    def save_late(*words):
        time.sleep(HANG_SECONDS + 1)
        return list_items(*words)

    def score_late(model, *given, **named):
        time.sleep(0 if model.training else 0.6 * HANG_SECONDS)
        return sft.terms(model, *given, **named)

    replace(clip_gradients, clip_late)
    save.items_to_write = save_late
    prepare.build_objective = lambda *given: dataclasses.replace(sft, terms=score_late)


@pytest.mark.slow
def test_what_only_takes_long_is_no_hang(recipe, tmp_path):
    words = ["train.steps=3", "train.save_steps=2", "train.eval_steps=2", f"run.hang_seconds={HANG_SECONDS}"]
    ranks = start_ranks(2, [str(recipe), "run.name=slow", *words], tmp_path, take_long)
    for rank in ranks:
        rank.join(240)
    said = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert [rank.exitcode for rank in ranks] == [0, 0], said
    assert not (recipe.parent / "slow" / "hang").exists()
    assert losses(recipe.parent / "slow") == losses(run_train(2, recipe, "plain", "train.steps=3"))
