"""Nothing inside a step makes the host wait for the device: a forward and backward where numbers cannot be read."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from model_numbers import FAMILIES, rows
from tiny import config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardbook.data.loader import Batching, build_micro_batch
from shardbook.data.tokenized import Totals
from shardbook.model.attention import KERNELS
from shardbook.model.causal_lm import build_model
from shardbook.model.teacher import attach_teacher
from shardbook.objectives import build_objective
from shardbook.optim import build_optimizer
from shardbook.parallel.expert_load import build_expert_load, count_experts
from shardbook.parallel.router_bias import RouterBiases
from shardbook.recipe import Distill, Optim, Preference
from shardbook.run.eval.generate import pick

DEVICE = torch.device("meta")  # has no numbers: what reads one raises


class NoCopies(TorchDispatchMode):
    """Refuses what goes from the host to the device: of memory that is not pinned it would wait for the device."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)]
        out = op(*args, **(kwargs or {}))
        goes = op in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        assert not (goes and out.device == DEVICE and any(each.device != DEVICE for each in given)), op
        return out


class NoLists(TorchFunctionMode):
    """Refuses tensors made of what Python holds, on the device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function in (torch.tensor, torch.as_tensor)
        assert not (made and str((kwargs or {}).get("device")) == "meta"), function
        return function(*args, **(kwargs or {}))


def on_device(micro):
    return dataclasses.replace(
        micro, **{name: value.to(DEVICE) for name, value in vars(micro).items() if isinstance(value, torch.Tensor)}
    )


def run(model, objective, packed, sequences):
    """One forward and backward on the device, of pairs where `sequences` are two."""
    encoded = rows(4)
    for row in encoded:
        row["lengths"] = [len(row["input_ids"]) // sequences] * sequences if sequences > 1 else None
    layout = [(0, 1), (2,)] if packed else [(0,), (1,)]
    row = 64 if packed else None
    batching = Batching(row, 2, 0, 1, documents=2, sequences=sequences, marks_padding=True)
    micro = on_device(build_micro_batch(encoded, layout, batching))
    if objective.reference:
        micro = dataclasses.replace(micro, reference=torch.zeros(len(micro.trained), device=DEVICE))
    model.to(DEVICE)  # rotary frequencies are on the host
    with NoLists(), NoCopies():
        shares = objective.terms(model, micro, Totals(10, 3, 5))
        shares[0].backward()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [True, False])
def test_sft_of_each_family(family, packed):
    run(build_model(config(family), "bf16", 7), build_objective("sft", Preference()), packed, 1)


@pytest.mark.parametrize("kernel", ["varlen", "flex"])
def test_kernels(kernel, monkeypatch):
    from shardbook.model import attention, masks

    def stands_in(query, key, value, cu_q, cu_k, max_q, max_k, **_):
        return query + 0 * max_q

    def flex():
        return lambda module, query, key, value, mask, scaling, **_: (query.transpose(1, 2), None)

    make = {"varlen": lambda: attention.make_varlen(stands_in), "flex": flex}[kernel]
    monkeypatch.setitem(KERNELS, kernel, dataclasses.replace(KERNELS[kernel], make=make))
    monkeypatch.setattr(masks, "BLOCK", 64)
    run(build_model(config(), "bf16", 7, KERNELS[kernel]), build_objective("sft", Preference()), True, 1)


SCALED = {
    "dynamic": {"factor": 2.0},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 128},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 128},
    "linear": {"factor": 2.0},
}


@pytest.mark.parametrize("kind", SCALED)
def test_sft_with_each_kind_of_rotation(kind):
    """And for every row that load_config lets in, the angles are transformers' own."""
    made = config(rope_parameters={"rope_type": kind, "rope_theta": 10000.0} | SCALED[kind])
    model = build_model(made, "bf16", 7)
    ours, theirs = model.model.rotary_emb, type(model.model.rotary_emb)(made)
    assert theirs.rope_type == kind
    for length in (1, made.rope_parameters.get("original_max_position_embeddings", 256)):
        places = torch.arange(length)[None]
        pairs = zip(ours(torch.zeros(1), places), theirs(torch.zeros(1), places), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    run(model, build_objective("sft", Preference()), True, 1)


@pytest.mark.parametrize("method", ["dpo", "orpo", "simpo", "reward"])
@pytest.mark.parametrize("packed", [True, False])
def test_pairs(method, packed):
    objective = build_objective(method, Preference(precompute_ref_log_probs=method == "dpo"))
    run(build_model(config(), "bf16", 7, scores=method == "reward"), objective, packed, 2)


def test_routers_that_are_balanced():
    run(build_model(config("mixtral"), "bf16", 7), build_objective("sft", Preference(), None, 0.1), True, 1)


def test_choices_of_experts_are_counted():
    model, sft = build_model(config("mixtral"), "bf16", 7), build_objective("sft", Preference())
    load = build_expert_load(model, [model], SimpleNamespace(counted=count_experts(model)))

    def terms(model, micro, totals):
        load.open(micro)
        return sft.terms(model, micro, totals)

    run(model, SimpleNamespace(terms=terms, reference=False), True, 1)
    assert load.counts.device == DEVICE and load.is_token is None


def test_biases_of_routers_move():
    module = torch.nn.Module()
    module.bias = torch.nn.Buffer(torch.zeros(8, device=DEVICE))
    with NoCopies(), NoLists():
        RouterBiases(0.001, True, {0: (module, "bias")}).move({0: torch.zeros(8, dtype=torch.int64, device=DEVICE)})


def test_distillation():
    model = build_model(config(), "bf16", 7)
    attach_teacher(model, build_model(config(hidden_size=64), "bf16"))
    run(model, build_objective("distill", Preference(), Distill()), True, 1)


SEEN = r"called on meta|torch\.nonzero|out of meta|method tensor of|_to_copy"


@pytest.mark.parametrize(
    "reads",
    [
        lambda losses: losses.sum().item(),
        lambda losses: bool(losses.sum() > 0),
        lambda losses: losses[losses > 0],
        lambda losses: losses.nonzero(),
        lambda losses: losses.tolist(),
        lambda losses: losses.cpu(),
        lambda losses: torch.tensor([1.0, 2.0], device=losses.device),
        lambda losses: torch.arange(3).to(losses.device),
    ],
)
def test_a_planted_read_or_copy_is_seen(reads):
    def terms(model, micro, totals):
        losses = model(micro)
        reads(losses)
        return losses

    # by meta tensors, which have nothing to read, or by the modes of `run`
    with pytest.raises((RuntimeError, AssertionError, NotImplementedError), match=SEEN):
        run(build_model(config(), "bf16", 7), SimpleNamespace(terms=terms, reference=False), True, 1)


class OnCuda(torch.Tensor):
    """A tensor of the device where `train.deterministic` is on: sums along its fp64 rows are refused."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cpu:
            return args[0].detach().as_subclass(torch.Tensor)
        assert function is not torch.Tensor.cumsum, "cumsum_cuda_kernel does not have a deterministic implementation"
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_drawn_on_the_host(temperature):
    """The same tokens as ever, and none of them by a sum that CUDA refuses."""
    torch.manual_seed(0)
    logits, draws = 3 * torch.randn(50, 300), torch.rand(50, dtype=torch.float64)
    found = pick(logits.as_subclass(OnCuda), temperature, draws)
    if temperature:
        shares = (logits.double() / temperature).softmax(-1).cumsum(-1)
        wanted = torch.searchsorted(shares, draws[:, None] * shares[:, -1:], right=True)[:, 0]
    else:
        wanted = logits.argmax(-1)
    assert type(found) is torch.Tensor and torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["adamw_bf16", "lion", "muon"])
def test_a_step_of_an_optimizer(name, monkeypatch):
    real = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: real())  # of a device without numbers there is none
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2)).to(DEVICE)
    model.blocks = list(model)
    optimizer = build_optimizer(model, Optim(name=name))
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
