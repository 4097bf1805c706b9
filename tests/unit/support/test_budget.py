"""Budgets: what is counted, in which process, and that more than a budget has is red and named."""

import os
import subprocess
import sys
import tomllib

import budget
import pytest
from budget import BUDGET, KINDS, PROPERTY, STEPS, TALLY, TIERS, Budget, count, used_more
from world import forks, run_world


def test_every_tier_has_a_budget_of_each_kind():
    budgets = tomllib.loads(BUDGET.read_text())
    assert budgets.keys() == set(TIERS.values())
    assert all(each.keys() == set(KINDS.values()) for each in budgets.values())


def letters_of(work, path, monkeypatch) -> str:
    """What is counted while `work()` runs, in order of the letters."""
    path.touch()
    monkeypatch.setenv(TALLY, str(path))
    work()
    return "".join(sorted(path.read_text()))


def take_steps(path, times):
    """On a rank, which was forked from a server that has another tally in its environment."""
    import torch

    os.environ[TALLY] = str(path)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for _ in range(times):
        optimizer.step()


@pytest.mark.parametrize("times", [3, STEPS + 5])
def test_steps_of_a_rank_are_counted_up_to_a_limit(times, tmp_path, monkeypatch):
    forks()  # the server counts its forks where it was started
    path = tmp_path / "tally"
    letters = letters_of(lambda: run_world(2, take_steps, path, times), path, monkeypatch)
    assert letters == "s" * 2 * min(times, STEPS)


def test_a_fresh_process_is_counted_and_so_is_what_it_starts(tmp_path, monkeypatch):
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    start = lambda: subprocess.run([sys.executable, "-c", code], check=True)  # noqa: E731
    assert letters_of(start, tmp_path / "tally", monkeypatch) == "cc"


def test_a_count_of_none_writes_nothing(tmp_path, monkeypatch):
    assert letters_of(lambda: (count("b", 0), count("b", -1), count("b", 2)), tmp_path / "tally", monkeypatch) == "bb"


def test_a_tests_own_are_those_since_the_last(tmp_path, monkeypatch):
    plugin, path = Budget(), tmp_path / "tally"
    monkeypatch.setattr(budget, "blocks_measured", lambda: plugin.blocks)
    assert letters_of(lambda: count("r", 3), path, monkeypatch) == "rrr"
    assert plugin._used() == {"ranks": 3}
    count("s")
    assert plugin._used() == {"rank_steps": 1} and plugin._used() == {}


class Report:
    def __init__(self, name: str, **used: int) -> None:
        self.nodeid, self.when, self.user_properties = name, "teardown", [(PROPERTY, used)]


@pytest.mark.parametrize(("ranks", "is_red"), [(12, False), (13, True)])
def test_more_than_a_budget_is_red(ranks, is_red):
    plugin = Budget()
    for report in (Report("one", ranks=ranks - 5, rank_steps=1), Report("two", ranks=5)):
        plugin.pytest_runtest_logreport(report)
    assert plugin._sum() == {"ranks": ranks, "cold_processes": 0, "rank_steps": 1, "measured_blocks": 0}
    assert used_more(plugin._sum(), dict.fromkeys(KINDS.values(), 12)) == ["ranks"] * is_red
