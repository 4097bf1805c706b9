"""Per-block compile, under checkpointing and sharding, computes the same and really compiles."""

import shutil

import pytest
from tiny import write_recipe
from world import losses, run_train, run_world, train_rank


def compiled_rank(words):
    import torch

    torch._dynamo.utils.counters.clear()
    code, _, err = train_rank(words)
    return code, err, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile on a CPU needs a C++ compiler"
)
@pytest.mark.slow
def test_compiled_blocks_train_the_same(tiny, tmp_path):
    recipe = write_recipe(tiny, tmp_path)
    words = ("train.steps=3", "activation.checkpointing=full", "parallel.stage=zero3", "data.eval_size=0")
    plain = run_train(2, recipe, "plain", *words)
    compiled = [str(recipe), "run.name=compiled", "train.compile=true", *words]
    results = run_world(2, compiled_rank, compiled, seconds=600)  # a C++ compiler, beside another suite
    assert [code for code, _, _ in results] == [0, 0], results
    assert all(graphs > 0 for _, _, graphs in results)
    # fused kernels round differently: three steps of fp32 at most a few ulp apart
    assert losses(tmp_path / "compiled") == pytest.approx(losses(plain), rel=1e-5)
