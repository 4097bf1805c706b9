"""Adapters of stacked experts, also on a base in four bits, under the stages and expert parallel: against transformers
and peft in one plain process; bytes; files both ways; planted bugs; what is refused."""

import dataclasses

import pytest
import reference
import torch
from adapted import train_adapted, with_stacks, words_of, write_adapters
from cases import (
    Case,
    assert_events,
    assert_exact_bytes,
    assert_parity,
    assert_replicas_agree,
    outcomes_of,
    run_cases,
)
from families import write_family
from transformers import AutoModelForCausalLM
from world import run_world

peft = pytest.importorskip("peft")

STACKS = ["gate_up_proj", "down_proj"]
EXPERTS = 4
SETTINGS = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": [f"experts.{name}" for name in STACKS],
}
EP, FOUR, DOUBLE = "parallel.ep_size=2", "model.load_in_4bit=true", "model.bnb_4bit_use_double_quant=true"
# whole blocks of 64
WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
CASES = [
    Case("zero3", 1, 2, 3, True, checkpointing="selective", extra=(EP,)),
    Case("ddp", 2, 1, 2, True, extra=(EP,)),
    Case("zero1", 1, 2, 2, checkpointing="full", extra=(EP,)),
    Case("zero2", 1, 2, 1),
    Case("zero3", 1, 2, 2, True, checkpointing="full"),
]
FOUR_RANKS = [
    Case("zero3", 1, 4, 2, True, checkpointing="selective", extra=(EP,)),
    Case("hsdp", 2, 2, 2, extra=(EP,)),
    Case("ddp", 4, 1, 1, extra=("parallel.ep_size=4",)),
    Case("zero3", 1, 2, 2, True, cp=2, extra=("parallel.ep_size=4",)),
    Case("zero3", 1, 2, 4, pp=2, checkpointing="full", extra=(EP,)),
]
# a shared expert beside; matrices the other way round, and biases
FAMILIES = ["mixtral", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen2_moe", "gpt_oss"))]


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def write_base(folder, family: str, is_rounded: bool):
    """A family's model in `folder`/model and, beside it, what peft trains (with the packed matrices in NF4), and an
    adapter of peft's."""
    write_family(folder / "model", family, **(WIDE if is_rounded else {}))
    model = plain_model(folder / "model")
    if is_rounded:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("_proj.weight", "experts.gate_up_proj", "experts.down_proj")):
                    parameter.copy_(reference.nf4(parameter))
    model.save_pretrained(folder / "plain")
    write_adapters(folder, {"adapter": (SETTINGS,)}, lambda kind: plain_model(folder / "plain"))
    return folder


def with_adapter(folder, cases: list[Case], *words: str) -> list[Case]:
    return [
        dataclasses.replace(each, extra=(*each.extra, *words_of(SETTINGS, folder / "adapter"), *words))
        for each in cases
    ]


def wanted_of(folder, recipe, tiny, case: Case) -> reference.Result:
    """What peft makes of it, by our names; of a base in four bits the adapters alone are compared."""
    result = train_adapted(
        plain_model(folder / "plain"),
        folder / "adapter",
        recipe,
        tiny,
        case,
        lambda tensors: with_stacks(tensors, STACKS, EXPERTS),
    )
    if FOUR in case.extra:
        result.weights = {name: tensor for name, tensor in result.weights.items() if "lora" in name}
    return result


def assert_as_peft(folder, cases: list[Case], recipe, tiny, results) -> None:
    wanted = {}
    for case in cases:
        found = outcomes_of(case, results)
        assert_replicas_agree(found)
        assert_exact_bytes(found)
        if case.cp == 1:
            assert_events(found)
        key = case.rows, case.clips
        if key not in wanted:
            wanted[key] = wanted_of(folder, recipe, tiny, case)
        assert_parity(found[0].result, wanted[key], case=case.name)
        trained = {name.rpartition(".experts.")[2] for name in found[0].result.gradients[0] if ".experts." in name}
        assert trained == {f"{stack}_lora_{letter}" for stack in STACKS for letter in "AB"}


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_are_peft_to_a_millionth(family, recipe, tiny, tmp_path):
    folder = write_base(tmp_path, family, False)
    cases = with_adapter(folder, CASES)
    assert run_world(2, run_cases, recipe, folder, cases, tmp_path) == [[], []]
    assert_as_peft(folder, cases, recipe, tiny, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_four_bits_they_are_peft_on_the_rounded_base(family, recipe, tiny, tmp_path):
    folder = write_base(tmp_path, family, True)
    cases = with_adapter(folder, CASES, FOUR)
    assert run_world(2, run_cases, recipe, folder, cases, tmp_path) == [[], []]
    assert_as_peft(folder, cases, recipe, tiny, tmp_path)
    for case in cases:
        kept = outcomes_of(case, tmp_path)[0].result.weights
        assert not any(name.endswith(("_proj.weight", *STACKS)) for name in kept)
        assert kept["model.layers.0.mlp.experts.down_proj_packed"].shape[0] == EXPERTS * 64


@pytest.mark.slow
@pytest.mark.parametrize("four", [(), (FOUR,)], ids=["whole", "four bits"])
def test_four_ranks_share_them_along_every_axis(four, recipe, tiny, tmp_path):
    folder = write_base(tmp_path, "mixtral", bool(four))
    cases = with_adapter(folder, FOUR_RANKS, *four)
    assert run_world(4, run_cases, recipe, folder, cases, tmp_path) == [[]] * 4
    assert_as_peft(folder, cases, recipe, tiny, tmp_path)
