"""What the compiler of a GPU is told of shapes: how many graphs there are, and which sizes they hold as constants."""

from functools import wraps

import pytest
import torch
import torch._dynamo.config

from shardbook.comm import compile_on_cuda as fused_module
from shardbook.comm.compile_on_cuda import fused


def row_sums(rows, bias):
    return (rows.float() + bias[:, None]).sum(-1)


@pytest.fixture
def graphs(monkeypatch):
    """The shapes of each graph's tensors: a size is a number, or `symbol`."""
    seen, compile_ = [], torch.compile

    def backend(graph, inputs):
        values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        seen.append([tuple(size if isinstance(size, int) else "symbol" for size in shape) for shape in shapes])
        return graph.forward

    monkeypatch.setattr(fused_module, "has_triton", lambda: True)
    with_backend = wraps(compile_)(lambda function, **how: compile_(function, backend=backend, **how))
    monkeypatch.setattr(torch, "compile", with_backend)
    torch._dynamo.reset()
    fused.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=8):  # monkeypatch would hide a setting when it ends
        yield seen
    fused.cache_clear()
    torch._dynamo.reset()


def call(shapes, static_widths, *constants):
    kernel = fused(row_sums, "cuda", *constants, static_widths=static_widths)
    for rows, width in shapes:
        given = torch.randn(rows, width), torch.randn(rows)
        assert torch.equal(kernel(*given), row_sums(*given))


def test_one_graph_for_all_lengths_of_a_width_that_is_a_constant(graphs):
    call([(64, 128), (32, 128), (7, 128), (64, 256), (9, 256)], static_widths=True)
    assert graphs == [[("symbol", 128), ("symbol",)], [("symbol", 256), ("symbol",)]]


def test_one_graph_for_all_shapes_where_no_width_is_kept(graphs):
    call([(64, 128), (32, 256), (7, 96)], static_widths=False)
    assert graphs == [[("symbol", "symbol"), ("symbol",)]]


def test_widths_beyond_the_limit_share_a_graph_and_no_call_fails(graphs, monkeypatch):
    monkeypatch.setattr(fused_module, "WIDTHS", 2)
    call([(64, width) for width in (128, 256, 384, 512, 640, 768)], static_widths=True)
    assert [sizes[0] for sizes in graphs] == [("symbol", 128), ("symbol", 256), ("symbol", "symbol")]


def test_variants_that_share_a_limit_stay_below_it(graphs, monkeypatch):
    """Before torch 2.13 all compilations of a function count together, and beyond the limit a call fails."""
    for name, value in {"WIDTHS": 3, "GRAPHS": 12, "SHARED_GRAPHS": 48}.items():
        monkeypatch.setattr(fused_module, name, value)
    compile_ = torch.compile
    earlier = lambda function, dynamic, fullgraph: compile_(function, dynamic=dynamic, fullgraph=fullgraph)  # noqa: E731
    monkeypatch.setattr(torch, "compile", earlier)
    for width in range(64, 64 * 9, 64):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for rows in (5, 1):
                kernel = fused(row_sums, "cuda", dtype, static_widths=True)
                kernel(torch.randn(rows, width).to(dtype), torch.randn(rows))
    assert 12 < len(graphs) <= 48
