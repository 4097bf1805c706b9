"""What a run of the tests may use: processes forked as ranks, fresh Python processes, steps of ranks, measured blocks.

Invariant: these are counted, never timed, so that a slow machine uses what a fast one does, but for two things: a run
that goes on until it is killed makes a few steps more or less, and each process that runs tests measures a block anew.
Whoever uses something appends a letter to one file; a test's are those that were appended while it ran.
"""

import collections
import os
import sys
import tomllib
from pathlib import Path

import pytest

TALLY = "SHARDBOOK_TEST_TALLY"  # the file
KINDS = {"r": "ranks", "c": "cold_processes", "s": "rank_steps", "b": "measured_blocks"}
# Of one rank: how many steps a run makes that goes on until it is killed is a matter of time.
STEPS = 8
BUDGET = Path(__file__).with_name("budget.toml")
TIERS = {"not slow": "test", "not everything": "ci"}  # by what -m of a run leaves out
PROPERTY = "used"
MOST = 10


def count(letter: str, times: int = 1) -> None:
    """Appends to the tally; in one write, so that those of many processes do not mix."""
    if (path := os.environ.get(TALLY)) and times > 0:
        with open(path, "a") as tally:  # noqa: PTH123  # also called where pathlib is not imported yet
            tally.write(letter * times)


def count_in_forks() -> None:
    """Counts each process that is forked from this one, and the steps of its optimizers."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    taken: list[int] = []

    def took_step(*_) -> None:
        taken.append(1)
        count("s", len(taken) <= STEPS)

    def forked() -> None:
        taken.clear()
        count("r")

    register_optimizer_step_post_hook(took_step)
    os.register_at_fork(after_in_child=forked)


def blocks_measured() -> int:
    """Returns how many models' blocks this process has measured, or knows from another."""
    blocks = sys.modules.get("shardbook.plan.measure_blocks")
    return len(blocks.KNOWN_BLOCKS[0]) if blocks else 0


WORKERS = 3  # that run a tier's tests: with more of them more blocks are measured, and none are judged


def used_more(used: dict[str, int], budget: dict[str, int]) -> list[str]:
    """Returns the kinds of which more was used than the budget has."""
    return [kind for kind in KINDS.values() if used.get(kind, 0) > budget[kind]]


class Budget:
    """The plugin: a process that runs tests adds what each used to its last report; the one that began them sums up."""

    def __init__(self) -> None:
        self.place = 0  # in the tally
        self.blocks = 0
        self.tests: dict[str, dict[str, int]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":
            report.user_properties.append((PROPERTY, self._used()))
        return report

    def _used(self) -> dict[str, int]:
        with Path(os.environ[TALLY]).open() as tally:
            tally.seek(self.place)
            letters = collections.Counter(tally.read())
            self.place = tally.tell()
        before, self.blocks = self.blocks, blocks_measured()
        letters["b"] += max(0, self.blocks - before)
        return {KINDS[letter]: times for letter, times in letters.items() if times}

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self.tests[report.nodeid] = dict(report.user_properties).get(PROPERTY, {})

    def _sum(self) -> dict[str, int]:
        adds = sum(map(collections.Counter, self.tests.values()), collections.Counter())
        return {kind: adds[kind] for kind in KINDS.values()}

    def _budget(self, config) -> dict[str, int] | None:
        """The budget of a run of all tests of a tier."""
        tier = TIERS.get(config.option.markexpr)
        is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
        if hasattr(config, "workerinput") or tier is None or not is_whole or not self.tests or config.option.streams:
            return None
        budget = tomllib.loads(BUDGET.read_text())[tier]
        if (getattr(config.option, "numprocesses", None) or 1) > WORKERS:
            budget["measured_blocks"] = sys.maxsize
        return budget

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if (budget := self._budget(session.config)) and used_more(self._sum(), budget) and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter, config):
        if hasattr(config, "workerinput") or len(self.tests) <= MOST:
            return
        used, budget, write = self._sum(), self._budget(config), terminalreporter.write_line
        of = {kind: f" of {budget[kind]}" if budget else "" for kind in used}
        write("Used: " + ", ".join(f"{kind} {used[kind]}{of[kind]}" for kind in used))
        for kind in used_more(used, budget) if budget else ():
            write(f"RED: more {kind} than {BUDGET.name} has. Most were used by:")
            most = sorted(self.tests, key=lambda name: -self.tests[name].get(kind, 0))[:MOST]
            for name in most:
                write(f"{self.tests[name].get(kind, 0):8d}  {name}")
