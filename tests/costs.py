"""Costs: the CPU seconds of each test, in its worker, in what it starts and in the ranks that are forked for it.

Invariant: this prints and judges nothing, since a second of a full machine is not one of an idle machine.
"""

import collections
import itertools
import json
import os
import resource
from multiprocessing import forkserver
from pathlib import Path

import pytest

PROPERTY = "cpu_seconds"
DEAREST = 20
FOLDER = "SHARDBOOK_TEST_COSTS"  # a folder: each run of pytest writes the seconds of its tests there, as JSON
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Returns what this process, children that it has waited for, and the server of ranks have used, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(each.ru_utime + each.ru_stime for each in used)
    server = forkserver._forkserver._forkserver_pid
    if server:  # fields 14 to 17 of stat, proc_pid_stat(5): user and system, then those of children it has waited for
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15])) / TICKS
    return total


class Costs:
    """The plugin: a worker adds each test's seconds to its last report, from which the controller prints them."""

    def __init__(self) -> None:
        self.before = 0.0  # what was used when the last test ended: what is used between two tests is the second's

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":
            before, self.before = self.before, cpu_seconds()
            report.user_properties.append((PROPERTY, self.before - before))
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self):
        self.before = cpu_seconds()

    def pytest_terminal_summary(self, terminalreporter, config):
        if hasattr(config, "workerinput"):  # a worker has a summary of its own, which nobody sees
            return
        reports = itertools.chain.from_iterable(terminalreporter.stats.values())
        ends = [report for report in reports if getattr(report, "when", "") == "teardown"]
        costs = {report.nodeid: dict(report.user_properties).get(PROPERTY, 0.0) for report in ends}
        if len(costs) <= DEAREST:
            return
        files = collections.Counter()
        for name, seconds in costs.items():
            files[name.partition("::")[0]] += seconds
        write = terminalreporter.write_line
        write(f"CPU seconds of {len(costs)} tests: {sum(costs.values()):.0f}. The dearest files, and tests:")
        for dearest in (files, collections.Counter(costs)):
            for name, seconds in dearest.most_common(DEAREST // 2):
                write(f"{seconds:8.1f}  {name}")
        if FOLDER in os.environ:
            folder = Path(os.environ[FOLDER])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"costs-{os.getpid()}.json").write_text(json.dumps(costs, indent=0))
