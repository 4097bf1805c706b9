"""Settings of a process that torch or the system reads once: each is made before what reads it.

Invariant: what the user has set stays as it is. Knows nothing of ranks and process groups.
"""

import ctypes
import os
import resource
from collections.abc import Mapping
from pathlib import Path

import torch

from shardbook.recipe import RecipeError

# A variable's names, today's first: torch takes one of them, whichever it reads first, so a default may be written only
# where the user has set none.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the older is read first
RECORDER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
RECORDER_DUMPS = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
RECORDER_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
MALLOC = ("MALLOC_MMAP", "MALLOC_TRIM", "MALLOC_TOP")  # how glibc's own names of these begin
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE = (":4096:8", ":16:8")  # the two with which cuBLAS repeats its results


def raise_descriptors() -> None:
    """Raise this process's limit of open files to what the system allows it: rank 0 holds some three sockets a rank,
    and with the usual 1,024 a run of some 300 ranks ends with "Too many open files"."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def keep_freed_memory() -> None:
    """Have glibc's malloc keep what the main thread frees. For ranks that compute on a CPU: a step makes and frees
    gigabytes, and glibc gives each tensor above 32 MiB, and a large free end of its heap, back to the system, so that
    their pages are faulted in and zeroed anew in each step (docs/benchmarks/log.md). Resident memory stays at its most.

    Other C libraries have no `mallopt`, other allocators ignore it; what the user says to malloc stands.
    """
    library = ctypes.CDLL(None)
    said = any(name.startswith(MALLOC) for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if not said and hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_MAX, 0)
        library.mallopt(M_TRIM_THRESHOLD, -1)  # never: mallopt(3)


def allocator_default(variables: Mapping[str, str]) -> dict[str, str]:
    """What to add to `variables` before CUDA's allocator reads them, which is when the first tensor is put on a device.

    Without it the last chunk of each loss, a size of its own each time, splits blocks that nothing else fits into.
    """
    return _unless_set(variables, ALLOCATOR, "expandable_segments:True")


def start_recorder() -> None:
    """Have NCCL's collectives recorded, and written where one takes longer than its limit. Torch reads this when the
    process group is made."""
    os.environ.update(_unless_set(os.environ, RECORDER_SIZE, "2000") | _unless_set(os.environ, RECORDER_DUMPS, "1"))


def record_in(folder: Path) -> None:
    """Where NCCL's watchdog writes its record: `folder`/collectives-<rank>. Torch reads this when it writes."""
    os.environ.update(_unless_set(os.environ, RECORDER_FILE, str(folder / "collectives-")))
    if torch.cuda.is_available():
        folder.mkdir(exist_ok=True)  # the watchdog would not make it


def use_deterministic(wanted: bool) -> None:
    """Have every kernel of this process give the same bits each time, where `wanted`; before the first one. A kernel
    that cannot raises RuntimeError when reached. RecipeError where the user's CUBLAS_WORKSPACE_CONFIG is against it."""
    if not wanted:
        return
    if os.environ.setdefault(CUBLAS, REPEATABLE[0]) not in REPEATABLE:
        raise RecipeError(
            f"train.deterministic = true and {CUBLAS} = {os.environ[CUBLAS]}: cuBLAS repeats its results only with "
            f"{' or '.join(REPEATABLE)}; unset it, or leave train.deterministic out"
        )
    torch.use_deterministic_algorithms(True)
    # else each gather is first filled with NaN; (mypy does not see it: torch makes it a property of the module)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _unless_set(variables: Mapping[str, str], names: tuple[str, ...], value: str) -> dict[str, str]:
    return {} if any(name in variables for name in names) else {names[0]: value}
