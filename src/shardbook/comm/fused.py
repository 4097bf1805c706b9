"""Fused: functions of tensors whose passes over memory are one kernel on a GPU.

Invariant: one source for every device; a GPU compiles the very function that a CPU runs as it is written.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch

from shardbook.comm.torch_private import allow_graphs

GRAPHS = 64  # most graphs of one compiled function


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def fused(function: Callable[..., Any], device_type: str, *_constants: object) -> Callable[..., Any]:
    """Returns `function`, compiled where it runs on CUDA and Triton is there: once for each value of `_constants`, each
    a full graph or an error.

    Shapes are symbols, but a dimension of 1, or a short block, has a graph of its own: more than the default limit of
    eight, past which a call would fail. A number that changes must come in a tensor, else it is compiled in.
    """
    if device_type != "cuda" or not has_triton():
        return function
    alone: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": GRAPHS}
    if not alone.keys() <= signature(torch.compile).parameters.keys():  # torch before 2.13 has one limit for everything
        allow_graphs(GRAPHS)
        alone = {}
    return torch.compile(function, dynamic=True, fullgraph=True, **alone)
