"""Results of the GPU's tests as lines of JSON, one as a test begins and one as it ends: a session that is cut off says
what ran."""

import json
from pathlib import Path


def pytest_addoption(parser):
    parser.addoption("--lines", type=Path, help="append a line of JSON for each test to this file")


def pytest_configure(config):
    path = config.getoption("lines", None)
    if path and not hasattr(config, "workerinput"):  # the process that deals out tests hears of all results
        config.pluginmanager.register(Lines(path), "lines-of-results")


class Lines:
    def __init__(self, path: Path):
        self.path = path

    def pytest_runtest_logstart(self, nodeid, location):
        self.write({"test": nodeid, "outcome": "begun"})

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.outcome == "passed":
            return
        why = str(report.longrepr)[-6000:] if report.outcome != "passed" else ""
        seconds = round(report.duration, 1)
        self.write({"test": report.nodeid, "outcome": report.outcome, "seconds": seconds, "why": why})

    def write(self, row):
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
