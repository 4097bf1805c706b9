"""A training loop seen from outside: wall time of its optimizer steps, the allocator's peaks, what two steps ran.

Knows of the loop only that it calls a torch optimizer once a step, and imports nothing of the package: two loops are
measured alike. `shares` is a pure function of kernels.
"""

import contextlib
import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, schedule

WARMUP_STEPS = 4  # compilation, cuDNN's plans, growth of the allocator
PROFILED_STEPS = 2  # the last ones; the profiler warms up in the one before, so that all three are left out of the time
FEWEST_STEPS = WARMUP_STEPS + 1 + 1 + PROFILED_STEPS

# What a kernel is, by a part of its name, the first that fits. Attention first: its kernels also say cutlass or wgmma.
KINDS = {
    "attention": r"flash|fmha|sdpa|flex_attention|scaled_dot_product",
    # nvjet, xmma, cutlass, splitK: cuBLAS on Hopper and before; triton_tem: the compiler's templates; aten: on a CPU
    "gemm": r"gemm|nvjet|xmma|cutlass|wgmma|cublas|gemv|splitK|triton_tem|triton_mm|aten::(mm|addmm|bmm|baddbmm)$",
}
Kernel = tuple[str, float, float]  # name, start, end in one unit of time


def kind_of(name: str) -> str:
    """`attention`, `gemm` or `other`."""
    return next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), "other")


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Time in which at least one of the spans (start, end) runs."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def shares(kernels: list[Kernel]) -> dict[str, float]:
    """The share of each kind and of `idle` in the time from the first kernel to the end of the last; they sum to 1.

    Where kernels of several streams run at once the moment counts once, as gemm before attention before other.
    """
    window = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    counted, seen, found = 0.0, [], {}
    for kind in ("gemm", "attention", "other"):
        seen += [(start, end) for name, start, end in kernels if kind_of(name) == kind]
        found[kind] = (busy(seen) - counted) / window
        counted = busy(seen)
    return found | {"idle": 1 - counted / window}


def kernels_of(events: Iterable) -> list[Kernel]:
    """The kernels among the profiler's events; without a GPU torch's operators, one inside another counting as `shares`
    says."""
    events = list(events)
    on_gpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    chosen = on_gpu or [event for event in events if event.name.startswith("aten::")]
    # annotations, the profiler's steps among them, stand beside the kernels that they span and are no work
    chosen = [event for event in chosen if not event.is_user_annotation and not event.name.startswith("ProfilerStep")]
    return [(event.name, event.time_range.start, event.time_range.end) for event in chosen]


@contextlib.contextmanager
def watch(steps: int, out: Path) -> Iterator[None]:
    """While open, watch a loop of `steps` optimizer steps, and write what was seen to `out`, as JSON: time and peaks
    before the profiled steps, which may not end, and all of it after the last.

    step_seconds: mean wall time from the end of step WARMUP_STEPS to the end of the last one that is not profiled.
    """
    if steps < FEWEST_STEPS:
        raise ValueError(f"steps = {steps}: must be at least {FEWEST_STEPS}")
    cuda = torch.cuda.is_available()
    last = steps - PROFILED_STEPS - 1
    done, began, seen = 0, 0.0, {}
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    cycle = schedule(wait=last, warmup=1, active=PROFILED_STEPS, repeat=1)

    def after_step(*_) -> None:
        nonlocal done, began
        done += 1
        if cuda and done in (1, WARMUP_STEPS, last):
            torch.cuda.synchronize()
        if cuda and done == 1:  # what loading and the first, larger step took is not the loop's
            torch.cuda.reset_peak_memory_stats()
        if done == WARMUP_STEPS:
            began = time.perf_counter()
        if done == last:
            seen.update(step_seconds=(time.perf_counter() - began) / (last - WARMUP_STEPS))
            if cuda:
                seen.update(
                    gpu=torch.cuda.get_device_name(),
                    allocated_peak_bytes=torch.cuda.max_memory_allocated(),
                    reserved_peak_bytes=torch.cuda.max_memory_reserved(),
                    alloc_retries=torch.cuda.memory_stats()["num_alloc_retries"],
                )
            out.write_text(json.dumps(seen))
        profiler.step()
        if done == steps:
            kernels = kernels_of(profiler.events())
            out.write_text(json.dumps(seen | ({"shares": shares(kernels)} if kernels else {})))

    with profile(activities=activities, schedule=cycle) as profiler:
        handle = register_optimizer_step_post_hook(after_step)
        try:
            yield
        finally:
            handle.remove()
