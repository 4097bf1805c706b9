"""An export casts before it gathers: half the bytes for bf16, and the very values of gathering first."""

import math

import pytest
from world import run_world


def export(folder, dtype, bug=None):
    """Bytes gathered of every parameter, in full, and whether each value is what gathering in fp32 first would give."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from shardbook.model import weights
    from shardbook.model.causal_lm import build_model, materialize
    from shardbook.model.dtypes import DTYPES
    from shardbook.model.families import load_config
    from shardbook.parallel.layout import build_layout
    from shardbook.parallel.mesh import build_mesh
    from shardbook.parallel.sharding import apply_stage
    from shardbook.ranks.distributed import start_distributed
    from shardbook.recipe import Model, Parallel, Precision

    ranks = start_distributed()
    bug and bug(weights)
    model = build_model(load_config(Model(path=str(folder)), folder, 64), "fp32")
    parts, world = (model, model.parts, model.blocks), (ranks.world_size, ranks.ranks_per_node)
    layout = build_layout(Parallel(), Precision(params="fp32"), *parts, *world)
    apply_stage(model, layout, build_mesh(layout.sizes, "cpu"))
    materialize(model, ranks.device)
    weights.load_weights(model, folder)
    # what a cast to bf16 may round in its own way: ties to even both ways, subnormals, signed zeros, what overflows
    odd = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 2**-133, -(2**-149), -0.0, 3.4e38, -math.inf, 2**-126 * 1.999])
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local().view(-1)
            local[: len(odd)] = odd[: len(local)]

    class Gathers(TorchDispatchMode):
        gathered = 0

        def __torch_dispatch__(self, function, types, positional=(), named=None):
            out = function(*positional, **(named or {}))
            if "all_gather" in str(function):
                Gathers.gathered += out.numel() * out.element_size()
            return out

    def bits(tensor):
        return tensor.contiguous().view(torch.int16)

    with Gathers():
        made = dict(weights.full_tensors(model, dtype))
    wanted = {name: parameter.detach().full_tensor().to(DTYPES[dtype]) for name, parameter in model.named_parameters()}
    assert list(made) == list(wanted)
    return Gathers.gathered, all(torch.equal(bits(made[name]), bits(wanted[name])) for name in wanted)


def casts_after_the_gather(weights):
    """Planted bug: what export did before."""
    from shardbook.model.dtypes import DTYPES

    def full_tensors(model, dtype):
        for name, parameter in model.named_parameters():
            yield name, parameter.detach().full_tensor().to(DTYPES[dtype])

    weights.full_tensors = full_tensors


def rounds_down(weights):
    """Planted bug: a cast that cuts off what bf16 has no room for."""
    import torch

    real = weights.full_tensors

    def full_tensors(model, dtype):
        for name, tensor in real(model, "fp32"):
            yield name, (tensor.view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)

    weights.full_tensors = full_tensors


@pytest.fixture(scope="module")
def padded(tiny):
    """Elements of the untied model's parameters, each padded to two equal shards, as the gather sends them."""
    from safetensors.torch import load_file

    tensors = load_file(tiny / "untied" / "model.safetensors").values()
    return sum(-(-len(t) // 2) * 2 * (t.numel() // len(t)) for t in tensors)


@pytest.mark.parametrize("dtype, itemsize", [("fp32", 4), ("bf16", 2)])
def test_an_export_gathers_in_its_own_dtype(tiny, padded, dtype, itemsize):
    assert run_world(2, export, tiny / "untied", dtype) == [(padded * itemsize, True)] * 2


@pytest.mark.slow
def test_a_cast_too_late_or_wrong_turns_it_red(tiny, padded):
    for gathered, same in run_world(2, export, tiny / "untied", "bf16", casts_after_the_gather):
        assert gathered == 4 * padded and same
    for _, same in run_world(2, export, tiny / "untied", "bf16", rounds_down):
        assert not same
