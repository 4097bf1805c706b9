"""NF4: bytes and values against the paper's own definition, shards, gradients, and what a product keeps."""

import hashlib
import shutil

import pytest
import reference
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import metrics

from shardbook.comm.compile_on_cuda import fused
from shardbook.comm.versions import release_of
from shardbook.model import nf4
from shardbook.recipe import RecipeError


def weights(rows: int = 96, width: int = 192) -> torch.Tensor:
    """Numbers of very different sizes without a generator, whose sequence a version of torch could change; two blocks
    of zeros."""
    number = torch.arange(rows * width, dtype=torch.int64)
    share = ((number * 7919 + 104729) % 2003 - 1001).double() / 1001
    full = (share**3).view(rows, width) * (1 + torch.arange(rows, dtype=torch.float64)[:, None])
    full[5, :128] = 0
    return full.float()


def test_values_are_the_papers():
    full = weights()
    packed, absmax = nf4.quantize_rows(full)
    found = nf4.unpack_nf4(packed, absmax, 192, False, torch.float32, False)
    assert (found - reference.nf4(full)).abs().max() < 2e-6 * full.abs().max()
    assert 0.03 < (found - full).norm() / full.norm() < 0.15


# sha256 of quantize_4bit(weights(), blocksize=64, quant_type="nf4") and of its absmax, bitsandbytes 0.50.2 on a CPU,
# without row 5: of a block of zeros its bytes are not ours, which say zero
THEIRS = (
    "a9402e1e9d8b6adbad5930c0f58c798c6f213465daeb69f4ea4ae5eecc62f670",
    "d5e067774da5f1972e34c9f0aeede1a7e9c3ddfebbce4fdc99c1ce58648ff729",
)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_bytes_are_bitsandbytes_own():
    rows = [row for row in range(96) if row != 5]
    packed, absmax = nf4.quantize_rows(weights()[rows])
    assert (digest(packed), digest(absmax)) == THEIRS


def test_bytes_are_those_of_bitsandbytes_that_is_here():
    functional = pytest.importorskip("bitsandbytes.functional")
    full = torch.randn(500, 640, generator=torch.Generator().manual_seed(0))
    packed, absmax = nf4.quantize_rows(full)
    theirs, state = functional.quantize_4bit(full, blocksize=64, quant_type="nf4")
    assert torch.equal(packed.flatten(), theirs.flatten())
    assert torch.equal(absmax.view(torch.float32).flatten(), state.absmax)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 40])
def test_shards_are_the_rows_of_the_whole(ranks, nested, monkeypatch):
    monkeypatch.setattr(nf4, "AT_ONCE", 1000)  # several parts
    full = weights(33, 128)
    whole = nf4.quantize_rows(full, nested)
    shards = [nf4.quantize_rows(part, nested) for part in full.chunk(ranks)]
    assert all(
        torch.equal(torch.cat(parts), both) for parts, both in zip(zip(*shards, strict=True), whole, strict=True)
    )
    assert whole[1].shape[1] == nf4.absmax_bytes(128, nested)
    empty = nf4.quantize_rows(full[:0], nested)
    assert nf4.unpack_nf4(*empty, 128, nested, torch.float32, False).shape == (0, 128)


def test_double_quantisation_costs_little():
    full = weights()
    once, twice = (
        nf4.unpack_nf4(*nf4.quantize_rows(full, nested), 192, nested, torch.float32, False) for nested in (False, True)
    )
    assert 0 < (twice - once).norm() / once.norm() < 0.005
    assert nf4.absmax_bytes(4096, True) / 4096 < 0.0167 and nf4.absmax_bytes(4096, False) == 256


def packed_linear(nested: bool = False, dtype=torch.float32, rows: int = 96, width: int = 192, **options):
    module = nn.Linear(width, rows, device="meta", dtype=dtype, **options)
    nf4.pack_module(module, "a matrix", dtype, nested)
    module.__class__ = nf4.PackedLinear
    module.to_empty(device="cpu")
    nf4.fill_rows(module.weight_packed.data, module.weight_absmax.data, nested, weights(rows, width))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
def test_results_and_gradients_are_those_of_the_unpacked_matrix(nested, dtype):
    module = packed_linear(nested, dtype)
    with torch.no_grad():
        module.bias.copy_(torch.arange(96.0))
    input = (weights(7, 192) / 7).to(dtype).requires_grad_()
    same = input.detach().clone().requires_grad_()
    want = same @ nf4.unpacked_weight(module, dtype).T + module.bias
    found = module(input)
    for out in (found, want):
        (out * torch.linspace(-1, 1, 96, dtype=dtype)).sum().backward()
    assert torch.allclose(found, want, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-4)
    assert torch.equal(input.grad, same.grad)
    assert len(module.state_dict()) == 3 and next(iter(dict(module.named_parameters()))) == "weight_packed"


def kept(forward, *inputs) -> list[torch.Tensor]:
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found.append(tensor) or tensor, lambda tensor: tensor):
        forward(*inputs).sum().backward()
    return found


def is_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() >= 96 * 192


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_of_a_whole_weights_size_is_kept(compiled):
    module = packed_linear()
    forward = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    found = kept(forward, weights(7, 192).requires_grad_())
    assert found and not any(is_whole(tensor) for tensor in found)


def test_planted_a_weight_that_forward_saves_is_kept(monkeypatch):
    def forward(ctx, input, packed, absmax, nested, first_block):
        weight = nf4.unpack_nf4(packed, absmax, input.shape[-1], nested, input.dtype, again=False)
        ctx.save_for_backward(weight)
        return torch.nn.functional.linear(input, weight)

    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0], None, None, None, None

    monkeypatch.setattr(nf4._Product, "forward", staticmethod(forward))
    monkeypatch.setattr(nf4._Product, "backward", staticmethod(backward))
    assert any(is_whole(tensor) for tensor in kept(packed_linear(), weights(7, 192).requires_grad_()))


@pytest.mark.skipif(
    release_of(torch.__version__) >= (2, 14), reason="from torch 2.14 on the compiler keeps the packed bytes either way"
)
def test_planted_the_same_call_in_backward_keeps_it(monkeypatch):
    def backward(ctx, gradient):
        weight = nf4.unpack_nf4(*ctx.saved_tensors, ctx.width, ctx.nested, gradient.dtype, again=False)
        return gradient @ weight, None, None, None, None

    torch._dynamo.reset()
    monkeypatch.setattr(nf4._Product, "backward", staticmethod(backward))
    forward = torch.compile(packed_linear(), backend="aot_eager", fullgraph=True)
    assert any(is_whole(tensor) for tensor in kept(forward, weights(7, 192).requires_grad_()))
    torch._dynamo.reset()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_rows_in_one_pass_have_the_bits_of_parts(dtype, nested, monkeypatch):
    """What a GPU compiles, as it is written."""
    packed = nf4.quantize_rows(weights(33, 128), nested)
    monkeypatch.setattr(nf4, "AT_ONCE", 1000)
    parts = nf4.unpack_nf4(*packed, 128, nested, dtype, False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(nf4, "_parts", None)
    assert torch.equal(nf4.unpack_nf4(*packed, 128, nested, dtype, False), parts)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.slow
def test_compiled_as_on_cuda_it_is_one_kernel_with_the_same_bits(monkeypatch):
    """One graph for each width, whatever the rows."""
    monkeypatch.setattr("shardbook.comm.compile_on_cuda.has_triton", lambda: True)
    torch._dynamo.reset()
    counters["stats"].clear()
    metrics.reset()
    for rows, width in ((96, 192), (576, 1536), (33, 640), (192, 1536), (7, 192)):
        packed = nf4.quantize_rows(weights(rows, width))
        want = nf4.unpack_nf4(*packed, width, False, torch.bfloat16, False)
        with monkeypatch.context() as patch:
            patch.setattr(
                nf4, "fused", lambda function, device_type, *more, **how: fused(function, "cuda", *more, **how)
            )
            assert torch.equal(nf4.unpack_nf4(*packed, width, False, torch.bfloat16, False), want)
    assert counters["stats"]["unique_graphs"] == 3
    assert metrics.generated_kernel_count == counters["stats"]["unique_graphs"]


def test_a_width_of_no_whole_blocks_is_refused():
    with pytest.raises(RecipeError, match=r"q_proj have 72 numbers; must be a multiple of 64"):
        nf4.pack_module(nn.Linear(72, 8, device="meta"), "q_proj", torch.float32, False)
