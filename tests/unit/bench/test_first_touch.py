"""`make first-touch`, as far as a CPU can know it: what fails in the middle takes nothing else along, what cannot be
measured is refused in one line, and all of it runs."""

import json
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import first_touch
import gpu
import gpu_facts
import pytest
import torch
from first_touch import Record, measure, table
from gpu_cases import Case, cases_of

SEEN = 'import json, sys; open({out!r}, "w").write(json.dumps({{"step_seconds": 0.5}}))'
CODE = {
    "before": SEEN,
    "hangs": "import subprocess, sys, time; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); "
    "time.sleep(600)",
    "seen, then hangs": SEEN + "; import time; time.sleep(600)",
    "raises": "",
    "crashes": "import os; print('on its way'); os.abort()",
    "out of memory": "import sys; print('x.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.10 GiB. GPU 0'); "
    "sys.exit('shardbook: failed')",
    "after": SEEN,
}


@dataclass(frozen=True)
class Planted(Case):
    """A case that runs a program of its own."""

    kind: str = ""

    @property
    def name(self):
        return self.kind

    def command(self, folder, out, steps):
        if self.kind == "raises":
            raise RuntimeError("cannot be planned")
        return ["-c", CODE[self.kind].format(out=str(out))]


def test_what_hangs_crashes_or_runs_out_of_memory_takes_nothing_along(tmp_path, capsys):
    """Each is named, with its reason; what came before is in the results, what comes after runs, and nothing that it
    started lives on."""
    folder, out = tmp_path / "folder", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    cases = [Planted("tiny", 128, 2, seconds=15 if "hangs" in kind else 60, kind=kind) for kind in CODE]
    gpu.prepare(folder, cases)
    record = Record(out, time.monotonic() + 400, cuda=False)
    written = []
    for case in cases:
        measure(record, ["cases"], [case], folder, "")
        written.append(json.loads((out / "first-touch.json").read_text()))
    assert [[*each] for each in written] == [[*CODE][: number + 1] for number in range(len(CODE))]
    results = written[-1]
    assert results["before"]["tokens_per_second"] == results["after"]["tokens_per_second"] == 2 * 128 / 0.5
    assert results["hangs"]["failed"] == "ended after 15 s"
    assert results["seen, then hangs"]["ended"] == "ended after 15 s"
    assert results["seen, then hangs"]["tokens_per_second"] == 2 * 128 / 0.5  # what the watch has seen is not lost
    assert "cannot be planned" in results["raises"]["failed"]
    assert results["crashes"]["failed"] == "exit code -6: on its way"
    assert results["out of memory"]["failed"] == "out of memory: tried to allocate 2.10 gib"
    log = (out / "log.txt").read_text()
    child = int(log.split("===== hangs\n")[1].split()[0])
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"  # ended, though nobody may have asked for its code
    assert "hangs: failed: ended after 15 s" in capsys.readouterr().out
    last = table(record.results)
    assert "failed: exit code -6" in last and "failed: out of memory" in last


KILLED = """
import sys
sys.path[:0] = {paths}
from gpu import Path, end_of
end_of(["-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"], Path({said!r}), 600, Path("."))
"""


def test_a_part_ends_with_a_call_that_is_killed(tmp_path):
    """Its session is its own, so what kills the call does not reach it, and it would hold the card's memory."""
    said = tmp_path / "said"
    program = KILLED.format(paths=sys.path, said=str(said))
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        while not (said.is_file() and said.read_text().endswith("\n")):
            time.sleep(0.05)
        process.kill()
    state = Path(f"/proc/{int(said.read_text())}/stat")
    until = time.monotonic() + 20
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < until, "it lives on"
        time.sleep(0.05)


def test_time_counts_from_the_start_of_the_process():
    """Imports among it: pytest's own took a part of a second at least."""
    first = first_touch.seconds_since_start()
    time.sleep(0.3)
    assert 0.3 <= first_touch.seconds_since_start() - first < 10 and 0.1 < first < 10**5


def test_the_table_has_25_lines_at_most_and_keeps_what_was_measured():
    parts = {name: {"passed": 3} for name in ("facts", "smoke", "smoke compiled", "tests", "kernels", "attention")}
    cases = {case.name: {"unfinished": "no time was left"} for case in cases_of(cuda=True)}
    measured = [*cases][-1]
    cases[measured] = {"case": {}, "tokens_per_second": 1234.5}
    lines = table(parts | cases).splitlines()
    assert len(lines) == 25 and any(line.startswith(measured) and "1,234" in line for line in lines)


def test_a_case_is_named_whole_or_by_a_word_before_a_star():
    known = cases_of(cuda=True)
    assert [case.name for case in gpu.chosen(known, ["1b 4x4096 packed none"])[0]] == ["1b 4x4096 packed none"]
    assert len(gpu.chosen(known, ["1b 4x4096*"])[0]) > 5
    assert gpu.chosen(known, ["1b 4x4096", "70b*"])[1] == ["1b 4x4096", "70b*"]
    assert gpu.chosen(known, [])[0] == known


def test_what_is_measured_goes_where_the_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu.default_out() == tmp_path / "bench-cpu.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert gpu.default_out() == tmp_path / "nvidia-h200.json"
    monkeypatch.delenv("OUT")
    assert gpu.default_out() == gpu.ROOT / "docs" / "benchmarks" / "nvidia-h200.json"


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_no_gpu_is_one_line_and_nothing_is_written(tmp_path, capfd):
    out = tmp_path / "out"
    assert first_touch.main(["--out", str(out)]) == 2
    said = capfd.readouterr().err.splitlines()
    assert said == ["first-touch: no GPU to measure on: torch sees no CUDA device"] and not out.exists()
    assert first_touch.main(["--cases", "70b", "--out", str(out)]) == 2
    assert "1b 4x4096 packed none" in capfd.readouterr().out and not out.exists()


def test_an_old_driver_and_a_card_that_is_taken_are_one_line_each(monkeypatch):
    def too_old():
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old\n(found version 12020).", stacklevel=1
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    assert gpu_facts.check() == (
        "no GPU to measure on: CUDA initialization: The NVIDIA driver on your system is too old"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * 10**9, 150 * 10**9))
    assert gpu_facts.check() == "GPU 0 has 40.0 GB of its 150.0 free: another program holds the rest"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (149 * 10**9, 150 * 10**9))
    assert gpu_facts.check() == ""


@pytest.mark.slow
def test_all_of_it_runs_without_a_gpu(tmp_path, capsys):
    out = tmp_path / "out"
    case = "tiny 2x128 packed none"
    assert first_touch.main(["--any-device", "--minutes", "20", "--out", str(out), "--cases", case]) == 0
    results = json.loads((out / "first-touch.json").read_text())
    assert [*results] == ["facts", "smoke", "smoke compiled", "tests", case, "kernels", "attention"]
    assert not [name for name, found in results.items() if "failed" in found], results
    assert results["tests"]["passed"] == 1 and results["tests"]["red"] == 0
    begun, row = [json.loads(line) for line in (out / "tests.jsonl").read_text().splitlines()]
    assert begun["outcome"] == "begun" and row["outcome"] == "passed" and row["seconds"] > 0
    assert results[case]["tokens_per_second"] > 0 and results[case]["predicted/memory/peak_bytes"] > 10**5
    assert len(results["kernels"]["rows"]) == 9 and results["attention"]["rows"]
    assert results["smoke"]["train/loss"] == pytest.approx(results["smoke compiled"]["train/loss"], rel=1e-5)
    assert case in capsys.readouterr().out


def test_a_second_call_keeps_what_the_first_one_knew(tmp_path):
    for number, name in enumerate(("first-touch.json", "first-touch-2.json", "first-touch-3.json"), start=1):
        record = Record(tmp_path, time.monotonic() + 60, cuda=False)
        record.add("facts", {"cores": number})
        assert json.loads((tmp_path / name).read_text())["facts"]["cores"] == number
    assert json.loads((tmp_path / "first-touch.json").read_text())["facts"]["cores"] == 1


PLANTED_TESTS = """
import time
def test_passes(): pass
def test_is_red(): assert False
def test_hangs(): time.sleep(600)
"""


def test_tests_that_were_cut_off_are_named_beside_those_that_are_red(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_planted.py").write_text(PLANTED_TESTS)
    (folder / "conftest.py").write_text((gpu.ROOT / "tests" / "gpu" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setitem(first_touch.SECONDS, "tests", 20)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    record = Record(tmp_path, time.monotonic() + 100, cuda=False)
    first_touch.tests(record, tmp_path, "tests/test_planted.py")
    found = json.loads((tmp_path / "first-touch.json").read_text())["tests tests/test_planted.py"]
    assert (found["passed"], found["red"], found["ended"]) == (1, 1, "ended after 20 s")
    assert found["red_tests"] == ["tests/test_planted.py::test_is_red"]
    assert found["cut_off"] == ["tests/test_planted.py::test_hangs"]
    assert "--- did not end: tests/test_planted.py::test_hangs" in capsys.readouterr().out
