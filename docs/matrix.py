"""The matrix of capabilities that go together, which `python docs/build.py matrix` writes into docs/matrix.md.

Invariant: a cell is the answer of the rules (refusals.py) to a recipe that asks for both; nothing here decides.
"""

import tomllib
from itertools import combinations
from pathlib import Path
from textwrap import fill
from typing import Any

from shardbook.recipe import Conflict, Recipe, Train, conflicts, with_settings
from shardbook.recipe.refusals import APART

CAPABILITIES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("capabilities.toml").read_text())
NEEDS = {name: settings.pop("needs", {}) for name, settings in CAPABILITIES.items()}
WIDTH = 110  # of a line, so that a terminal and a page show it whole


def find_cells() -> dict[tuple[str, str], list[Conflict]]:
    """Returns the conflicts of each pair of capabilities that are not values of one key."""
    recipe, found = Recipe(train=Train(steps=1)), {}
    for one, other in combinations(CAPABILITIES, 2):
        if CAPABILITIES[one].keys() != CAPABILITIES[other].keys():
            both = NEEDS[one] | NEEDS[other] | CAPABILITIES[one] | CAPABILITIES[other]
            found[one, other] = conflicts(with_settings(recipe, both))
    return found


def write_matrix() -> str:
    """Returns the table, a row and a column of the same number for each capability, and the conflicts' reasons."""
    cells, names = find_cells(), list(CAPABILITIES)
    left = max(map(len, names)) + 5
    lines = [" " * left + " ".join(f"{at:2}"[digit] for at in range(1, len(names))).rstrip() for digit in (0, 1)]
    for at, name in enumerate(names):
        marks = ("." if (pair := (other, name)) not in cells else "-" if cells[pair] else " " for other in names[:at])
        lines.append(f"{at + 1:2} {name:<{left - 3}}{' '.join(marks)}".rstrip())
    lines += ["", "empty: they go together; -: refused, see below; .: values of one key", ""]
    return "\n".join(lines + [fill(line, WIDTH, subsequent_indent="  ") for line in describe_reasons(cells)])


def describe_reasons(cells: dict[tuple[str, str], list[Conflict]]) -> list[str]:
    """Returns a line for each reason of the cells: the capabilities that it keeps apart, the reason, the way out."""
    apart: dict[str, dict[str, list[str]]] = {}
    for (one, other), found in cells.items():
        for conflict in found:
            why = conflict.rule.why.replace("{stage.name}", "the stage").removeprefix(APART)
            said = "; ".join(filter(None, (why, conflict.way_out)))
            apart.setdefault(said, {}).setdefault(one, []).append(other)
    lines = []
    for said, pairs in apart.items():
        grouped: dict[str, list[str]] = {}
        for one, others in pairs.items():
            grouped.setdefault(", ".join(others), []).append(one)
        lines.append(" / ".join(f"{', '.join(ones)} with {others}" for others, ones in grouped.items()) + f": {said}")
    return lines
