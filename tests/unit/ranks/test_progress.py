"""Who stands still, and who only waits for them."""

import collections
import sys
from types import SimpleNamespace

import pytest
import torch

from shardbook.comm.ledger import warmup_steps
from shardbook.ranks.distributed import watch_steps
from shardbook.ranks.progress import PROGRESS, Progress, RankProgress, find_stragglers, long_phase, mark_each


def there(marks, seconds, waits=False):
    return RankProgress(marks, waits, seconds, 7, "in micro-batch 2", "train.py:1")


@pytest.mark.parametrize(
    "standings, behind",
    [
        ([there(10, 61), there(9, 62), there(10, 61)], [1]),
        ([there(10, 61), there(9, 62), there(9, 63)], [1, 2]),
        ([there(9, 61), there(9, 61, waits=True)], [0]),
        ([there(9, 61), there(9, 61)], [0, 1]),
        ([there(9, 61)], [0]),
        ([there(10, 61), there(9, 59)], []),  # slow, but it goes on; the other waits for it
        ([there(9, 59), there(9, 61)], []),
        ([there(10, 61), there(9, 0)], []),  # in a long phase
        ([there(10, 0), there(9, 61)], [1]),  # never came to it
        ([], []),
    ],
)
def test_who_is_behind(standings, behind):
    assert find_stragglers(dict(enumerate(standings)), 60) == behind


def test_standing_counts_only_what_passed_since_the_last_mark_after_the_first_step():
    progress = Progress()
    assert [progress.stand(5).seconds for _ in range(3)] == [0, 0, 0]
    progress.finish(1)
    assert [progress.stand(5).seconds for _ in range(3)] == [0, 5, 10]
    progress.mark("in micro-batch 1")
    found = [progress.stand(5) for _ in range(2)]
    assert [(now.seconds, now.step, now.doing, now.marks) for now in found] == [
        (0, 2, "in micro-batch 1", 2),
        (5, 2, "in micro-batch 1", 2),
    ]
    assert RankProgress.parse(found[1].dump(3).encode()) == found[1] and found[1].dump(3) != found[1].dump(4)


def test_a_step_that_compiles_is_not_watched(here):
    """The first, and under the ledger of tp and cp the second; a step that was watched stays so."""
    cpu = SimpleNamespace(device=torch.device("cpu"))
    for first, watched in ((1, [True] * 3), (2, [False, True, True])):
        with watch_steps(cpu, 60, first) as finish:
            assert [(finish(step), here.watched)[1] for step in (5, 6, 7)] == watched
        assert not here.watched
    assert (
        [warmup_steps(compiles, {"tp": 2}) for compiles in (False, True)]
        == [1, 2]
        == [warmup_steps(True, {"cp": c}) for c in (1, 2)]
    )


@pytest.fixture
def here(monkeypatch):
    for name, value in {"marks": 0, "step": 0, "doing": "", "watched": False, "_seen": 0, "_seconds": 0.0}.items():
        monkeypatch.setattr(PROGRESS, name, value)
    return PROGRESS


def test_a_long_phase_is_not_watched(here):
    here.finish(1)
    here.stand(5)
    with long_phase("a checkpoint"):
        assert [here.stand(5).seconds for _ in range(3)] == [0, 0, 0] and here.doing == "in a checkpoint"
    assert [here.stand(5).seconds for _ in range(2)] == [0, 5] and here.doing == "after a checkpoint"


def test_marks_of_micro_batches(here):
    assert [(item, here.doing, here.marks) for item in mark_each("ab", "micro-batch")] == [
        ("a", "in micro-batch 1", 1),
        ("b", "in micro-batch 2", 2),
    ]
    assert (here.doing, here.marks) == ("after its last micro-batch", 4)  # one before it was known that none came


def test_a_mark_costs_nothing(here):
    """For each item three functions are called, none of which asks a clock, a lock or a file."""
    calls = collections.Counter()

    def note(frame, event, function):
        if event.endswith("call"):
            calls[function.__name__ if function else frame.f_code.co_name] += 1

    marks = mark_each(range(1000), "micro-batch")
    sys.setprofile(note)
    try:
        collections.deque(marks, maxlen=0)
    finally:
        sys.setprofile(None)
    del calls["setprofile"]
    assert calls.keys() == {"mark_each", "mark", "iter", "next"} and max(calls.values()) <= 1002, calls
