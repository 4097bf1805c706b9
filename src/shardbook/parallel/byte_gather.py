"""Packed parameters: bytes that lie in a tensor of floats are gathered as bytes.

Invariant: no byte passes a copy that takes it for a number. fully_shard copies a unit's shards into its buffer with
`_foreach_copy_`, which on CUDA goes through fp32 and makes one pattern, 0x7FFF, of all patterns that are NaN in bf16
(ForeachFunctors.cuh, UnaryOpFunctor; pytorch issue 159333). Where one parameter of a unit is uint8, the unit is
gathered in one buffer of uint8, into which all its parameters are copied byte by byte: as many bytes as otherwise.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardbook.comm.torch_private import after_each_reset, extend_gather, padded_shard, place_of, sharded_parameters
from shardbook.model.marks import BYTES
from shardbook.parallel.units import Unit


def gather_bytes(unit: Unit) -> None:
    """Has fully_shard gather the parameters of `unit` that hold bytes as uint8."""
    for param in sharded_parameters(unit.handle) if unit.shapes else ():
        module, name = place_of(param)
        if name in getattr(module, BYTES, ()):
            after_each_reset(param, partial(_extend, param))


def _extend(param: Any) -> None:
    # It takes one argument: with five, torch wants the padded shape back, which the bytes of a shorter shard lack.
    def fsdp_pre_all_gather(mesh: Any) -> Any:
        return (padded_shard(param).view(param.padded_sharded_param_size).view(torch.uint8),), None

    extend_gather(param, fsdp_pre_all_gather, _as_it_was)


def _as_it_was(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
    """Returns the gathered bytes in the dtype that they lie in, or None where `out` has them already."""
    return None if out is not None else (outputs[0].view(dtype), ())
