"""Steps on a GPU that are not like others: one whose gradient is not finite, one through experts, one beside a save."""

import filecmp
import itertools

import pytest
import torch
from families import write_family
from planted import replace
from test_cuda import TOLERANCE, TOLERANCE_BF16, cuda, over_gloo  # noqa: F401  (cuda: a fixture)
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from world import losses, metrics, run_train, run_world, train_rank

from shardbook.model.expert_products import compute_experts
from shardbook.parallel.dispatch import CopyRows, SumRows, make_segments

STEADY = ("train.deterministic=true", "train.gradient_accumulation_steps=2", "precision.params=fp32")


def train_with_third(words):
    """A rank of whose third step one number of a gradient is not finite."""
    from shardbook.optim.clip import clip_gradients

    begun = itertools.count(1)

    def clip_planted(parameters, limit):
        parameters = list(parameters)
        if next(begun) == 3:
            gradient = parameters[0].grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[0] = torch.nan
        return clip_gradients(parameters, limit)

    replace(clip_gradients, clip_planted)
    return train_rank(words)


@pytest.mark.parametrize("name", ["adamw", "adamw_bf16", "lion", "muon"])
def test_a_step_whose_gradient_is_not_finite_ends_the_run(name, recipe):
    """The device alone knows of it, and the host reads of it in the next step, or before it saves."""
    words = [str(recipe), *STEADY, f"optim.name={name}", f"run.name=nan-{name}", "train.save_steps=1"]
    ((code, _, errors),) = run_world(1, train_with_third, [*words, "train.async_save=false"])
    assert code == 1 and "step 3: train/loss is " in errors and "train/grad_norm nan; lower" in errors, errors
    folder = recipe.parent / f"nan-{name}"
    assert [row["step"] for row in metrics(folder) if "train/loss" in row] == [1, 2]
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-000001", "step-000002"]


ADAPTED = ("lora.r=8", "lora.target_parameters=[experts.gate_up_proj, experts.down_proj]")


@pytest.mark.parametrize("more", [(), ADAPTED, (*ADAPTED, "model.load_in_4bit=true")], ids=["all", "lora", "qlora"])
@pytest.mark.parametrize("compiles", ["false", "true"])
def test_experts_in_bf16_stay_near_the_cpu(compiles, more, recipe, tmp_path):
    """Rows of all experts in one grouped product. A token whose two best experts are nearly alike may go to another one
    in bf16, which moves a loss of some hundred tokens by less than a rounding of bf16 does."""
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    words = (f"model.path={write_family(tmp_path / 'model', 'qwen3_moe', **wide)}", "train.steps=3", *more)
    name, in_bf16 = f"experts{len(more)}-{compiles}", (f"train.compile={compiles}", "precision.params=bf16")
    on_gpu = run_train(1, recipe, name, *words, *in_bf16)
    on_cpu = run_train(1, recipe, f"{name}-cpu", *words, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=2 * TOLERANCE_BF16)


@pytest.mark.parametrize(("compiles", "dtype"), [("false", "fp32"), ("false", "bf16"), ("true", "bf16")])
def test_two_ranks_share_experts(compiles, dtype, recipe, tmp_path):
    """Places, exchanges, products and sums of a dispatch on the device; two ranks of a CPU without `ep_size` say what
    comes out."""
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    words = (f"model.path={write_family(tmp_path / 'model', 'qwen3_moe', **wide)}", "train.steps=3")
    more = ("parallel.ep_size=2", f"train.compile={compiles}", f"precision.params={dtype}")
    given = [str(recipe), f"run.name=ep-{dtype}-{compiles}", *words, *more]
    results = run_world(2, over_gloo, train_rank, given)
    assert [code for code, _, _ in results] == [0, 0], results
    on_gpu = losses(recipe.parent / f"ep-{dtype}-{compiles}")
    on_cpu = losses(run_train(2, recipe, f"no-ep-{dtype}-{compiles}", *words, environment={"CUDA_VISIBLE_DEVICES": ""}))
    assert on_gpu == pytest.approx(on_cpu, rel=TOLERANCE if dtype == "fp32" else 2 * TOLERANCE_BF16)


def test_experts_without_rows_get_gradients_of_zero():
    """As on a rank along ep whose experts no token of the group chose: a grouped product takes no rows."""
    experts = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=32, num_experts=4)).cuda().bfloat16()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    rows = torch.empty(0, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.empty(0, 1, device="cuda", dtype=torch.int64)
    output = compute_experts(experts, rows, ids, rows.new_ones(0, 1))
    assert output.shape == (0, 64)
    output.sum().backward()
    assert rows.grad.shape == (0, 64) and all(not parameter.grad.any() for parameter in experts.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_rows_are_those_of_fp32_and_make_nobody_wait(dtype):
    """Of copies of tokens, and of what experts made of them: some have no row, the last ones too. Rounded once."""
    ids = torch.randint(0, 900, (5000,), generator=torch.Generator().manual_seed(0)).cuda()
    rows = torch.randn(5000, 264, generator=torch.Generator().manual_seed(1)).to("cuda", dtype).requires_grad_()
    grad_output, found = torch.ones((), device="cuda", dtype=dtype).expand(1000, 264), []
    torch.cuda.set_sync_debug_mode("error")
    try:
        segments = make_segments(ids, 1000)
        for _ in range(2):
            found.append(SumRows.apply(rows, *segments))
            rows.grad = None
            found[-1].backward(grad_output)
        tokens = found[0].detach().requires_grad_()
        copies = CopyRows.apply(tokens, *segments)
        copies.backward(grad_output[0].expand(5000, 264))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = torch.zeros(1000, 264, dtype=torch.float64).index_add_(0, ids.cpu(), rows.detach().cpu().double())
    most = torch.zeros_like(want).index_add_(0, ids.cpu(), rows.detach().cpu().double().abs())
    assert torch.equal(*found) and (rows.grad == 1).all() and torch.equal(copies, tokens[ids])
    # its own rounding, and those of at most 20 additions in fp32
    bound = want.abs() * torch.finfo(dtype).eps / 2 + most * 20 * 2**-24
    assert ((found[0].detach().cpu().double() - want).abs() <= bound).all()
    assert torch.equal(tokens.grad[:, 0].cpu(), ids.cpu().bincount(minlength=1000).to(dtype))


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
