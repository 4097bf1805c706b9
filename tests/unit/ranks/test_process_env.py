"""What a rank sets before torch or the system reads it, and that a user's own value stays."""

import json
import os
import platform
import resource
import subprocess
import sys

import pytest
import torch
from world import losses, run_train, run_world

from shardbook.ranks import launch
from shardbook.ranks.process_env import allocator_default, malloc_defaults, record_in, start_recorder, use_deterministic
from shardbook.recipe import RecipeError

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def limit_of(soft):
    from shardbook.ranks.distributed import start_distributed

    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    start_distributed()
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_rank_may_open_as_many_files_as_the_system_allows():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert run_world(1, limit_of, min(256, hard)) == [(hard, hard)]


def precision_of_products():
    from shardbook.ranks.distributed import start_distributed

    torch.set_float32_matmul_precision("high")  # as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 of a container does
    start_distributed()
    return torch.get_float32_matmul_precision()


def test_products_of_fp32_are_fp32_whatever_the_container_says():
    assert run_world(1, precision_of_products) == ["highest"]


@pytest.mark.parametrize(
    "given, added",
    [
        ({}, EXPANDABLE),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, {}),  # read first: the other would be ignored
        ({"PYTORCH_ALLOC_CONF": ""}, {}),
    ],
)
def test_the_allocators_default(given, added):
    assert allocator_default(given) == added


FAULTS = """
import ctypes, resource, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: one fault a page, whatever the system's default is
large, inside = torch.ones(15 * 2**20), False
for line in open("/proc/self/smaps"):
    first, *more = line.split()
    if "-" in first and first[-1] != ":":
        begin, end = (int(place, 16) for place in first.split("-"))
        inside, heap = begin <= large.data_ptr() < end, "[heap]" in more
    if first == "VmFlags:" and inside:
        print("hg" in more, not heap)
del large

def step():
    held = [torch.ones(2**18) for _ in range(100)]

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**given):
    """Of a step's hundred tensors of 1 MiB, and whether a larger one is on huge pages, and in a mapping of its
    own."""
    clean = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD", "THP"))
    }
    command = [sys.executable, "-c", FAULTS]
    huge, alone, count = subprocess.run(
        command, env=clean | given, stdout=subprocess.PIPE, check=True, timeout=240, text=True
    ).stdout.split()
    return int(count), huge == "True", alone == "True"


PAGES = 100 * 2**20 // resource.getpagesize()  # of those hundred tensors


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variables are glibc's")
def test_a_freed_tensors_pages_are_the_next_ones():
    """And a large tensor leaves no hole in what is kept."""
    assert faults()[1:] == (False, True)  # how many it faults in is not sure: glibc's limit moves
    count, *large = faults(**malloc_defaults({}))
    assert count < PAGES / 10 and large == [True, True]


@pytest.mark.parametrize(
    "given, added",
    [
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, []),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, []),
        # what is not about this is no reason to leave it
        ({"MALLOC_ARENA_MAX": "2", "THP_MEM_ALLOC_ENABLE": "0"}, ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"]),
    ],
)
def test_what_the_user_has_set_of_malloc_stays(given, added):
    assert [*malloc_defaults(given)] == added


@pytest.mark.parametrize("has_driver", [False, True])
def test_a_launcher_tells_malloc_of_ranks_on_a_cpu(has_driver, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_", "THP"))]:
        monkeypatch.delenv(name)
    (tmp_path / "says.py").write_text(
        "import json, os; open(os.environ['OUT'], 'w').write(json.dumps(dict(os.environ)))"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), os.pathsep)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(launch, "has_driver", lambda: has_driver)
    assert launch._run_ranks(1, ["says"], launch.Nodes(), [], []) == 0
    environment = json.loads((tmp_path / "out").read_text())
    wanted = {} if has_driver else malloc_defaults({})
    assert {name: text for name, text in environment.items() if name.startswith(("MALLOC_", "THP"))} == wanted


FRESH = """
import os
from shardbook.ranks.distributed import start_distributed
start_distributed()
print([os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")])
"""


@pytest.mark.parametrize(
    "given, found",
    [
        ({}, [EXPANDABLE["PYTORCH_ALLOC_CONF"], None]),
        pytest.param({"X": "a:1"}, [None, "a:1"], marks=pytest.mark.slow),
    ],
)
def test_a_rank_in_a_fresh_process_sets_the_allocator_itself(given, found):
    """As torchrun and accelerate start it."""
    clean = {name: text for name, text in os.environ.items() if "ALLOC_CONF" not in name}
    clean |= {name.replace("X", "PYTORCH_CUDA_ALLOC_CONF"): text for name, text in given.items()}
    result = subprocess.run([sys.executable, "-c", FRESH], env=clean, capture_output=True, text=True, timeout=240)
    assert result.stdout.splitlines()[-1] == str(found), result.stderr


@pytest.mark.slow
def test_the_launcher_gives_it_to_its_ranks(tmp_path, monkeypatch):
    (tmp_path / "shardbook").mkdir()
    (tmp_path / "shardbook" / "__init__.py").touch()
    program = "import os, pathlib; pathlib.Path('said').write_text(os.environ['PYTORCH_ALLOC_CONF'])"
    (tmp_path / "shardbook" / "train.py").write_text(program)
    code = f"import os, sys; from shardbook.ranks.launch import launch_ranks; os.chdir({str(tmp_path)!r}); "
    code += f"os.environ['PYTHONPATH'] = {str(tmp_path)!r}; sys.exit(launch_ranks(1, []))"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
    assert (tmp_path / "said").read_text() == EXPANDABLE["PYTORCH_ALLOC_CONF"]


def test_the_recorder_of_collectives(tmp_path, monkeypatch):
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    for name in (*names, "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    start_recorder()
    record_in(tmp_path / "hang")
    assert [os.environ.get(name) for name in names] == ["2000", None, "1"]
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "hang" / "collectives-")
    assert (tmp_path / "hang").exists() == torch.cuda.is_available()
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "50")
    start_recorder()
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ


def deterministic(wanted, given):
    os.environ.update(given)
    use_deterministic(wanted)
    return torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")


@pytest.mark.parametrize(
    "wanted, given, found",
    [
        (False, {}, (False, None)),
        (True, {}, (True, ":4096:8")),
        (True, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, (True, ":16:8")),
    ],
)
def test_deterministic_kernels(wanted, given, found):
    assert run_world(1, deterministic, wanted, given) == [found]


def test_a_workspace_that_does_not_repeat_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    with pytest.raises(
        RecipeError, match=r"CUBLAS_WORKSPACE_CONFIG = :4096:2:16:8: cuBLAS repeats its results only with"
    ):
        use_deterministic(True)


@pytest.mark.slow
def test_on_a_cpu_deterministic_kernels_are_those_there_are(recipe):
    plain = run_train(2, recipe, "plain", "train.steps=2")
    same = run_train(2, recipe, "deterministic", "train.steps=2", "train.deterministic=true")
    assert losses(same) == losses(plain) and len(losses(plain)) == 2
