"""Runs the tests that notice another torch or transformers with those of this interpreter; keeps what they gave, as
data and as a page.

`make test-newest` runs it where the newest versions of everything are, with OLDEST=1 where the oldest torch and
transformers are. It writes docs/versions.json and docs/versions.md; tests/unit/comm/test_versions.py holds them.
"""

import collections
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs" / "versions.json", ROOT / "docs" / "versions.md"
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "pydantic")
SUITES = {  # by what it asks of the libraries: files of tests
    "torch's names": ["unit/comm/test_torch_private.py", "unit/model/test_flash.py"],
    "families": [
        "unit/model/test_selfcheck.py",
        "unit/model/test_causal_lm.py",
        "unit/model/test_families.py",
        "unit/model/test_expert_products.py",
    ],
    "files": ["unit/model/test_file_names.py", "unit/model/test_weights.py", "unit/model/test_adapter_files.py"],
    "samples": ["unit/model/test_comparisons.py", "dist/test_generate.py"],
    "plans": ["unit/plan/test_simulate.py", "unit/plan/test_peak.py", "dist/test_peak_steps.py"],
    "NF4": ["unit/model/test_nf4.py", "dist/test_qlora.py"],
    "stages": ["dist/test_stages.py", "dist/test_zeropp.py"],
    "axes": ["dist/test_tensor.py", "dist/test_context.py", "dist/test_pipeline.py", "dist/test_experts.py"],
    "LoRA, offload, recompute": ["dist/test_lora.py", "dist/test_offload.py", "unit/memory/test_activation.py"],
    "a plain run": ["e2e/test_plain_run.py"],
}
# A warning that speaks of a change is an error, but for those of libraries that call each other.
CHANGES = ("FutureWarning",)
OF_OTHERS = ("`is_gradient_checkpointing` is deprecated",)  # peft 0.21 calls it


def run_suites(report: Path) -> int:
    """Runs all suites, and has pytest write `report`. Returns its exit code."""
    files = [str(ROOT / "tests" / file) for suite in SUITES.values() for file in suite]
    warned = [f"error::{kind}" for kind in CHANGES] + [f"ignore:{words}" for words in OF_OTHERS]
    side_by_side = ["-n", str(min((os.cpu_count() or 1) + 1, 8)), "--max-worker-restart", "0"]
    command = [sys.executable, "-m", "pytest", *side_by_side, "--dist", "loadfile", f"--junitxml={report}", *files]
    command += ["-m", "not slow or newest"] + [word for each in warned for word in ("-W", each)]
    ranks = {"PYTHONWARNINGS": ",".join(warned), "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, cwd=ROOT, env=os.environ | ranks).returncode


def read_report(report: Path) -> tuple[dict[str, list[int]], list[str]]:
    """Returns, by suite, how many tests passed, failed and were skipped; and the names of those that failed."""
    suite_of = {file.removesuffix(".py").replace("/", "."): name for name, files in SUITES.items() for file in files}
    counts, failed = collections.defaultdict(lambda: [0, 0, 0]), list[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        module = (case.get("classname") or case.get("name") or "").removeprefix("tests.")
        name = next(name for file, name in suite_of.items() if f"{module}.".startswith(f"{file}."))
        outcome = 2 if case.find("skipped") is not None else 0
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = 1
            failed.append(f"{module}::{case.get('name')}")
        counts[name][outcome] += 1
    return {name: counts[name] for name in SUITES}, failed


def write_page(stacks: list[dict]) -> str:
    """Returns the page of what was run with which versions, the newest first."""
    lines = [
        "# What is tested with which versions",
        "",
        "Each change is tested with the versions in `constraints.txt`: what CI runs, on CPU ranks. Beside them",
        "`make test-newest` makes an environment of the newest versions of everything in `.venv/newest`, and",
        "`make test-newest OLDEST=1` one of the oldest torch and transformers in `.venv/oldest`; it runs there what",
        "would notice, in some fifteen minutes, and writes this page. A FutureWarning is an error in them. An older",
        "torch or transformers is refused in one line; of a newer one a run says at its start that it is not tested.",
        "No GPU is used.",
        "",
        "| torch | transformers | Python | others | day | tests that passed |",
        "|---|---|---|---|---|---|",
    ]
    for stack in stacks:
        of = stack["versions"]
        others = ", ".join(f"{name} {number}" for name, number in of.items() if name not in ("torch", "transformers"))
        passed, failed, skipped = (sum(column) for column in zip(*stack["suites"].values(), strict=True))
        words = f"{passed:,} of {passed + failed:,}" + f", {skipped} skipped" * (skipped > 0)
        line = (of["torch"], of["transformers"], stack["python"], others, stack["day"], words)
        lines.append(f"| {' | '.join(line)} |")
    lines += ["", "By what they ask of the libraries (passed, of those that ran):", ""]
    names = [
        f"torch {stack['versions']['torch']}, transformers {stack['versions']['transformers']}" for stack in stacks
    ]
    lines += [f"| | {' | '.join(names)} |", "|---" * (len(stacks) + 1) + "|"]
    for suite in SUITES:
        cells = [f"{of[0]} of {of[0] + of[1]}" for of in (stack["suites"].get(suite, [0, 0, 0]) for stack in stacks)]
        lines.append(f"| {suite} | {' | '.join(cells)} |")
    if any(stack["failed"] for stack in stacks):
        lines += ["", "What failed:", ""]
        lines += [f"- {name}: `{test}`" for name, stack in zip(names, stacks, strict=True) for test in stack["failed"]]
    return "\n".join(lines) + "\n"


def keep(stack: dict) -> None:
    """Puts what a stack of versions gave into the data, in place of what the same versions gave before."""
    before = json.loads(DATA.read_text()) if DATA.is_file() else []
    same = [stack["python"], stack["versions"]["torch"], stack["versions"]["transformers"]]
    kept = [each for each in before if [each["python"], *list(each["versions"].values())[:2]] != same]

    def newest_first(each: dict) -> list[list[int]]:
        numbers = (each["versions"]["torch"], each["versions"]["transformers"], each["python"])
        return [[int(part) for part in re.findall(r"\d+", number.partition("+")[0])] for number in numbers]

    stacks = sorted([*kept, stack], key=newest_first, reverse=True)
    DATA.write_text(json.dumps(stacks, indent=1) + "\n")
    PAGE.write_text(write_page(stacks))


def main() -> int:
    """Runs the suites, and keeps what they gave. Returns the exit code."""
    versions = {package: version(package) for package in PACKAGES}
    print("with", ", ".join(f"{package} {number}" for package, number in versions.items()), flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = run_suites(report)
        if code not in (0, 1) or not report.is_file():  # interrupted, or nothing was collected
            print("test-newest: pytest did not run to its end; nothing is kept", file=sys.stderr)
            return code or 1
        suites, failed = read_report(report)
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    keep({"versions": versions, "python": platform.python_version(), "day": day, "suites": suites, "failed": failed})
    print(f"{time.monotonic() - began:.0f} s; written: {DATA.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
