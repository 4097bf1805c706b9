"""Blocks compiled without a compiler of kernels: what traces, breaks and shares graphs is as in a run, and a graph's
operations are torch's own. What fused kernels compute is asked of a few cases: test_compile and test_tensor_compile."""

from planted import replace


def traced(function, *args):
    """Calls `function(*args)` on a rank where train.compile traces blocks, for forward and backward, and fuses none."""
    from shardbook.model.causal_lm import apply_compile

    def trace(model) -> None:
        for block in model.blocks:
            block.compile(backend="aot_eager")

    replace(apply_compile, trace)
    return function(*args)
