"""Words about versions of torch and transformers: older ones are refused in a line, newer ones are named."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import other_versions
import pytest
from tiny import said_by

import shardbook
from shardbook.cli import main
from shardbook.comm import versions

ROOT = Path(__file__).parents[3]


def installed(monkeypatch, **packages):
    monkeypatch.setattr(versions, "installed_versions", lambda: packages)


@pytest.mark.parametrize(
    ("package", "version", "words"),
    [
        ("torch", "2.10.0", "torch 2.10.0 is older than Shardbook runs on; it is tested with 2.11 to 2.15: "),
        ("torch", "2.9.1+cu128", "torch 2.9.1+cu128 is older than "),
        (
            "transformers",
            "5.16.1",
            "transformers 5.16.1 is older than Shardbook runs on; it is tested with 5.17 to 5.24: ",
        ),
        ("transformers", "4.57.6", "transformers 4.57.6 is older than "),
    ],
)
def test_what_is_too_old_is_refused_in_one_line(package, version, words, monkeypatch, capsys):
    installed(monkeypatch, **{package: version})
    refusal = said_by(versions.check_versions)
    assert refusal.startswith(words)
    assert refusal.endswith(f": pip install --upgrade '{package}>={versions.TESTED[package][0]}'")
    assert main(["plan", "llama8b-fsdp"]) == 2
    assert capsys.readouterr().err == f"shardbook: {refusal}\n"


RANK = """
import importlib.metadata, runpy, sys
importlib.metadata.version = lambda package: {"torch": "2.10.0", "transformers": "5.24.0"}[package]
sys.modules["torch"] = None  # as one whose import fails
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("module", ["shardbook.train", "shardbook.evaluate"])
def test_a_rank_says_so_before_it_imports_torch(tmp_path, module):
    kept = {"SHARDBOOK_EXIT_FILE": str(tmp_path / "exit")}
    ended = subprocess.run([sys.executable, "-c", RANK, module], capture_output=True, text=True, env=os.environ | kept)
    assert (tmp_path / "exit").read_text().split() == ["2"]
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("shardbook: torch 2.10.0 is older than Shardbook runs on")


def test_a_package_without_a_version_is_not_asked(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda package: None)  # of an empty METADATA
    assert versions.installed_versions() == {}
    versions.check_versions()


def test_the_library_says_so_before_it_is_imported(monkeypatch):
    installed(monkeypatch, torch="2.15.0", transformers="4.57.0")
    assert said_by(getattr, shardbook, "plan_module").startswith("transformers 4.57.0 is older than Shardbook runs on")


def test_what_is_newer_is_named(monkeypatch):
    installed(monkeypatch, torch="2.15.1+cu132", transformers="5.24.2")
    assert versions.describe_newer() == ""
    versions.check_versions()
    installed(monkeypatch, torch="2.16.0.dev20261101", transformers="6.0.0")
    versions.check_versions()
    assert versions.describe_newer() == (
        "newer than tested: torch 2.16.0.dev20261101 (tested: 2.11 to 2.15), transformers 6.0.0 (tested: 5.17 to 5.24)"
    )


def test_what_is_asked_of_pip_is_the_oldest_that_is_tested():
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {f"{package}>={oldest}" for package, (oldest, _) in versions.TESTED.items()} <= set(needs)
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    for package, limits in versions.TESTED.items():
        oldest, newest = map(versions.release_of, limits)
        assert oldest <= versions.release_of(pinned[package]) <= newest


def stacks():
    return json.loads(other_versions.DATA.read_text())


def test_the_page_is_made_of_the_data():
    page = other_versions.PAGE.read_text()
    assert page == other_versions.write_page(stacks())
    first, *others = stacks()  # planted: a test that failed
    assert page != other_versions.write_page([first | {"failed": ["unit.comm.test_torch_private::test_x"]}, *others])


def test_both_ends_of_what_is_tested_were_run_and_passed():
    for package, ends in versions.TESTED.items():
        run = [versions.release_of(stack["versions"][package]) for stack in stacks()]
        assert {*map(versions.release_of, ends)} == {min(run), max(run)}
    for stack in stacks():
        assert stack["failed"] == [] and {*stack["suites"]} == {*other_versions.SUITES}
        assert all(passed and not failed for passed, failed, _ in stack["suites"].values())


REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.comm.test_torch_private" name="test_a"/>
<testcase classname="tests.unit.comm.test_torch_private" name="test_b"><failure message="no"/></testcase>
<testcase classname="tests.dist.test_stages" name="test_c[zero3]"><skipped/></testcase>
<testcase classname="" name="tests.unit.model.test_nf4"><error message="no import"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted_by_suite(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    suites, failed = other_versions.read_report(tmp_path / "report.xml")
    assert suites["torch's names"] == [1, 1, 0] and suites["stages"] == [0, 0, 1] and suites["NF4"] == [0, 1, 0]
    assert failed == ["unit.comm.test_torch_private::test_b", "unit.model.test_nf4::tests.unit.model.test_nf4"]


def test_a_stack_takes_the_place_of_the_same_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(other_versions, "DATA", tmp_path / "versions.json")
    monkeypatch.setattr(other_versions, "PAGE", tmp_path / "versions.md")
    suites = {name: [1, 0, 0] for name in other_versions.SUITES}
    for torch, day in (
        ("2.9.1", "2026-01-01"),
        ("2.15.0rc1+cpu", "2026-01-02"),
        ("2.11.0", "2026-01-03"),
        ("2.9.1", "2026-01-04"),
    ):
        numbers = {"torch": torch, "transformers": "5.24.0"}
        other_versions.keep({"versions": numbers, "python": "3.11.7", "day": day, "suites": suites, "failed": []})
    assert [(stack["versions"]["torch"], stack["day"][-1]) for stack in stacks()] == [
        ("2.15.0rc1+cpu", "2"),
        ("2.11.0", "3"),
        ("2.9.1", "4"),
    ]
