"""Packed parameters: bytes that lie in a tensor of floats are gathered as bytes.

Invariant: no byte passes a copy that takes it for a number. fully_shard copies a unit's shards into its buffer with
`_foreach_copy_`, which on CUDA goes through fp32 and makes one pattern, 0x7FFF, of all that are NaN in bf16
(ForeachFunctors.cuh, UnaryOpFunctor; pytorch issue 159333). Where one parameter of a unit is uint8, the unit is
gathered in one buffer of uint8, into which every other one goes byte by byte too; what is sent is as long as before.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardbook.parallel.units import Unit

BYTES = "holds_bytes"  # of a module: the names of its parameters whose elements are bytes, not numbers


def gather_bytes(unit: Unit) -> None:
    """Have fully_shard gather what of `unit` holds bytes as uint8. Private: its parameters, and their extension for
    gathers, which it looks for on a shard; tests/unit/test_torch.py notices when they move."""
    if not unit.shapes:
        return
    state: Any = unit.handle._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch before 2.13 has one
    for param in groups[0].fsdp_params:
        if param._module_info.param_name in getattr(param._module_info.module, BYTES, ()):
            # called whenever the shard may be another tensor than before: moved, loaded, padded by the first forward
            param.reset_sharded_param = partial(_reset, param)


def _reset(param: Any) -> None:
    type(param).reset_sharded_param(param)
    local = param.sharded_param._local_tensor

    # of one argument: with five, torch wants the padded shape back, which the bytes of a shorter shard do not have
    def fsdp_pre_all_gather(mesh: Any) -> Any:
        return (param._sharded_param_data.view(param.padded_sharded_param_size).view(torch.uint8),), None

    local.fsdp_pre_all_gather = fsdp_pre_all_gather
    local.fsdp_post_all_gather = _as_it_was


def _as_it_was(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
    """The gathered bytes in the dtype that they lie in; where `out` has them already there is nothing to do."""
    return None if out is not None else (outputs[0].view(dtype), ())
