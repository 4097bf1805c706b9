"""Which tests make check runs for a change."""

import check
import pytest
from check import CPU_SECONDS, module_of, names_module, select_tests

TEXTS = {
    "tests/unit/model/test_blocks.py": "from shardbook.plan.blocks import (\n    Block,\n    measure,\n)\n",
    "tests/unit/plan/test_plan.py": "import torch\nfrom shardbook.plan import blocks, work\n",
    "tests/dist/test_dear.py": "import shardbook.plan.blocks as plan\n",
    "tests/unit/test_other.py": "from shardbook.plan import work\n# blocks\nfrom shardbook.plan.blocks_of import x\n",
}
COSTS = {"tests/unit/model/test_blocks.py": 3.0, "tests/unit/plan/test_plan.py": 30.0, "tests/dist/test_dear.py": 40.0}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("src/shardbook/plan/blocks.py", "shardbook.plan.blocks"),
        ("src/shardbook/plan/__init__.py", "shardbook.plan"),
        ("src/shardbook/train.py", "shardbook.train"),
    ],
)
def test_a_file_is_a_module(path, name):
    assert module_of(path) == name


def test_an_import_names_a_module_in_each_of_its_forms():
    named = [path for path, text in TEXTS.items() if names_module(text, "shardbook.plan.blocks")]
    assert named == list(COSTS)


def test_cheap_files_come_first_and_what_does_not_fit_is_named():
    changed = ["src/shardbook/plan/blocks.py", "README.md"]
    assert select_tests(changed, TEXTS, COSTS) == (list(COSTS)[:2], [list(COSTS)[2]])
    dear = COSTS | {"tests/unit/plan/test_plan.py": CPU_SECONDS - 3.0}
    assert select_tests(changed, TEXTS, dear)[0] == ["tests/unit/model/test_blocks.py", "tests/dist/test_dear.py"]


def test_a_changed_file_of_tests_runs_however_dear():
    changed = ["src/shardbook/plan/blocks.py", "tests/dist/test_dear.py"]
    chosen, left = select_tests(changed, TEXTS, COSTS | {"tests/dist/test_dear.py": 2 * CPU_SECONDS})
    assert chosen == ["tests/dist/test_dear.py"] and left == list(COSTS)[:2]


def test_where_nothing_is_touched_two_ranks_still_run():
    assert select_tests(["docs/plan.md"], TEXTS, COSTS) == ([], [])
    assert all((check.ROOT / path).exists() for path in check.ALWAYS)
