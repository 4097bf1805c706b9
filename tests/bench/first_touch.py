"""The first minutes on a GPU that may be gone afterwards: facts of the machine, two short runs, the tests of tests/gpu
side by side, the bench's cases in order of value, kernels beside a copy.

Each part is a group of processes with a limit of its own: one that fails, or runs over, is named, and the next begins.
What is known is written after each part to the folder that --out or the variable OUT names: `first-touch.json` (of a
second call `first-touch-2.json`), `tests.jsonl` (lines of tests, as they begin and end), `log.txt` (the end of what
each part printed). A table comes last.

    make first-touch BIN=folder                                     # nine minutes
    make first-touch BIN=folder ARGS='--minutes 3 --parts cases --cases "moe 1x8192 packed full"'
    make first-touch BIN=folder ARGS='--minutes 2 --parts tests --tests "-k packed"'
    make first-touch ARGS=--any-device                              # without a GPU: that all of it runs
"""

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gpu
from gpu_cases import Case, cases_of, rehearsed

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PARTS = ("facts", "smoke", "tests", "cases", "kernels", "attention")
SECONDS = {"facts": 60, "smoke": 90, "tests": 200, "kernels": 90, "attention": 100}
FIRST_CASES = 2  # before the kernels; the others come after them, for as long as the time suffices
TABLE_LINES = 25
CHECK_SECONDS = 90  # torch comes from a cold disk
LOG_BYTES = 60_000
TINY_TESTS = "tests/gpu/test_moves_cuda.py --streams -k 'inputs_that_leave and full'"  # what goes without a GPU


@dataclass
class Record:
    """What is known so far, by part; written anew after each."""

    folder: Path
    deadline: float
    cuda: bool
    results: dict[str, dict] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    file: Path = field(init=False)

    def __post_init__(self):
        names = itertools.chain(["first-touch.json"], (f"first-touch-{number}.json" for number in itertools.count(2)))
        self.file = next(self.folder / name for name in names if not (self.folder / name).exists())

    def left(self, most: float) -> float:
        return min(most, self.deadline - time.monotonic() - 2)

    def add(self, name: str, found: dict, printed: str = "") -> None:
        self.results[name] = found | {"ended_after_seconds": round(time.monotonic() - self.began)}
        part = self.file.with_suffix(".partial")
        part.write_text(json.dumps(self.results, indent=1) + "\n")
        part.replace(self.file)
        with (self.folder / "log.txt").open("a") as log:
            log.write(f"\n===== {name}\n{printed[-LOG_BYTES:]}\n")
        print(f"[{time.monotonic() - self.began:4.0f} s] {name}: {line_of(self.results[name])}", flush=True)


def line_of(found: dict) -> str:
    """One line: why there are no figures, else the figures and short words."""
    for kind in gpu.WITHOUT_FIGURES:
        if kind in found:
            return f"{kind.replace('_', ' ')}: {found[kind]}"
    words = [f"{key} {value:.4g}" for key, value in found.items() if isinstance(value, float)]
    words += [f"{key} {value}" for key, value in found.items() if isinstance(value, int | str) and len(str(value)) < 60]
    return ", ".join(words)[:300]


def run(folder: Path, command: list[str], seconds: float, **variables: str) -> tuple[dict, str]:
    """Runs a part with this interpreter. Returns `failed` with the reason, or nothing; and what it printed."""
    printed = folder / "printed.txt"
    code = gpu.end_of(command, printed, max(1.0, seconds), folder, **variables)
    text = printed.read_text(errors="replace")
    if code is None:
        return {"failed": f"ended after {seconds:.0f} s"}, text
    return ({"failed": gpu.reason(text, code)} if code else {}), text


def facts(record: Record, folder: Path) -> None:
    failed, text = run(folder, [str(HERE / "gpu_facts.py")], record.left(SECONDS["facts"]))
    record.add("facts", (gpu.rows_in(text) or [{}])[-1] | failed, text)


def smoke(record: Record, folder: Path) -> bool:
    """Three steps of the tiny shape through the package's own way in, as it is and compiled: where what is broken for
    everyone shows. Returns whether one of the two went."""
    went, until = False, time.monotonic() + record.left(SECONDS["smoke"] * (1 if record.cuda else 3))
    for name, compiled in (("smoke", False), ("smoke compiled", True)):
        case = Case("tiny", 128, 2, compiled=compiled)
        more = ["train.steps=3", "train.logging_steps=1", f"run.name={name.replace(' ', '-')}"]
        command = ["-m", "shardbook.train", f"{folder}/bench.toml", *case.overrides(folder), *more]
        seconds = max(1.0, until - time.monotonic()) * (0.5 if name == "smoke" else 1)
        failed, text = run(folder, command, seconds)
        found = gpu.logged(folder / "runs" / name.replace(" ", "-"), 3 + gpu.PROFILED_STEPS + 1)
        if failed:
            print(*text.splitlines()[-25:], sep="\n", flush=True)
        record.add(name, found | failed, text)
        went |= not failed
    return went


def tests(record: Record, folder: Path, words: str) -> None:
    """pytest over tests/gpu; of what is red the reasons are printed, of six at most."""
    lines = record.folder / "tests.jsonl"
    before = len(lines.read_text().splitlines()) if lines.exists() else 0
    workers = min(8, os.cpu_count() or 1)
    given = shlex.split(words) if record.cuda else shlex.split(words or TINY_TESTS)
    paths = [] if any(word.startswith("tests/") for word in given) else ["tests/gpu"]
    command = ["-m", "pytest", *paths, "-p", "no:cacheprovider", "--lines", str(lines), *given]
    if record.cuda:
        command += ["-n", str(workers), "--dist", "worksteal"]
    seconds = record.left(SECONDS["tests"])
    failed, text = run(folder, command, seconds, TORCHINDUCTOR_COMPILE_THREADS="2")
    rows = gpu.rows_in("\n".join(lines.read_text().splitlines()[before:])) if lines.exists() else []
    found: dict = {kind: sum(row["outcome"] == kind for row in rows) for kind in ("passed", "failed", "skipped")}
    found["red"] = found.pop("failed")
    if failed:  # also where some are red: a session that was cut off is no whole one
        found["ended"] = failed["failed"]
    found["red_tests"] = [row["test"] for row in rows if row["outcome"] == "failed"]
    whole = {row["test"] for row in rows if row["outcome"] != "begun"}
    found["cut_off"] = [row["test"] for row in rows if row["outcome"] == "begun" and row["test"] not in whole]
    slowest = sorted((row for row in rows if row["outcome"] != "begun"), key=lambda row: -row["seconds"])[:5]
    found["slowest"] = [f"{row['seconds']:.0f} s {row['test']}" for row in slowest]
    if not whole:
        found |= failed
    record.add(f"tests {words}".strip(), found, text)
    print(*(f"--- did not end: {test}" for test in found["cut_off"][:6]), sep="\n", end="\n" * bool(found["cut_off"]))
    for row in [row for row in rows if row["outcome"] == "failed"][:6]:
        print(f"--- {row['test']}\n{row['why'][-700:]}", flush=True)


def case(record: Record, chosen: Case, folder: Path) -> None:
    name = chosen.name
    if record.left(chosen.seconds) < gpu.LEAST_SECONDS and record.cuda:
        record.add(name, {"unfinished": "no time was left"})
        return
    memory = record.results.get("facts", {}).get("memory_bytes")
    if why := gpu.left_out(chosen, folder, "cuda" if record.cuda else "cpu", memory):
        record.add(name, {"left_out": why})
        return
    steps = gpu.STEPS if record.cuda else gpu.TINY_STEPS
    began = time.monotonic()
    found = gpu.run_case(chosen, folder, steps, record.left(chosen.seconds))
    record.add(
        name,
        found | {"wall_seconds": round(time.monotonic() - began)},
        (folder / "said.txt").read_text(errors="replace"),
    )


def kernels(record: Record, folder: Path) -> None:
    failed, text = run(folder, [str(HERE / "gpu_kernels.py")], record.left(SECONDS["kernels"]))
    rows = gpu.rows_in(text)
    titles = [
        " ".join(str(row[key]) for key in ("what", "bits", "double_quant") if key in row).replace("True", "doubly")
        for row in rows
    ]
    words = {
        title.replace(" False", ""): f"{row['seconds'] * 1e3:.2f} ms, {row['of_copy_bandwidth']:.2f} of a copy"
        for title, row in zip(titles, rows, strict=True)
    }
    record.add("kernels", words | {"rows": rows} | failed, text)


def attention(record: Record, folder: Path) -> None:
    failed, text = run(folder, [str(HERE / "attention_kernels.py")], record.left(SECONDS["attention"]))
    record.add("attention", {"rows": gpu.rows_in(text)} | failed, text)


def table(results: dict[str, dict]) -> str:
    """At most TABLE_LINES lines: the cases' figures, and a line for each other part."""
    cases = {name: row for name, row in results.items() if "case" in row or set(gpu.WITHOUT_FIGURES) & row.keys()}
    others = [f"{name}: {line_of(row)[:200]}" for name, row in results.items() if name not in cases]
    room = TABLE_LINES - len(others) - 1
    measured = dict(sorted(cases.items(), key=lambda item: "case" not in item[1])[:room])
    return "\n".join([*others, *(gpu.table(measured).splitlines() if measured else [])])


def refuse() -> int:
    """Says in one line why nothing can be measured here; 0: it can. Asked in another process: a context of this one
    would take memory of the card for as long as it measures."""
    check = [sys.executable, str(HERE / "gpu_facts.py"), "--check"]
    try:
        done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"first-touch: the driver did not answer in {CHECK_SECONDS} s", file=sys.stderr)
        return 2
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        print(f"first-touch: {lines[-1] if lines else 'torch does not start'}", file=sys.stderr)
    return 2 if done.returncode else 0


def seconds_since_start() -> float:
    """How long this process runs by now: a cold torch takes up to a minute to import, twice, and a call has a limit."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # starttime: proc_pid_stat(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def main(words: list[str] | None = None, spent: float = 0.0) -> int:
    """Measures, in --minutes of which so many seconds are `spent`; the exit code."""
    began = time.monotonic() - spent
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--cases", nargs="*", default=[], help="by name, or a word with a * at its end; none: in order")
    parser.add_argument("--tests", default="", help="words for pytest, in place of all of tests/gpu")
    parser.add_argument(
        "--any-device", action="store_true", help="without a GPU: a tiny shape, one test by the stand-in"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "runs" / "first-touch"))
    asked = parser.parse_args(words)
    known = rehearsed() if asked.any_device else cases_of(cuda=True)
    cases, unknown = gpu.chosen(known, asked.cases)
    if unknown:
        print(f"--cases {unknown}: no case; there are", *(each.name for each in known), sep="\n  ")
        return 2
    if not asked.any_device and (code := refuse()):
        return code
    asked.out.mkdir(parents=True, exist_ok=True)
    record = Record(asked.out.resolve(), began + 60 * asked.minutes, not asked.any_device)
    with tempfile.TemporaryDirectory(prefix="first-touch-") as temporary:
        folder = Path(temporary)
        gpu.prepare(folder, [*cases, Case("tiny", 128, 2)])
        measure(record, asked.parts, cases, folder, asked.tests)
    print("\n" + table(record.results))
    return 0


def measure(record: Record, parts: list[str], cases: list[Case], folder: Path, words: str) -> None:
    """Runs the parts in order. Without a run that goes through, no case is begun; the tests are."""
    goes = True
    if "facts" in parts:
        guarded(record, "facts", facts, record, folder)
    if "smoke" in parts:
        goes = bool(guarded(record, "smoke", smoke, record, folder))
    if "tests" in parts:
        guarded(record, "tests", tests, record, folder, words)
    later: list[tuple] = [(each.name, case, record, each, folder) for each in cases if "cases" in parts and goes]
    if "kernels" in parts:
        later.insert(FIRST_CASES, ("kernels", kernels, record, folder))
    if "attention" in parts:
        later.append(("attention", attention, record, folder))
    for part in later:
        if record.left(1e9) > 0:
            guarded(record, *part)


def guarded(record: Record, name: str, part: Callable, *given: object) -> object:
    """What `part` returns; where it raises, that is its result, and the next part begins."""
    try:
        return part(*given)
    except Exception as error:  # whatever a machine that nobody has seen makes of it
        record.add(name, {"failed": f"{type(error).__name__}: {error}"[:300]}, traceback.format_exc())
        return None


if __name__ == "__main__":
    gpu.end_with_parts()
    sys.exit(main(spent=seconds_since_start()))
