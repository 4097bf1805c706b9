"""Every private name of torch that Shardbook uses: its purpose, and why no public name serves.

Invariant: no other file uses one (tests/unit/test_house.py). What can be imported is imported here, at once, so that a
torch that lacks it is refused in one line before work begins. Their behaviour is tested by
tests/unit/comm/test_torch_private.py.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardbook.comm.versions import TESTED
from shardbook.recipe import RecipeError, first_line

try:
    from torch import _foreach_mul_, _foreach_norm
    from torch._C import _current_graph_task_id, _distributed_c10d
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.cuda.memory import _dump_snapshot, _record_memory_history
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.distributed_c10d import _world
    from torch.distributed.fsdp._fully_shard import _fully_shard

    # Bases for set_custom_all_gather and set_custom_reduce_scatter, public methods whose classes torch does not export.
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils import checkpoint as _checkpoint

    # The base of a mode that sees every operation, backward's too. Public TorchFunctionMode does not.
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map
    from torch.utils.checkpoint import _VersionWrapper
except ImportError as error:
    raise RecipeError(
        f"torch {torch.__version__} lacks what Shardbook uses ({first_line(error)}); it is tested with torch "
        f"{' to '.join(TESTED['torch'])}: install one of these"
    ) from None

__all__ = ["AllGather", "ReduceScatter", "TorchDispatchMode"]


# -- stages: fully_shard, the end of a backward, operations on many gradients at once


@contextlib.contextmanager
def secondary_meshes_through(get: Callable[..., Any]) -> Iterator[None]:
    """While open, fully_shard calls `get(real, reshard_after_forward, mesh_info)` for the mesh of a secondary shard, in
    place of `real(reshard_after_forward, mesh_info)`. No public argument takes such a mesh."""
    module: Any = _fully_shard
    real = module._get_post_forward_mesh_info
    module._get_post_forward_mesh_info = partial(get, real)
    try:
        yield
    finally:
        module._get_post_forward_mesh_info = real


def frees_early() -> bool:
    """Returns whether fully_shard frees, as from torch 2.15 on, a gather's buffer before the next one is copied, and a
    unit's last gradient before its sum is made (nor does one rank divide by one). Nothing public says so."""
    return hasattr(FSDPCommContext, "release_all_gather_state_for_comm_reuse")


def call_after_backward(function: Callable[[], None]) -> None:
    """Has autograd call `function` when the running backward ends, as fully_shard and DDP do. No public hook does."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_backward() -> bool:
    """Returns whether this thread is inside a backward. No public name says so."""
    return _current_graph_task_id() != -1


def version_of(tensor: Tensor) -> int:
    """Returns the version counter of `tensor`, which autograd compares before it uses a saved tensor."""
    return tensor._version


def copy_together(into: list[Tensor], source: list[Tensor]) -> None:
    """Copies each of `source` into a tensor of another dtype, in few launches. Between equal dtypes CUDA rewrites NaNs
    (byte_gather.py)."""
    torch._foreach_copy_(into, source)


def norms_of(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns the 2-norm of each, added up in `dtype`, in few launches. vector_norm would copy each to `dtype`."""
    return list(_foreach_norm(tensors, 2, dtype))


def scale_together(tensors: list[Tensor], factor: Tensor) -> None:
    """Scales each in place, in few launches. torch's public clip_grads_with_norm_ refuses DTensors of two meshes."""
    _foreach_mul_(tensors, factor)


def allow_graphs(count: int) -> None:
    """Lets every compiled function have `count` graphs. torch.compile has an option for one function since 2.13."""
    torch._dynamo.config.recompile_limit = max(count, torch._dynamo.config.recompile_limit)


def keep_widths_static(tensor: Tensor) -> None:
    """Has the compiler take all dimensions of `tensor` but the first for constants, although torch.compile was told
    `dynamic=True`. torch.compile has no option for one dimension."""
    for dim in range(1, tensor.ndim):
        torch._dynamo.mark_static(tensor, dim)


def slots_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the dictionary in which a module keeps its own parameters, in order. No public name gives empty slots (no
    bias), and setting a parameter here is cheaper than setattr, which looks at every other kind of attribute."""
    return module._parameters


def start_fully_shard(root: Any) -> None:
    """Does what fully_shard does before its first forward: it pads shards, so they must have their memory by now."""
    root._get_fsdp_state()._lazy_init()


def sharded_parameters(handle: Any) -> list[Any]:
    """Returns fully_shard's own objects for the parameters that a module gathers together. Only their `sharded_param`,
    `padded_sharded_param_size` and `to_sharded_dtensor` are used, and the attributes that functions below read."""
    state = handle._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch before 2.13 has one
    return list(groups[0].fsdp_params)


def whole_shape(param: Any) -> torch.Size:
    """Returns the shape of one of `sharded_parameters` before fully_shard; its DTensor may be sharded along tp too."""
    return param._orig_size


def padded_shard(param: Any) -> Tensor:
    """Returns the flat padded shard that fully_shard gathers. The DTensor shows it without its padding."""
    return param._sharded_param_data


def gather_through(param: Any, shard: Callable[[], Tensor]) -> None:
    """Has fully_shard gather, for one of `sharded_parameters`, the flat padded tensor that `shard` then returns. The
    public protocol (fsdp_pre_all_gather) is for tensor subclasses, which fully_shard looks for when it starts; here the
    shard is a plain tensor, and fully_shard has started already."""

    def fsdp_pre_all_gather(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (shard(),), None  # torch counts the arguments: they must be five

    def fsdp_post_all_gather(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        return None if out is not None else (outputs[0], ())

    extend_gather(param, fsdp_pre_all_gather, fsdp_post_all_gather)
    param._init_extensions()


def place_of(param: Any) -> tuple[nn.Module, str]:
    """Returns the module that has one of `sharded_parameters`, and its name there. The handle knows only modules."""
    return param._module_info.module, param._module_info.param_name


def after_each_reset(param: Any, function: Callable[[], None]) -> None:
    """Calls `function` whenever the shard of one of `sharded_parameters` may be another tensor than before: moved,
    loaded, padded by the first forward. torch looks for an extension on that tensor, and offers no hook there."""
    reset = param.reset_sharded_param

    def resets() -> None:
        reset()
        function()

    param.reset_sharded_param = resets


def extend_gather(param: Any, pre: Callable[..., Any], post: Callable[..., Any]) -> None:
    """Sets `pre` and `post` where fully_shard looks for an extension of one of `sharded_parameters`: on its shard."""
    local = param.sharded_param._local_tensor
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre, post


# -- run: activations, limits and records of collectives


def set_memory_budget(share: float) -> None:
    """Sets the share of activations that torch.compile keeps for backward. Only a blog of torch documents it."""
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = share


def keep_result(result: Any) -> Any:
    """Returns what `recall_result` gives back of an operation's result: without its graph, and with its version, as
    torch's selective checkpointing keeps it. No public name keeps a result apart from its contexts."""
    helper: Any = _checkpoint
    # torch before 2.13 has the same by another name, and asks whether a result may be a view
    detach = getattr(helper, "_detach_helper", None) or partial(helper._maybe_detach, any_ret_has_alias_info=True)
    return tree_map(lambda part: _VersionWrapper(detach(part)), result)


def recall_result(kept: Any) -> Any:
    """Returns the result that `keep_result` kept. Raises RuntimeError where one of its tensors has changed."""
    return tree_map(lambda part: part.get_val(False), kept)


def backends_of(device: torch.device) -> list[Any]:
    """Returns the backend for `device` of each process group. No public name lists groups, or gives a backend."""
    return [group._get_backend(device) for group in _world.pg_map if device in group._device_types]


def collectives_record(is_gloo: bool) -> bytes:
    """Returns torch's record of the last collectives. It is documented; no public name has it before a timeout."""
    owner: Any = _distributed_c10d  # which has the second in builds with NCCL alone
    return owner._dump_fr_trace() if is_gloo else owner._dump_nccl_trace()


# -- cuda: a record of its memory


def record_memory(events: int | None) -> None:
    """Records the last `events` allocations and frees; None: stops. It is torch's documented way (Understanding CUDA
    Memory Usage), without a public name."""
    record: Any = _record_memory_history
    record(max_entries=events) if events else record(enabled=None)


def write_memory_snapshot(file: str) -> None:
    """Writes the recorded events, for pytorch.org/memory_viz; documented in the same place, without a public name."""
    _dump_snapshot(file)


# -- simulate: a step on fake tensors


def fake_store() -> Any:
    """Returns a store for the process group `fake`, torch's own way to be one of many ranks in a single process."""
    return FakeStore()


def fake_group(rank: int, size: int) -> dist.ProcessGroup:
    """Returns a group of `size` ranks, of which only this one exists; its collectives send nothing. It is none of the
    process' groups, so a run's own may exist beside it; a public constructor would make it one."""
    group = dist.ProcessGroup(fake_store(), rank, size)
    kind: Any = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), kind, FakeProcessGroup._create_internal(rank, size))
    return group


def forget_sharding(module: nn.Module) -> None:
    """Lets fully_shard take `module` again, after its attributes are as before. No public name undoes fully_shard."""
    _module_state_mapping.pop(module, None)


def fake_tensors() -> Any:
    """Returns a context in which tensors have shapes and no memory, and may be mixed with real ones. Meta tensors will
    not do: they have no device of their own, and all their storages are empty."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def has_values(tensor: Tensor) -> bool:
    """Returns whether `tensor` has numbers that can be read. No public name tells a fake tensor."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def storages_in(result: Any) -> Iterator[tuple[int, Any]]:
    """Yields the number of, and a weak reference to, the storage of each tensor that an operation returned; of a
    DTensor, of its shard (to_local is an operation itself). Python's weakref is of a wrapper, which dies before it."""
    for tensor in tree_leaves(result):
        if isinstance(tensor, Tensor):
            storage: Any = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
            yield storage._cdata, StorageWeakRef(storage)


def bytes_there(reference: Any) -> int | None:
    """Returns the bytes now of a storage that storages_in refers to, 0 of one that was freed; None where it is gone."""
    storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return None if storage is None else storage.nbytes()
