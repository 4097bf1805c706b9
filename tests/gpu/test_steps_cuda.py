"""Steps on a GPU that are not like others: one whose gradient is not finite, one through experts, one beside a save."""

import filecmp
import itertools

import pytest
import torch
from families import write_family
from test_cuda import TOLERANCE_BF16, cuda  # noqa: F401  (a fixture)
from world import losses, metrics, run_train, run_world, train_rank

STEADY = ("train.deterministic=true", "train.gradient_accumulation_steps=2", "precision.params=fp32")


def train_with_third(words, how):
    """A rank whose third step is `nan`, one number of a gradient is not finite, or `passed`: no weight is changed."""
    from shardbook import train

    clip, step, begun = train.clip_gradients, train.step_if_finite, itertools.count(1)
    number = [0]

    def clip_gradients(parameters, limit):
        parameters, number[0] = list(parameters), next(begun)
        if how == "nan" and number[0] == 3:
            gradient = parameters[0].grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[0] = torch.nan
        return clip(parameters, limit)

    def step_if_finite(optimizer, norm):
        if how != "passed" or number[0] != 3:
            step(optimizer, norm)

    train.clip_gradients, train.step_if_finite = clip_gradients, step_if_finite
    return train_rank(words)


@pytest.mark.parametrize("name", ["adamw", "adamw_bf16", "lion", "ademamix", "muon"])
def test_a_step_whose_gradient_is_not_finite_is_left_out(name, recipe):
    """The device alone knows of it, and what comes after it is what comes after a step that was not taken, to the bit:
    weights, moments and step counts."""
    words = [str(recipe), *STEADY, "train.max_bad_steps=1", f"optim.name={name}", "train.export=false"]
    words += [f"optim.betas={[0.9, 0.99, 0.999][: 2 + (name == 'ademamix')]}".replace(" ", "")]
    runs = {}
    for how in ("nan", "passed", "plain"):
        (found,) = run_world(1, train_with_third, [*words, f"run.name={name}-{how}"], how)
        assert found[0] == 0, found
        runs[how] = [row for row in metrics(recipe.parent / f"{name}-{how}") if "train/bad_steps" in row]
    after = {how: [row["train/loss"] for row in rows[3:]] for how, rows in runs.items()}
    assert after["nan"] == after["passed"] != after["plain"] and len(after["nan"]) == 2
    assert [row["train/bad_steps"] for row in runs["nan"]] == [0, 0, 1, 1, 1]
    assert ["train/grad_norm" in row for row in runs["nan"]] == [True, True, False, True, True]


@pytest.mark.parametrize("compiles", ["false", "true"])
def test_experts_in_bf16_stay_near_the_cpu(compiles, recipe, tmp_path):
    """Rows of all experts in one grouped product. A token whose two best experts are nearly alike may go to another one
    in bf16, which moves a loss of some hundred tokens by less than a rounding of bf16 does."""
    words = (f"model.path={write_family(tmp_path / 'model', 'qwen3_moe')}", "train.steps=3")
    on_gpu = run_train(1, recipe, f"experts-{compiles}", *words, f"train.compile={compiles}", "precision.params=bf16")
    on_cpu = run_train(1, recipe, f"experts-cpu-{compiles}", *words, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=2 * TOLERANCE_BF16)


@pytest.mark.parametrize("how", ["true", "wait"])
def test_a_save_beside_steps_has_the_bytes_of_one_that_is_waited_for(how, recipe):
    words = (*STEADY, "train.steps=6", "train.save_steps=2", "train.export=false")
    waited, beside = (
        run_train(1, recipe, f"saves-{mode}", *words, f"train.async_save={mode}") for mode in ("false", how)
    )
    assert losses(waited) == losses(beside)
    files = {
        run: sorted(each.relative_to(run) for each in (run / "checkpoints").rglob("*")) for run in (waited, beside)
    }
    assert files[waited] == files[beside]
    numbers = [file for file in files[waited] if file.suffix == ".bin"]
    assert len(numbers) >= 3
    for file in numbers:
        assert filecmp.cmp(waited / file, beside / file, shallow=False), file
