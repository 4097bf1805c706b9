"""Blocks compiled without a compiler of kernels: what traces, breaks and shares graphs is as in a run, and a graph's
operations are torch's own. What fused kernels compute is asked of a few cases: test_compile and test_tensor_compile."""


def traced(function, *args):
    """Calls `function(*args)` on a rank where train.compile traces blocks, for forward and backward, and fuses none."""
    from shardbook import train

    def apply_compile(model) -> None:
        for block in model.blocks:
            block.compile(backend="aot_eager")

    train.apply_compile = apply_compile
    return function(*args)
