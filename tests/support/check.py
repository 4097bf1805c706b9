"""make check: the quick tests that a change touches, and the parity of two ranks, in about a minute.

Chosen are test files that have changed, and those that import a changed module of the package, cheapest first as long
as they fit; what does not fit is named. The matrix of stages on one and two ranks and seven planted bugs always run.

python tests/support/check.py [--since COMMIT] [WORDS FOR PYTEST]
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from costs import KNOWN

ROOT = Path(__file__).parents[2]
CPU_SECONDS = (
    60  # of the files that are chosen, as tests/support/costs.json has them; two cores do as much in half a minute
)
UNKNOWN = 2.0  # of a file that is new
ALWAYS = ["tests/dist/test_stages.py", "tests/dist/test_planted_bugs.py"]
TWO_RANKS = "not test_stages.py or 1x1 or 1x2 or 2x1 or bitwise or mistake or zero_loss"


def changed_files(since: str) -> list[str]:
    """The paths that differ from `since`, those that git does not know yet among them."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    return sorted({*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")})


def module_of(path: str) -> str:
    """The dotted name of a file below src/: that of its folder for an __init__.py."""
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def names_module(text: str, module: str) -> bool:
    """Whether a file of tests imports `module`, by itself or from its package."""
    package, _, name = module.rpartition(".")
    names = rf"from {re.escape(package)} import (\([^)]*|[^\n]*)\b{re.escape(name)}\b" if package else r"(?!)"
    return re.search(rf"(import|from) {re.escape(module)}\b|{names}", text) is not None


def select_tests(changed: list[str], texts: dict[str, str], costs: dict[str, float]) -> tuple[list[str], list[str]]:
    """Returns the files of tests that run, and those that a change touches and that do not fit. `texts`: of all files
    of tests by path; `costs`: the CPU seconds of their quick tests."""
    modules = [module_of(path) for path in changed if path.startswith("src/") and path.endswith(".py")]
    touched = [path for path in texts if path in changed or any(names_module(texts[path], each) for each in modules)]
    chosen, left, room = [], [], CPU_SECONDS
    # what was edited itself first, then as many as fit
    for path in sorted(touched, key=lambda path: (path not in changed, costs.get(path, UNKNOWN), path)):
        room -= (cost := costs.get(path, UNKNOWN))
        if path in changed or room >= 0:
            chosen.append(path)
        else:
            left.append(path)
            room += cost
    return chosen, left


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--since", default="HEAD", help="the commit that a change began at")
    asked, words = parser.parse_known_args()
    texts = {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in ("recipes", "unit", "e2e", "dist")
        for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))
    }
    costs = {path: quick for path, (_, quick) in json.loads(KNOWN.read_text()).items()}
    chosen, left = select_tests(changed_files(asked.since), texts, costs)
    print(f"make check: {' '.join(chosen) or 'no file of tests is touched'}; and {' '.join(ALWAYS)} on two ranks")
    if left:
        print(f"make check: touched too, and left to make test: {' '.join(left)}")
    files = list(dict.fromkeys([*chosen, *ALWAYS]))
    pytest = [sys.executable, "-m", "pytest", "-n", "2", "--max-worker-restart", "0", "--dist", "loadfile"]
    os.execv(sys.executable, [*pytest, "-k", TWO_RANKS, *words, *files])


if __name__ == "__main__":
    main()
