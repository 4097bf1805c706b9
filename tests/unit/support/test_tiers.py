"""What tiers.py leaves out of CI: cases of tests that exist, the same on every worker, and nothing planted."""

import ast
from pathlib import Path

import pytest
from tiers import MOVES, NARROW, STAY, Tiers, left_out

ROOT = Path(__file__).parents[3]
NAMES = [f"tests/unit/test_a.py::test_b[{number}]" for number in range(60)]


def functions_of(path: str) -> dict[str, str]:
    """The tests of a file by name, each with its source."""
    text = (ROOT / path).read_text()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in functions if node.name.startswith("test_")}


@pytest.mark.parametrize("name", STAY)
def test_what_is_left_out_is_a_test_and_plants_nothing(name):
    path, _, function = name.partition("::")
    tests = functions_of(path)
    for test in [function] if function else tests:
        words = (test + tests[test]).lower()
        assert not any(word in words for word in ("plant", "turns_it_red", "turn_it_red", "suite_red"))


def test_what_is_left_to_narrow_vectors_runs_there():
    recipe = (ROOT / "Makefile").read_text().partition("\ntest-cpu:")[2].partition("\n\n")[0]
    assert '-m "not slow or narrow"' in recipe and all(path in recipe.split() for path in NARROW)


@pytest.mark.parametrize("path", MOVES)
def test_what_moves_is_a_test_and_runs_by_cudas_rules(path):
    assert set(MOVES[path]) <= functions_of(path).keys()
    words = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("STREAMED"))
    assert (
        path.removeprefix("tests/dist/test_").removesuffix(".py") in words.replace(",", " ").replace(")", " ").split()
    )


def test_by_cudas_rules_only_what_moves_is_left():
    path, (name, *_) = next(iter(MOVES.items()))
    moves, still = Item(f"{path}::{name}[1]"), Item(f"{path}::test_refused")
    Tiers(streams=True).pytest_collection_modifyitems([moves, still])
    assert moves.marks == [] and still.marks == ["everything"]
    Tiers().pytest_collection_modifyitems([plain := Item(f"{path}::test_refused")])
    assert plain.marks == []


def test_as_many_stay_as_are_asked_for():
    for stay in (0, 1, 7, 60, 61):
        assert len(left_out(NAMES, stay)) == max(0, 60 - stay)
    assert set(left_out(NAMES, 9)) < set(left_out(NAMES, 5)) < set(NAMES)


def test_the_order_of_cases_and_one_more_change_little():
    stay = set(NAMES) - set(left_out(NAMES, 7))
    assert stay == set(NAMES) - set(left_out(NAMES[::-1], 7))
    more = [*NAMES, "tests/unit/test_a.py::test_b[new]"]
    assert len(stay - (set(more) - set(left_out(more, 7)))) <= 1


class Item:
    """A collected test, as far as the plugin looks at it."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, list(marks)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def test_only_slow_cases_are_marked():
    name, stay = next((name, stay) for name, stay in STAY.items() if "::" in name and stay)
    items = [Item(f"{name}[{number}]", "slow") for number in range(stay + 3)]
    quick, other = Item(f"{name}[quick]"), Item("tests/unit/test_a.py::test_b[1]", "slow")
    narrow = Item(f"{NARROW[0]}::test_b[1]", "slow")
    Tiers().pytest_collection_modifyitems([*items, quick, other, narrow])
    assert sum("everything" in item.marks for item in items) == 3
    assert quick.marks == [] and other.marks == ["slow"] and narrow.marks == ["slow", "everything", "narrow"]
