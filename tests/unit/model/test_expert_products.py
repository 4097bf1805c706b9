"""Products of experts that have adapters or lie in four bits, number by number: against one expert after another."""

import inspect
import json

import pytest
import reference
import torch
import transformers
from families import DATA, MODELS, small_config, write_family
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import use_experts_implementation

from shardbook.model import adapters, expert_products, weights
from shardbook.model.causal_lm import build_model, materialize
from shardbook.model.experts import has_interface
from shardbook.model.families import load_config
from shardbook.recipe import Lora, Model

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_local_experts": 5}
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def experts_of(folder, family: str, is_packed: bool = False, nested: bool = False):
    """The experts of a family's first block, adapted by random A and B, and transformers' own of the same weights."""
    write_family(folder, family, **WIDE)
    model = build_model(load_config(Model(path=str(folder)), folder, 64), "fp32")
    adapters.apply_lora(model, Lora(r=8, lora_alpha=12, target_parameters=TARGETS), torch.float32)
    if is_packed:
        adapters.pack_blocks(model, torch.float32, nested)
    materialize(model, torch.device("cpu"))
    weights.load_weights(model, folder)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    ours = model.blocks[0].mlp.experts
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    return ours, merged(ours, theirs.model.layers[0].mlp.experts, is_packed)


def merged(ours, theirs, is_packed: bool):
    """Transformers' experts, a loop over those that are chosen, with the updates added to each and, where ours lie in
    four bits, rounded by an independent implementation before."""
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            stack = getattr(theirs, name)
            if is_packed:
                stack.copy_(reference.nf4(stack))
            low, high = (getattr(ours, f"{name}_lora_{letter}").detach() for letter in "AB")
            for expert in range(theirs.num_experts):
                update = 12 / 8 * (high[expert] @ low[expert])
                stack[expert] += update.T if theirs.is_transposed else update
    return theirs


def choices(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, the two experts of each, and their weights: of `any` expert, of `some` alone, or there are `none`."""
    torch.manual_seed(5)
    count = 0 if kind == "none" else 40
    first = torch.randint(0, 5, (count,)) if kind == "any" else torch.full((count,), 3)
    second = (first + 1 + torch.randint(0, 4, (count,))) % 5 if kind == "any" else torch.full((count,), 1)
    hidden = torch.randn(count, 64, requires_grad=True)
    return hidden, torch.stack([first, second], 1), torch.rand(count, 2, requires_grad=True)


def outcome(experts, given) -> list[torch.Tensor]:
    """What experts make of rows, and the gradients of rows and weights."""
    hidden, ids, shares = given
    output = experts(hidden, ids, shares)
    return [output.detach(), *torch.autograd.grad((output * torch.linspace(-1, 1, 64)).sum(), (hidden, shares))]


@pytest.mark.parametrize("kind", ["any", "some"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("bits", ["whole", "four"])
def test_they_are_those_of_one_expert_after_another(bits, family, kind, tmp_path):
    ours, theirs = experts_of(tmp_path, family, bits == "four")
    for got, want in zip(outcome(ours, choices(kind)), outcome(theirs, choices(kind)), strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm()


def find_experts(family: str):
    """The experts in a small model of a family that stand behind transformers' interface; None where none do."""
    name = MODELS.get(family)  # an older transformers has fewer
    if not name or not hasattr(inspect.getmodule(getattr(transformers, name)), use_experts_implementation.__name__):
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config(family), experts_implementation="eager")
    return next((module for module in model.modules() if has_interface(module)), None)


def test_each_family_behind_the_interface_has_its_own_products():
    """Against the family's loop over experts, with numbers of its biases, norms and gates that are not those of a new
    model. A flag of the interface that is not known would be seen here, or is a new argument of it."""
    flags = {"is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm"}
    given = {*inspect.signature(use_experts_implementation).parameters} - {"experts_class", "experts_interface"}
    assert given <= flags
    seen = {}
    trained = [family for family, facts in json.loads(DATA.read_text()).items() if facts["kind"] in ("packed", "rows")]
    for family in trained:
        if (experts := find_experts(family)) is None or type(experts) in seen.values():
            continue
        seen[family] = type(experts)
        experts.to_empty(device="cpu").float()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.normal_(0, 0.3, generator=generator)
        stack = experts.gate_up_proj if experts.has_gate else experts.up_proj
        hidden = torch.randn(40, stack.shape[1 if experts.is_transposed else 2], generator=generator)
        ids = torch.rand(40, experts.num_experts, generator=generator).argsort(1)[:, :2]
        shares = torch.rand(ids.shape, generator=generator)
        want = experts(hidden, ids, shares)
        got = expert_products.compute_experts(experts, hidden, ids, shares)
        assert (got - want).norm() <= 1e-6 * want.norm(), family
    print(sorted(seen))
    assert len(seen) > 20


@pytest.mark.parametrize("bits", ["whole", "four"])
def test_without_rows_each_update_has_a_gradient_of_zero(bits, tmp_path):
    """As on a rank whose experts no token chose: the others wait for its part of their sums."""
    ours, _ = experts_of(tmp_path, "mixtral", bits == "four")
    hidden, ids, shares = choices("none")
    ours(hidden, ids, shares).sum().backward()
    updates = [parameter for name, parameter in ours.named_parameters() if "lora_" in name]
    assert hidden.grad.shape == (0, 64) and len(updates) == 4 and not any(p.grad.any() for p in updates)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("nested", [False, True])
def test_parts_of_any_number_of_experts_are_the_same(count, nested, tmp_path, monkeypatch):
    """To the bit; and nothing larger than a part is unpacked."""
    ours, _ = experts_of(tmp_path, "mixtral", True, nested)
    want = outcome(ours, choices("any"))
    monkeypatch.setattr(expert_products, "UNPACKED_BYTES", count * 256 * 64 * 4)  # of gate_up_proj
    real, unpacked = expert_products.unpack_nf4, []

    def unpack(*given):
        unpacked.append(real(*given))
        return unpacked[-1]

    monkeypatch.setattr(expert_products, "unpack_nf4", unpack)
    for got, wanted in zip(outcome(ours, choices("any")), want, strict=True):
        assert torch.equal(got, wanted)
    assert max(each.numel() for each in unpacked) == min(5, max(count, 1)) * 256 * 64


def test_planted_rows_of_the_part_before(tmp_path, monkeypatch):
    """As if each part began where the first does: seen where there are several."""
    ours, theirs = experts_of(tmp_path, "mixtral", True)
    monkeypatch.setattr(expert_products, "UNPACKED_BYTES", 1)
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda rows, matrix, out: real(rows.roll(1, 0), matrix, out=out))
    got, want = (outcome(each, choices("any"))[0] for each in (ours, theirs))
    assert (got - want).norm() > 0.1 * want.norm()


def test_no_unpacked_weight_is_kept_for_backward(tmp_path):
    ours, _ = experts_of(tmp_path, "mixtral", True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ours(*choices("any"))
    assert max(each.numel() for each in kept) == 5 * 256 * 64 // 8  # the packed bytes as fp32
