"""The same recipes on CUDA: NCCL, bf16, compile, against the same plain reference as on the CPU."""

import pytest
import torch
from tiny import write_recipe
from world import losses, metrics, run_train


@pytest.fixture(scope="module", autouse=True)
def cuda():
    if not torch.cuda.is_available():  # not a skip: seven of them would look like a pass
        pytest.exit("the GPU tests need a CUDA device; there is none here", returncode=2)


@pytest.fixture(scope="module")
def recipe(tiny, tmp_path_factory):
    return write_recipe(tiny, tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def exact(recipe):
    """Five steps in fp32 on the CPU, in this process's own code path but for the device (CUDA is hidden from it)."""
    return run_train(1, recipe, "cpu", environment={"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("stage", ["ddp", "zero1", "zero2", "zero3"])
def test_fp32_agrees_with_the_cpu(recipe, exact, stage):
    run = run_train(1, recipe, f"fp32-{stage}", f"parallel.stage={stage}", "precision.params=fp32")
    # kernels add in another order: single precision to some 1e-6 a step, over five steps
    assert losses(run) == pytest.approx(losses(exact), rel=1e-5)
    assert all(row["memory/peak_bytes"] > row["memory/params_bytes"] for row in metrics(run) if "train/loss" in row)


@pytest.mark.parametrize(
    "words", [(), ("train.compile=true", "activation.checkpointing=full")], ids=["eager", "compiled"]
)
def test_bf16_with_fp32_masters_stays_near(recipe, exact, words):
    run = run_train(1, recipe, f"bf16-{len(words)}", *words)
    # bf16 keeps 8 bits: 2**-8 relative a rounding; a loss averages some 90 tokens of three blocks each
    assert losses(run) == pytest.approx(losses(exact), rel=2**-7)


def test_resume_is_bitwise(recipe):
    words = ("train.steps=4", "train.save_steps=2")
    straight = run_train(1, recipe, "straight", *words)
    source = straight / "checkpoints" / "step-000002"
    again = run_train(1, recipe, "again", *words, f"train.resume_from_checkpoint={source}")
    assert losses(again) == losses(straight)[2:]
