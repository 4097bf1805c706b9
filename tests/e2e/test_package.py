"""The wheel in an environment of its own, far from a checkout: what a `pip install` gives. And the wheel's metadata."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from world import metrics

from shardbook import __version__

ROOT = Path(__file__).parents[2]


def load_hook():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("remote", "home"),
    {
        "git@example.org:team/book.git": "https://example.org/team/book",
        "https://someone:secret@example.org/team/book.git": "https://example.org/team/book",
        "ssh://git@example.org:2222/team/book": "https://example.org/team/book",
        "/srv/git/book.git": None,
        "": None,
    }.items(),
)
def test_the_addresses_are_those_of_the_repository(remote, home):
    urls = load_hook().addresses(remote)
    assert urls.get("Source") == home and all(url.startswith(home) for url in urls.values())
    assert set(urls) == ({"Source", "Documentation", "Issues", "Changelog"} if home else set())


def call(*command, where, environment=None):
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    call(*pip, "-w", out, ROOT, where=out, environment=os.environ | {"GITHUB_REPOSITORY": "team/book"})
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_metadata_is_complete_and_every_file_is_there(wheel):
    with ZipFile(wheel) as packed:
        names = {name.partition("/")[2] for name in packed.namelist() if name.startswith("shardbook/")}
        facts = Parser().parsestr(packed.read(f"shardbook-{__version__}.dist-info/METADATA").decode())
    source = ROOT / "src" / "shardbook"
    ours = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and "__pyc" not in str(path)}
    assert names == ours | {f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")}
    assert facts["Version"] == __version__ and facts["License-Expression"] == "Apache-2.0" and facts["Keywords"]
    assert {line.partition(",")[0] for line in facts.get_all("Project-URL")} >= {"Source", "Documentation", "Issues"}
    assert {"demo", "8bit", "4bit"} <= set(facts.get_all("Provides-Extra"))
    assert "Programming Language :: Python :: 3.11" in facts.get_all("Classifier")


@pytest.mark.slow
def test_an_empty_environment_trains_far_from_a_checkout(wheel, tmp_path):
    """The wheel alone is installed; what it needs is reached where the tests have it, behind the environment's own."""
    there, here = tmp_path / "environment", tmp_path / "empty"
    here.mkdir()
    venv.create(there)
    call(
        sys.executable,
        "-m",
        "pip",
        "--python",
        there,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        where=here,
    )
    (own,) = (there / "lib").glob("python*/site-packages")
    (own / "needs.pth").write_text(sysconfig.get_paths()["purelib"])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def shardbook(*words):
        return call(there / "bin" / "shardbook", *words, where=here, environment=environment)

    assert shardbook("--version") == f"shardbook {__version__}\n"
    at = call(
        there / "bin" / "python",
        "-c",
        "import shardbook; print(shardbook.__file__)",
        where=here,
        environment=environment,
    )
    assert at.strip() == str(own / "shardbook" / "__init__.py")
    assert {line.split()[0] for line in shardbook("recipes").splitlines()} == {
        p.stem for p in (ROOT / "recipes").glob("*.toml")
    }
    small = ("train.steps=2", "train.per_device_train_batch_size=1", "data.max_length=64", "data.eval_size=0.002")
    said = shardbook("train", "smollm2-135m-fsdp", *small, "run.name=first")
    assert "done     2 steps" in said
    assert [row["step"] for row in metrics(here / "runs" / "first")] == [0, 1, 2]
    assert (here / "runs" / "first" / "export" / "model.safetensors").exists()
    assert "mine.toml" in shardbook("init", "mine") and sorted(p.name for p in here.iterdir()) == ["mine.toml", "runs"]
    assert "zero3" in shardbook("train", "mine.toml", "--dry-run")
    assert "report.html" in shardbook("report", "runs/first")
