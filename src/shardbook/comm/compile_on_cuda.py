"""Fused: functions of tensors whose passes over memory are one kernel on a GPU.

Invariant: one source for every device; a GPU compiles the very function that a CPU runs as it is written.
"""

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from shardbook.comm.torch_private import allow_graphs, keep_widths_static

GRAPHS = 64  # most graphs of one compiled function
WIDTHS = GRAPHS // 4  # most widths that have a graph of their own; each may have a second one, for a single row
SHARED_GRAPHS = 4 * GRAPHS  # before torch 2.13 those of all `_constants` of a function count together


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def fused(
    function: Callable[..., Any], device_type: str, *_constants: object, static_widths: bool = False
) -> Callable[..., Any]:
    """Returns `function`, compiled where it runs on CUDA and Triton is there. Each value of `_constants` is compiled on
    its own. A function that does not fit into one graph raises an error.

    Shapes are symbols, but a dimension of 1, or a short block, has a graph of its own: more than the default limit of
    eight, past which a call would fail. A number that changes must come in a tensor, else it is compiled in.

    `static_widths`: only the first dimension of each tensor is a symbol, and each of the first WIDTHS widths has a
    graph of its own. A kernel that reads rows of a symbolic width loads one element at a time, since nothing says that
    a row begins at a multiple of 16 bytes (pytorch issues 176653 and 193614): on an H200 the loss head took 2.9 times
    as long, and adamw_bf16 1.9 (docs/benchmarks/gpu-first-touch.md).
    """
    if device_type != "cuda" or not has_triton():
        return function
    alone: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": GRAPHS}
    if not alone.keys() <= signature(torch.compile).parameters.keys():  # torch before 2.13 has one limit for everything
        allow_graphs(SHARED_GRAPHS)
        alone = {}
    compiled = torch.compile(function, dynamic=True, fullgraph=True, **alone)
    return partial(_call_with_static_widths, compiled, set()) if static_widths else compiled


def _call_with_static_widths(compiled: Callable[..., Any], known: set[tuple[torch.Size, ...]], *given: Any) -> Any:
    tensors = [each for each in given if isinstance(each, Tensor)]
    widths = tuple(each.shape[1:] for each in tensors)
    if widths in known or len(known) < WIDTHS:
        known.add(widths)
        for each in tensors:
            keep_widths_static(each)
    return compiled(*given)
