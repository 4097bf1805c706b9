"""What we use of torch that it does not promise: this notices when it moves, and what a user reads where it has."""

import importlib
import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

import shardbook
from shardbook.comm import torch_private
from shardbook.comm.versions import release_of
from shardbook.recipe import RecipeError

GONE = {  # what torch lacks -> words of the line
    "torch.distributed.fsdp._fully_shard._fsdp_api.AllGather": "cannot import name 'AllGather' from 'torch.distr",
    "torch._foreach_norm": "cannot import name '_foreach_norm' from 'torch'",
    "torch.utils._pytree.tree_leaves": "cannot import name 'tree_leaves' from 'torch.utils._pytree'",
}
TAKEN = """
import importlib
owner, _, name = {path!r}.rpartition(".")
delattr(importlib.import_module(owner), name)
"""


def test_a_name_that_is_gone_is_one_line(monkeypatch):
    for path, said in GONE.items():
        owner, _, name = path.rpartition(".")
        with monkeypatch.context() as taken, pytest.raises(RecipeError) as refused:
            taken.delattr(importlib.import_module(owner), name)
            runpy.run_path(torch_private.__file__)
        line = str(refused.value)
        assert line.startswith(f"torch {torch.__version__} lacks what Shardbook uses ({said}") and "\n" not in line
        assert line.endswith("it is tested with torch 2.11 to 2.15: install one of these")


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "shardbook.train", "smollm2-135m-fsdp"],
        pytest.param(
            ["-m", "shardbook.cli", "plan", "smollm2-135m-fsdp", "--simulate", "--gpus", "2"], marks=pytest.mark.slow
        ),
    ],
    ids=["rank", "plan"],
)
def test_a_process_ends_with_that_line_and_exit_code_2(words, tmp_path):
    (path, said), *_ = GONE.items()
    (tmp_path / "sitecustomize.py").write_text(TAKEN.format(path=path))
    variables = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(shardbook.__file__).parents[1]}"}
    ended = subprocess.run([sys.executable, *words], env=variables, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(f"shardbook: torch {torch.__version__} lacks what Shardbook uses ({said}")
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


def test_the_custom_collectives_have_the_shape_we_implement():
    for base, arguments in (
        (AllGather, ["self", "output_tensor", "input_tensor", "group", "async_op"]),
        (ReduceScatter, ["self", "output_tensor", "input_tensor", "group", "op", "async_op"]),
    ):
        assert list(inspect.signature(base.__call__).parameters) == arguments
        assert list(inspect.signature(base.allocate).parameters) == ["self", "size", "dtype", "device"]
        assert base.__abstractmethods__ == {"__call__", "allocate"}
    assert FSDPModule.set_custom_all_gather and FSDPModule.set_custom_reduce_scatter


def test_the_maker_of_secondary_meshes_is_looked_up_where_we_stand_in_for_it():
    arguments = inspect.signature(_fully_shard._get_post_forward_mesh_info).parameters
    assert list(arguments) == ["reshard_after_forward", "mesh_info"]
    assert "_get_post_forward_mesh_info" in _fully_shard.fully_shard.__wrapped__.__code__.co_names


def test_the_recompile_limit_is_there():
    assert torch._dynamo.config.recompile_limit == 8


def test_the_memory_budget_of_the_compiler_is_there():
    assert torch._functorch.config.activation_memory_budget == 1.0


def test_the_groups_and_their_backends_are_where_we_set_limits():
    assert isinstance(distributed_c10d._world.pg_map, dict)
    for owner, name in ((distributed_c10d.ProcessGroup, "_get_backend"), (_distributed_c10d.Backend, "set_timeout")):
        assert callable(getattr(owner, name))
    assert isinstance(distributed_c10d.ProcessGroup._device_types, property)


def test_the_record_of_collectives_can_be_asked_for():
    assert isinstance(_distributed_c10d._dump_fr_trace(), bytes)
    assert hasattr(_distributed_c10d, "_dump_nccl_trace") == torch.distributed.is_nccl_available()


def test_a_backward_calls_back_at_its_end():
    leaf, order = torch.ones(2, requires_grad=True), []
    leaf.register_hook(
        lambda gradient: torch.autograd.Variable._execution_engine.queue_callback(lambda: order.append(1))
    )
    (leaf * 2).sum().backward()
    assert order == [1]


def test_what_is_queued_by_a_call_back_comes_after_all_others():
    queue, order = torch.autograd.Variable._execution_engine.queue_callback, []
    leaf = torch.ones(2, requires_grad=True)
    made = leaf * 2
    made.register_hook(lambda gradient: queue(lambda: queue(lambda: order.append("last"))))
    leaf.register_hook(lambda gradient: queue(lambda: order.append("first")))
    made.register_hook(lambda gradient: order.append(torch._C._current_graph_task_id() != -1))
    made.sum().backward()
    assert order == [True, "first", "last"] and torch._C._current_graph_task_id() == -1


def test_a_tensor_knows_how_often_it_was_changed():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad, before = torch.ones(2), parameter._version
    torch.optim.AdamW([parameter]).step()
    assert parameter._version > before


def test_norms_of_several_tensors_add_up_in_the_dtype_that_is_asked_for():
    tensors = [torch.full((3,), 1e30), torch.full((5,), 2.0)]
    norms = torch._foreach_norm(tensors, 2, torch.float64)
    assert [norm.dtype for norm in norms] == [torch.float64] * 2
    for norm, part in zip(norms, tensors, strict=True):
        assert abs(float(norm) / float(part.double().norm()) - 1) < 1e-15


def test_several_tensors_are_scaled_in_place():
    tensors = [torch.full((3,), 1e30), torch.full((5,), 2.0)]
    torch._foreach_mul_(tensors, torch.tensor(0.5))
    assert torch.equal(tensors[0], torch.full((3,), 5e29)) and torch.equal(tensors[1], torch.ones(5))


def test_a_fake_world_and_the_size_of_a_storage_that_may_be_gone():
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert FakeStore()
    tensor = torch.zeros(10)
    kept = StorageWeakRef(tensor.untyped_storage())
    assert torch.UntypedStorage._new_with_weak_ptr(kept.cdata).nbytes() == 40
    del tensor
    assert torch.UntypedStorage._new_with_weak_ptr(kept.cdata) is None


def test_fully_shard_s_own_parameters_have_what_offload_asks_of_them():
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    for name in ("all_gather_inputs", "_init_extensions", "to_sharded_dtensor", "init_unsharded_param"):
        assert hasattr(FSDPParam, name), name
    source = inspect.getsource(FSDPParam)
    for name in ("_sharded_param_data", "padded_sharded_param_size", "_orig_size", "fsdp_pre_all_gather"):
        assert name in source, name
    assert callable(FSDPState._lazy_init) and "_fsdp_param_group" in inspect.getsource(FSDPState)
    assert list(inspect.signature(FSDPModule.set_all_reduce_hook).parameters)[:2] == ["self", "hook"]


def test_fully_shard_asks_each_parameter_anew_when_its_shard_is_final():
    """And an extension of one argument may give what it likes: packed bytes rest on both."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    begun = inspect.getsource(FSDPParamGroup.lazy_init)
    assert begun.index("fsdp_param.reset_sharded_param()") < begun.index("fsdp_param._init_extensions()")
    asked = inspect.getsource(FSDPParam.all_gather_inputs.fget)
    assert "num_fn_params not in (1, 5)" in asked and "fsdp_pre_all_gather(" in asked
    assert "_module_info.param_name" in inspect.getsource(FSDPParam)


def test_what_a_plan_counts_asks_when_buffers_are_freed():
    """Of torch 2.13 the last gather's buffer is there while the next is copied; of 2.15 it is not."""
    assert torch_private.frees_early() == (release_of(torch.__version__) >= (2, 15))


def test_a_result_is_kept_without_its_graph_and_a_changed_one_is_not_given_back():
    made = torch.ones(3, requires_grad=True) * 2
    kept = torch_private.keep_result((made, None, 7))
    again, *others = torch_private.recall_result(kept)
    assert torch.equal(again, made) and again.grad_fn is None and others == [None, 7]
    with torch.no_grad():
        made.mul_(2)
    with pytest.raises(RuntimeError, match="has been mutated"):
        torch_private.recall_result(kept)


def test_torch_before_2_13_keeps_results_by_another_name(monkeypatch):
    given = []

    def maybe_detach(part, any_ret_has_alias_info):
        given.append(any_ret_has_alias_info)
        return part.detach() if isinstance(part, torch.Tensor) else part

    monkeypatch.delattr("torch.utils.checkpoint._detach_helper", raising=False)
    monkeypatch.setattr("torch.utils.checkpoint._maybe_detach", maybe_detach, raising=False)
    made = torch.ones(3, requires_grad=True) * 2
    kept = torch_private.recall_result(torch_private.keep_result(made))
    assert torch.equal(kept, made) and kept.grad_fn is None and given == [True]
