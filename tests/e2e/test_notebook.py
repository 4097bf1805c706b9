"""The notebook of a first run: it is valid, its recipes load, and run cell by cell it shows what it promises."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from shardbook.recipe import find_recipe, load_recipe

ROOT = Path(__file__).parents[2]
NOTEBOOK = nbformat.read(ROOT / "docs" / "first-run.ipynb", as_version=4)
CODE = [cell.source for cell in NOTEBOOK.cells if cell.cell_type == "code"]


def test_the_notebook_is_valid_and_its_recipes_load():
    nbformat.validate(NOTEBOOK)
    commands = [shlex.split(source[1:].replace("\\\n", "")) for source in CODE if source.startswith("!")]
    assert [words[:2] for words in commands] == [["shardbook", name] for name in ("plan", "train", "compare")]
    for words in commands[1:]:
        load_recipe(find_recipe(words[2]), [word for word in words[3:] if re.match(r"[a-z]+\.\w+=", word)])
    assert max(len(line) for source in CODE for line in source.splitlines()) <= 120


def execute(source, names):
    """Runs one cell as a notebook does: `!` starts a command in the current folder, anything else is Python."""
    if not source.startswith("!"):
        exec(compile(source, "<cell>", "exec"), names)
        return
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(source[1:], shell=True, capture_output=True, text=True, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr
    print(done.stdout)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for source in CODE:
        execute(source, names)
    said = capsys.readouterr().out
    before, after = map(float, re.search(r"held-out loss (\S+) -> (\S+)", said).groups())
    assert after < before - 0.3
    ((ddp, kept), (zero3, half)) = re.findall(r"^(?:ddp|zero3) +loss (\S+)  kept by a rank (\S+) MB", said, re.M)
    assert ddp == zero3
    assert float(half.replace(",", "")) / float(kept.replace(",", "")) == pytest.approx(0.5, abs=1e-3)
    assert re.findall(r"counted .*: (True|False)$", said, re.M) == ["True"] * 6
    assert len(re.findall(r"^\S.*\?\n  \S", said, re.M)) == 2  # two questions, two answers
