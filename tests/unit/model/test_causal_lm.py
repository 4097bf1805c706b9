"""The model computes what transformers computes, packed or not, whole or in chunks."""

import dataclasses

import pytest
import torch
from tiny import config, write_model
from torch import nn
from transformers import AutoModelForCausalLM

from shardbook.data.loader import Batching, build_micro_batch
from shardbook.model.attention import KERNELS
from shardbook.model.causal_lm import build_model, count_flops, materialize
from shardbook.model.families import load_config, shares_of_noise
from shardbook.model.hub import model_folder, tokenizer_folder
from shardbook.model.loss_head import LossHead
from shardbook.model.weights import load_weights
from shardbook.objectives.sft import sft_loss
from shardbook.recipe import Model, RecipeError

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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_are_those_of_transformers(tmp_path, family, tied):
    write_model(tmp_path, family, tied)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    total = torch.zeros(())
    for row in rows():
        labels = torch.where(torch.tensor(row["mask"]), torch.tensor(row["input_ids"]), -100)
        logits = theirs(input_ids=torch.tensor(row["input_ids"])[None]).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
    total.backward()
    expected = total, {name: p.grad for name, p in theirs.named_parameters()}
    assert_close(gradients(load(tmp_path), micro(packed=False)), expected)
    assert_close(gradients(load(tmp_path), micro(packed=True)), expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_packing_computes_the_same(folder):
    assert_close(gradients(load(folder), micro(packed=True)), gradients(load(folder), micro(packed=False)))


def test_packing_without_its_mask_would_not(folder):
    """The bug that the two tests above must see: attention that crosses documents."""
    batch = micro(packed=True)
    rows_alone = torch.tensor([0, 64, 128], dtype=torch.int32)
    crossing = dataclasses.replace(batch, cu_seqlens=rows_alone)
    with pytest.raises(AssertionError):
        assert_close(gradients(load(folder), crossing), gradients(load(folder), micro(packed=False)))


def test_eager_attention_computes_the_same(folder):
    for packed in (True, False):
        eager = gradients(load(folder, attention="eager"), micro(packed))
        assert_close(eager, gradients(load(folder), micro(packed)))


def test_the_loss_in_chunks_is_the_same(folder):
    whole, chunks = gradients(load(folder), micro(True)), gradients(load(folder, chunk=7), micro(True))
    assert_close(chunks, whole)


def of_head(head, hidden, targets, summed):
    head.weight.grad = hidden.grad = None
    loss = head(hidden, targets, summed).sum() / 3
    loss.backward()
    return loss.detach(), hidden.grad, head.weight.grad


def random_head(dtype=torch.float32, count=37):
    torch.manual_seed(0)
    head = LossHead(16, 101, bias=False).to(dtype)
    hidden = torch.randn(count, 16).to(dtype).requires_grad_()
    return head, hidden, torch.randint(0, 101, (count,))


@pytest.mark.parametrize("chunk", [0, 8, 37, 100])
def test_gradients_made_in_forward_are_those_of_cross_entropy(chunk):
    head, hidden, targets = random_head()
    plain = torch.nn.functional.cross_entropy(hidden.double() @ head.weight.double().t(), targets, reduction="sum") / 3
    expected = plain, *torch.autograd.grad(plain, (hidden, head.weight))
    head.chunk_tokens = chunk
    for got, wanted in zip(of_head(head, hidden, targets, summed=True), expected, strict=True):
        assert ((got - wanted).norm() / wanted.norm()).item() < 3e-7


def test_64_chunks_in_bf16_add_up_in_fp32():
    """Against fp64 of the same bf16 numbers: 64 sums in bf16 are wrong by 5e-3 and more, one rounding by 2^-9 at most;
    slopes of single losses are rounded once more."""
    head, hidden, targets = random_head(torch.bfloat16, count=64 * 16)
    wide, weight = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    plain = torch.nn.functional.cross_entropy(wide @ weight.t(), targets, reduction="sum") / 3
    (wanted,) = torch.autograd.grad(plain, weight)
    head.chunk_tokens = 16
    got = of_head(head, hidden, targets, summed=True)[2]
    per_token = of_head(head, hidden, targets, summed=False)[2]
    in_bf16 = torch.zeros_like(head.weight)
    for rows, wants in zip(hidden.split(16), targets.split(16), strict=True):
        chunk = torch.nn.functional.cross_entropy(rows @ head.weight.t(), wants, reduction="sum") / 3
        in_bf16 += torch.autograd.grad(chunk, head.weight)[0]
    errors = [((found.double() - wanted).norm() / wanted.norm()).item() for found in (got, per_token, in_bf16)]
    assert max(errors[:2]) < 4e-3 < errors[2], errors


def test_a_lost_chunk_is_seen(monkeypatch):
    from shardbook.model import loss_head

    head, hidden, targets = random_head()
    whole = of_head(head, hidden, targets, summed=True)[2]
    head.chunk_tokens, real = 8, loss_head.add_product
    monkeypatch.setattr(
        loss_head, "add_product", lambda total, left, right, is_first: real(total, left, right, is_first=True)
    )
    lost = of_head(head, hidden, targets, summed=True)[2]
    assert ((lost - whole).norm() / whole.norm()).item() > 0.1


def test_an_evaluation_makes_no_gradient_and_a_frozen_head_none_of_its_own(monkeypatch):
    from shardbook.model import loss_head

    head, hidden, targets = random_head()
    monkeypatch.setattr(loss_head, "add_product", lambda *given: pytest.fail("made a gradient of the weight"))
    with torch.no_grad():
        alone = head(hidden, targets, summed=True)
    assert alone.item() == pytest.approx(head(hidden, targets).sum().item(), rel=1e-6)
    head.weight.requires_grad_(False)
    head(hidden, targets, summed=True).backward()
    assert hidden.grad.any() and head.weight.grad is None


def test_a_loss_goes_backward_once():
    head, hidden, targets = random_head()
    loss = head(hidden, targets, summed=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="went backward already"):
        loss.backward()


def test_no_rows_give_no_loss_and_zero_gradients(folder):
    empty = build_micro_batch([], [], Batching(64, 1, 0, 1))
    loss, found = gradients(load(folder), empty)
    assert loss.item() == 0 and all(not gradient.any() for gradient in found.values())


def test_flops_of_a_token():
    """Against torch's own counter, which counts whole scores: so without the half that the mask saves."""
    from torch.utils.flop_counter import FlopCounterMode

    model = build_model(config("llama"), "fp32", attention=KERNELS["eager"])
    materialize(model, torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    length = 64
    every = [{"input_ids": list(range(length)), "mask": [True] * length}, {"input_ids": [1], "mask": [True]}]
    batch = build_micro_batch(every, [(0,)], Batching(None, 1, 0, 1))
    with FlopCounterMode(display=False) as counter:
        gradients(model, batch)
    masked = 6 * 3 * 4 * 8 * length**2  # the half that is counted nowhere: 6 * layers * heads * head_dim * length ** 2
    head = 6 * 32 * 259  # of the last position, which has no target
    expected = count_flops(model).of(length, length**2) + masked - head
    # transformers 5.17 and 5.18 make the rotary angles by a product, [head_dim / 2, 1] x [1, length]
    with FlopCounterMode(display=False) as rotary:
        model.model.rotary_emb(torch.zeros(1, length, 32), position_ids=batch.position_ids)
    assert rotary.get_total_flops() in (0, 2 * 8 // 2 * length)
    assert counter.get_total_flops() - rotary.get_total_flops() == expected


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("t5", {}, "transformers has no causal LM of the family 't5'"),
        ("gpt2", {}, "resid_pdrop = 0.1; only 0 is supported: set model.disable_dropout=true to train without it"),
        ("mpt", {"attn_config": {"attn_pdrop": 1}}, "attn_pdrop = 1; only 0 is supported"),
        ("phimoe", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1; only 0 is supported"),
        ("qwen3_moe", {"output_router_logits": True}, "output_router_logits = true; only false is supported"),
        ("qwen3_vl", {}, "transformers has no causal LM of the family 'qwen3_vl'"),
        ("llama", {"max_position_embeddings": 32}, "data.max_length = 64: .* sees at most 32 tokens"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, r"holds quantised weights \(fp8\)"),
        (
            "gpt_oss",  # as its files on the hub are
            {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
            r"holds quantised weights \(mxfp4\).*; set model.path to a copy in bf16$",
        ),
    ],
)
def test_models_that_cannot_be_trained(tmp_path, family, changes, message):
    made = config(**changes) if family == "llama" else config(family, **changes)
    made.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=message):
        load_config(Model(path=str(tmp_path)), tmp_path, 64)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("gpt2", {}), ("phimoe", {"router_jitter_noise": 0.1}), ("mpt", {"attn_config": {"attn_pdrop": 1}})],
)
def test_dropout_that_is_disabled_drops_nothing(tmp_path, family, changes):
    config(family, **changes).save_pretrained(tmp_path)
    quiet = load_config(Model(path=str(tmp_path), disable_dropout=True), tmp_path, 64)
    assert shares_of_noise(quiet) == []
    model = build_model(quiet, "fp32")
    assert not [name for name, each in model.named_modules() if isinstance(each, nn.Dropout) and each.p]


def test_a_directory_without_a_config(tmp_path):
    with pytest.raises(RecipeError, match=r"no usable config.json"):
        load_config(Model(path=str(tmp_path)), tmp_path, 64)


def test_a_hub_id_is_its_snapshot(tmp_path, monkeypatch):
    """Offline, with the snapshot that an earlier download left in the hub's cache."""
    from huggingface_hub import constants

    repository = tmp_path / "models--owner--name"
    write_model(repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert model_folder(Model(path="owner/name")) == repository / "snapshots" / "abc123"
    assert tokenizer_folder(Model(path="x", tokenizer="owner/name")) == repository / "snapshots" / "abc123"
    with pytest.raises(RecipeError, match=r"model.path = 'owner/other': the hub did not give it .*HF_TOKEN is not set"):
        model_folder(Model(path="owner/other"))
