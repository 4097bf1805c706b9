"""A model's loss and gradients on packed rows, and how close those of two are."""

import pytest
import torch
from families import small_config
from tiny import config
from transformers import AutoModelForCausalLM

from shardbook.data.loader import Batching, build_micro_batch
from shardbook.model import attention
from shardbook.model.attention import KERNELS
from shardbook.model.causal_lm import build_model, materialize
from shardbook.model.families import load_config
from shardbook.model.selfcheck import check_family, freeze
from shardbook.model.weights import load_weights
from shardbook.objectives.sft import sft_loss
from shardbook.recipe import Model

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "olmo2", "smollm3", "granite", "phi3"]


def load(folder, chunk: int = 0, attention: str = "sdpa"):
    model = build_model(load_config(Model(path=str(folder)), folder, 64), "fp32", chunk, KERNELS[attention])
    materialize(model, torch.device("cpu"))
    load_weights(model, folder)
    return model


def rows(count: int = 5, seed: int = 0) -> list[dict]:
    dice = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 14, (count,), generator=dice).tolist()
    return [
        {
            "input_ids": torch.randint(0, 259, (n,), generator=dice).tolist(),
            "mask": (torch.rand(n, generator=dice) < 0.6).tolist(),
        }
        for n in lengths
    ]


def micro(packed: bool):
    layout = [(0, 1, 2), (3, 4)] if packed else [(0,), (1,), (2,), (3,), (4,)]
    return build_micro_batch(rows(), layout, Batching(64 if packed else None, len(layout), 0, 1, documents=3))


def gradients(model, batch):
    loss = sft_loss(model, batch)
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}


def assert_close(got, expected, tolerance=1e-6):
    assert got[0].item() == pytest.approx(expected[0].item(), rel=tolerance)
    whole = torch.stack([gradient.norm() for gradient in expected[1].values()]).norm()
    for name, gradient in expected[1].items():
        # relative to the tensor's own norm, but not below 3% of the whole: a key bias has a gradient of 0 but for
        # rounding (softmax does not see a shift of all scores), and rounding is not comparable
        error = ((got[1][name].view_as(gradient) - gradient).norm() / max(gradient.norm(), 0.03 * whole)).item()
        assert error < 2 * tolerance, f"{name}: {error:.1e}"


def pair(family, kernel=""):
    """Transformers' small model of a family, and ours with its weights."""
    torch.manual_seed(0)
    small = small_config(family)
    theirs = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    found = check_family(small)
    ours = build_model(type(small).from_dict(small.to_dict()), "fp32", 7, KERNELS[kernel or kernel_of(found)])
    materialize(ours, torch.device("cpu"))
    ours.load_state_dict(theirs.state_dict())
    freeze(ours, found.without_gradient)
    return theirs, ours.eval()


def kernel_of(found):
    return attention.choose_attention("auto", config(), torch.device("cpu"), torch.float32, found.demands).name
