"""Costs: the CPU seconds of each test, in its worker, in what it starts and in the ranks that are forked for it.

Invariant: this prints and judges nothing, since a second of a full machine is not one of an idle machine. By what an
earlier run took (costs.json) it chooses the order of files, the dearest first: else the last of them would end
alone, on one core.

python tests/support/costs.py FOLDER    # writes costs.json, from what runs with SHARDBOOK_TEST_COSTS=FOLDER left
"""

import collections
import contextlib
import itertools
import json
import os
import resource
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
from watcher import KEPT, TICKS, stat_of

PROPERTY = "cpu_seconds"
DEAREST = 20
FOLDER = "SHARDBOOK_TEST_COSTS"  # a folder: each run of pytest writes the seconds of its tests there, as JSON
# of each file the seconds of all its tests, and of those that are not slow
KNOWN = Path(__file__).with_name("costs.json")


def cpu_seconds() -> float:
    """Returns what this process, children that it has waited for, and the server of ranks have used, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(each.ru_utime + each.ru_stime for each in used)
    for server in filter(None, (forkserver._forkserver._forkserver_pid, *KEPT)):
        # fields 14 to 17: user and system, then those of children that it has waited for
        with contextlib.suppress(OSError):  # it has ended: whoever needs it will say so
            total += sum(map(int, stat_of(server)[11:15])) / TICKS
    return total


def by_file(costs: dict[str, float]) -> collections.Counter[str]:
    files: collections.Counter[str] = collections.Counter()
    for name, seconds in costs.items():
        files[name.partition("::")[0]] += seconds
    return files


class Costs:
    """The plugin: a worker adds each test's seconds to its last report, from which the controller prints them."""

    def __init__(self) -> None:
        self.before = 0.0  # what was used when the last test ended: what is used between two tests is the second's

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        known = json.loads(KNOWN.read_text())
        items.sort(key=lambda item: -known.get(item.nodeid.partition("::")[0], [0.0])[0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":
            before, self.before = self.before, cpu_seconds()
            report.user_properties.append((PROPERTY, self.before - before))
            report.user_properties.append(("slow", item.get_closest_marker("slow") is not None))
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
        files = by_file(costs)
        write = terminalreporter.write_line
        write(f"CPU seconds of {len(costs)} tests: {sum(costs.values()):.0f}. The dearest files, and tests:")
        for dearest in (files, collections.Counter(costs)):
            for name, seconds in dearest.most_common(DEAREST // 2):
                write(f"{seconds:8.1f}  {name}")
        if FOLDER in os.environ:
            folder = Path(os.environ[FOLDER])
            folder.mkdir(parents=True, exist_ok=True)
            kept = {report.nodeid: [costs[report.nodeid], dict(report.user_properties).get("slow")] for report in ends}
            (folder / f"costs-{os.getpid()}.json").write_text(json.dumps(kept, indent=0))


def main() -> None:
    tests: dict[str, list] = {}
    for kept in sorted(Path(sys.argv[1]).glob("costs-*.json")):
        tests |= json.loads(kept.read_text())
    every = by_file({name: seconds for name, (seconds, _) in tests.items()})
    quick = by_file({name: seconds for name, (seconds, is_slow) in tests.items() if not is_slow})
    known = {name: [round(seconds, 1), round(quick[name], 1)] for name, seconds in every.most_common()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(seconds)}" for name, seconds in known.items())
    KNOWN.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
