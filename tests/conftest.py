"""Every test runs offline, with caches of its own, and leaves nothing behind."""

import gc
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

# Before anything imports huggingface_hub: it reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="shardbook-tests-")
# A cache of this session's own: torch 2.13 keys compiled graphs by what the CPU has, not by ATEN_CPU_CAPABILITY, and
# what was compiled for another setting then does not even build.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(os.environ["HF_HOME"]) / "inductor")
# One process compiles at a time: else each rank that compiles starts others, which import torch anew.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ["WANDB_BASE_URL"] = "http://127.0.0.1:9"  # a key of the user's, in ~/.netrc, is for another host
os.environ.pop("WANDB_API_KEY", None)
os.environ.pop("WANDB_MODE", None)
# pytest cuts an explanation short but where it believes it is in CI: two files of bytes that differ are then compared
# line by line, which does not end.
os.environ.pop("CI", None)
os.environ.pop("BUILD_NUMBER", None)

import pytest
from budget import TALLY, Budget
from costs import Costs
from tiers import Tiers
from watcher import STACKS, Watcher
from world import STREAMS

# Where each process of a test writes that it is there, its stacks when the watcher asks, and what makes it do so.
os.environ[TALLY] = str(Path(os.environ["HF_HOME"]) / "tally")
Path(os.environ[TALLY]).touch()
os.environ[STACKS] = str(Path(os.environ["HF_HOME"]) / "stacks")
Path(os.environ[STACKS]).mkdir()
listens = str(Path(__file__).parent / "stacks")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [listens, os.environ.get("PYTHONPATH")]))

pytest.register_assert_rewrite("cases")  # before a test imports it


def pytest_addoption(parser):
    parser.addoption(
        "--streams", action="store_true", help="ranks have a CUDA that remembers: tests/support/streams.py"
    )
    parser.addoption("--everything", action="store_true", help="the whole parity matrix, not a covering part of it")


def pytest_configure(config):
    config.pluginmanager.register(Costs())
    config.pluginmanager.register(Budget())
    config.pluginmanager.register(Tiers(config.getoption("streams")))
    if config.getoption("streams"):
        os.environ[STREAMS] = "1"  # before the server is there that ranks are forked from
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # xdist's workers run the tests: this process needs no torch
    config.pluginmanager.register(Watcher())
    gc.disable()  # it would look through all of torch again and again while tests are imported
    import torch

    torch.set_num_threads(1)
    if importlib.util.find_spec("hypothesis"):  # tests/gpu does without: a GPU machine may have little but torch
        from hypothesis import settings

        settings.register_profile("same-every-time", deadline=None, derandomize=True)
        settings.load_profile("same-every-time")


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


def pytest_terminal_summary(terminalreporter):
    def count(outcome: str) -> int:
        reports = terminalreporter.stats.get(outcome, [])
        return sum("a_planted_bug_turns_the_suite_red" in report.nodeid for report in reports)

    if total := count("passed") + count("failed"):
        terminalreporter.write_line(f"planted bugs: {count('passed')} of {total} turned the suite red")


@pytest.fixture(scope="module")
def zygote():
    from zygote import started

    with started() as client:
        yield client


@pytest.fixture
def warm_ranks(zygote, monkeypatch, request):
    """The ranks that a test's launchers start are forks; those of a test marked cold are fresh processes, as are those
    of fixtures of a module, which are there before."""
    if not request.node.get_closest_marker("cold"):
        monkeypatch.setenv("SHARDBOOK_TEST_WARM", zygote)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    from tiny import write_all

    folder = tmp_path_factory.mktemp("tiny")
    write_all(folder)
    return folder


@pytest.fixture(scope="module")
def recipe(tiny, tmp_path_factory, request) -> Path:
    """A tiny recipe in a folder of the test module's own, where its runs go too."""
    from tiny import write_recipe

    return write_recipe(tiny, tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2]))


@pytest.fixture(scope="module")
def wanted(recipe, tiny):
    """What one plain process makes of a case."""
    from cases import reference_of

    return reference_of(recipe, tiny)
