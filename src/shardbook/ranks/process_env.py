"""Settings of a process that torch or the system reads once: each is made before it is read.

Invariant: a setting of the user's stays as it is, but for TF32, which changes numbers. Knows nothing of ranks and
process groups.
"""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from shardbook.recipe import RecipeError

# Each variable's names, today's first. torch uses whichever it reads first, so a default is written only where the user
# has set none of them.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the older is read first
RECORDER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
RECORDER_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
MALLOC = ("MALLOC_MMAP", "MALLOC_TRIM", "MALLOC_TOP")  # the beginnings of glibc's own variables
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE = (":4096:8", ":16:8")  # only with these two are cuBLAS's results reproducible


def raise_descriptors() -> None:
    """Raises this process's limit of open files to the system's: rank 0 holds some three sockets a rank, and with the
    usual 1,024 a run of some 300 ranks ends with "Too many open files"."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def malloc_defaults(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to add to those of a rank that computes on a CPU, before it starts: glibc's malloc keeps
    what the main thread frees below 32 MiB, and torch puts larger tensors on huge pages. A step makes and frees
    gigabytes, and pages that go back to the system are faulted in and zeroed again (docs/benchmarks/log.md). Larger
    tensors, kept, would leave holes that the next of their size does not fit in, since torch asks for aligned memory.
    """
    if any(name.startswith(MALLOC) for name in variables) or "glibc.malloc" in variables.get("GLIBC_TUNABLES", ""):
        return {}
    kept = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**40)}  # the largest; never
    return kept | _unless_set(variables, ("THP_MEM_ALLOC_ENABLE",), "1")


def allocator_default(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to add to `variables` before CUDA's allocator reads them, at the first tensor on a device.

    Without it the last chunk of each loss, whose size is new each time, splits blocks into parts that fit nothing else.
    """
    return _unless_set(variables, ALLOCATOR, "expandable_segments:True")


def forbid_tf32() -> None:
    """Makes products of fp32 matrices fp32 products. Containers of NVIDIA turn TF32 on by a variable, under which a
    product keeps 11 bits: angles of rotary positions, which transformers 5.17 computes by a product, would be wrong
    beyond position 2,048, and a run with `precision.params = "fp32"` would not be one."""
    import torch  # here, since a launcher does without

    torch.set_float32_matmul_precision("highest")


def start_recorder() -> None:
    """Turns on NCCL's flight recorder, which is written where a collective takes longer than its limit. Torch reads the
    setting when the process group is made."""
    os.environ.update(_unless_set(os.environ, RECORDER_SIZE, "2000"))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def record_in(folder: Path) -> None:
    """Makes NCCL's watchdog write its record to `folder`/collectives-<rank>. Torch reads the setting when it writes."""
    os.environ.update(_unless_set(os.environ, RECORDER_FILE, str(folder / "collectives-")))
    import torch  # here, since a launcher does without

    if torch.cuda.is_available():
        folder.mkdir(exist_ok=True)  # the watchdog would not make it


def use_deterministic(wanted: bool) -> None:
    """Makes every kernel of this process deterministic, where `wanted`; call it before the first. A kernel that cannot
    be raises RuntimeError when reached. Raises RecipeError where the user's CUBLAS_WORKSPACE_CONFIG forbids it."""
    if not wanted:
        return
    if os.environ.setdefault(CUBLAS, REPEATABLE[0]) not in REPEATABLE:
        raise RecipeError(
            f"train.deterministic = true and {CUBLAS} = {os.environ[CUBLAS]}: cuBLAS repeats its results only with "
            f"{' or '.join(REPEATABLE)}; unset it, or leave train.deterministic out"
        )
    import torch

    torch.use_deterministic_algorithms(True)
    # else each all-gather's buffer is first filled with NaN; (mypy does not see it: torch makes it a module's property)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _unless_set(variables: Mapping[str, str], names: tuple[str, ...], value: str) -> dict[str, str]:
    return {} if any(name in variables for name in names) else {names[0]: value}
