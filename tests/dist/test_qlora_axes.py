"""QLoRA beside tensor and pipeline parallel: numbers against transformers + peft on a base that an independent NF4
rounded, the very bytes of one process, cut."""

import dataclasses

import pytest
import reference
import torch
from adapted import train_adapted, words_of, write_adapters, write_rounded
from cases import (
    TOLERANCE,
    Case,
    assert_events,
    assert_exact_bytes,
    assert_parity,
    assert_replicas_agree,
    equal_bytes,
    outcomes_of,
    run_cases,
    same_bits,
)
from traced import traced
from world import losses, run_train, run_world

peft = pytest.importorskip("peft")

EVEN = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
THREE = {"hidden_size": 192, "intermediate_size": 256, "head_dim": 64} | dict.fromkeys(
    ("num_attention_heads", "num_key_value_heads"), 3
)
MODELS = {
    "model": (True, EVEN),
    "untied": (False, EVEN),
    "three": (True, THREE),  # heads that two ranks do not share evenly
    "deep": (True, EVEN | {"num_hidden_layers": 7}),
    "biased": (False, EVEN | {"attention_bias": True, "mlp_bias": True}),
}
ALL = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
SOME = ALL | {"target_modules": ["q_proj", "down_proj"]}
DORA = ALL | {"target_modules": ["q_proj", "up_proj"], "use_dora": True}
SAVED = SOME | {"modules_to_save": ["lm_head"]}
KINDS = {"all": (ALL, "model"), "some": (SOME, "three"), "three": (ALL, "three"), "dora": (DORA, "untied")}
KINDS |= {"saved": (SAVED, "untied"), "deep": (ALL, "deep"), "biased": (ALL, "biased")}
KINDS |= {"three-dora": (ALL | {"target_modules": ["k_proj", "q_proj", "up_proj"], "use_dora": True}, "three")}
FOUR, DOUBLE = "model.load_in_4bit=true", "model.bnb_4bit_use_double_quant=true"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Each model as files and, in `rounded`, with the matrices of blocks in NF4."""
    folder = tmp_path_factory.mktemp("base")
    for name, (tied, facts) in MODELS.items():
        write_rounded(folder, name, tied=tied, vocab=259 if tied else 287, **facts)
    return folder


def rounded(base, kind: str):
    load = reference.AutoModelForCausalLM.from_pretrained
    return load(base / "rounded" / KINDS[kind][1], dtype=torch.float64, attn_implementation="eager")


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    write_adapters(folder, KINDS, lambda kind: rounded(base, kind))
    return folder


def of(kind: str, adapters, stage: str, replicas: int, shards: int, micros: int = 1, **how) -> Case:
    settings, model = KINDS[kind]
    words = (FOUR, *words_of(settings, adapters / kind), *how.pop("words", ()))
    return Case(stage, replicas, shards, micros, tied=MODELS[model][0], model=model, extra=words, **how)


LOOPED = {"pp": 2, "chunks": 2, "schedule": "interleaved"}
QUICK = [
    ("all", ("zero3", 1, 1, 2), {"clips": True, "checkpointing": "full", "tp": 2, "steps": 5}),
    ("three", ("zero1", 1, 1, 1), {"checkpointing": "selective", "tp": 2}),
    ("all", ("zero3", 1, 1, 2), {"clips": True, "checkpointing": "full", "pp": 2, "steps": 5}),
]
SLOW = [
    [
        ("some", ("zero2", 1, 1, 2), {"clips": True, "tp": 2}),
        ("dora", ("zero3", 1, 1, 2), {"clips": True, "checkpointing": "full", "tp": 2}),
        ("three-dora", ("ddp", 1, 1, 1), {"tp": 2}),
        ("biased", ("zero3", 1, 1, 1), {"checkpointing": "every:2", "tp": 2}),
        ("saved", ("zero1", 1, 1, 2), {"clips": True, "tp": 2}),
        ("saved", ("zero1", 1, 1, 2), {"clips": True, "pp": 2, "schedule": "gpipe"}),
        ("deep", ("zero3", 1, 1, 2), {"checkpointing": "selective", **LOOPED}),
        ("dora", ("zero2", 1, 1, 2), {"pp": 2}),
    ],
    [
        ("all", ("zero3", 1, 2, 2), {"clips": True, "checkpointing": "full", "tp": 2}),
        ("three", ("zero3", 1, 2, 1), {"tp": 2}),
        ("all", ("hsdp", 2, 1, 2), {"clips": True, "tp": 2}),
        ("all", ("zero2", 1, 2, 2), {"clips": True, "pp": 2}),
        ("all", ("zero3", 1, 1, 3), {"clips": True, "checkpointing": "full", "pp": 2, "tp": 2}),
        ("deep", ("zero1", 1, 1, 2), {"tp": 2, **LOOPED}),
    ],
]


def is_packed(name: str) -> bool:
    return ".layers." in name and name.endswith("_proj.weight")


@pytest.mark.parametrize("asked", [QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_it_is_peft_on_the_rounded_base(asked, recipe, tiny, base, adapters, tmp_path):
    cases = [of(kind, adapters, *layout, **how) for kind, layout, how in asked]
    world = cases[0].world
    assert run_world(world, run_cases, recipe, base, cases, tmp_path) == [[]] * world
    for (kind, *_), case in zip(asked, cases, strict=True):
        want = train_adapted(rounded(base, kind), adapters / kind, recipe, tiny, case)
        want = dataclasses.replace(want, weights={n: w for n, w in want.weights.items() if not is_packed(n)})
        found, tolerance = outcomes_of(case, tmp_path), TOLERANCE * (4 if case.pp > 1 < case.tp else 1)
        print(f"\nworst {assert_parity(found[0].result, want, tolerance, case.name):.1e}  {kind} {case.name}")
        assert_replicas_agree(found)
        assert_exact_bytes(found)
        assert_events(found)


def bytes_of(result) -> dict[str, torch.Tensor]:
    return {name: w for name, w in result.weights.items() if name.endswith(("weight_packed", "weight_absmax"))}


def without_bytes(result: reference.Result) -> reference.Result:
    weights = {name: weight for name, weight in result.weights.items() if name not in bytes_of(result)}
    return dataclasses.replace(result, weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), (DOUBLE,), (DOUBLE, "precision.params=bf16")], ids=" ".join)
@pytest.mark.parametrize("kind", ["all", "three"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"tp": 2, "shards": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_the_bytes_are_those_of_one_process(layout, kind, words, recipe, base, adapters, tmp_path):
    """Also where scales are quantised by the largest of a whole row; then the numbers are one process's too."""
    layout = {"shards": 1} | layout
    micros = 4 // layout["shards"]
    one = of(kind, adapters, "zero3", 1, 1, 4, clips=True, words=words)
    case = of(kind, adapters, "zero3", 1, layout.pop("shards"), micros, clips=True, words=words, **layout)
    for each in (one, case):
        assert run_world(each.world, run_cases, recipe, base, [each], tmp_path) == [[]] * each.world
    want, found = outcomes_of(one, tmp_path)[0].result, outcomes_of(case, tmp_path)
    assert bytes_of(want).keys() == bytes_of(found[0].result).keys() and len(bytes_of(want)) == 2 * 7 * 3
    assert all(equal_bytes(value, bytes_of(found[0].result)[name]) for name, value in bytes_of(want).items())
    assert_exact_bytes(found)
    if "precision.params=bf16" not in words:
        numbers = [without_bytes(result) for result in (found[0].result, want)]
        assert_parity(*numbers, TOLERANCE * (4 if case.pp > 1 < case.tp else 1))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_compiled_it_is_the_same(axes, recipe, base, adapters, tmp_path):
    how = {"clips": True, "checkpointing": "full"} | axes
    cases = [of("all", adapters, "zero3", 1, 1, 2, words=words, **how) for words in ((), ("train.compile=true",))]
    assert run_world(2, traced, run_cases, recipe, base, cases, tmp_path) == [[], []]
    plain, compiled = [outcomes_of(case, tmp_path) for case in cases]
    numbers = [without_bytes(found[0].result) for found in (compiled, plain)]
    assert_parity(*numbers)
    assert_exact_bytes(compiled)


def under_cudas_rule(*given):
    """On each rank: run_cases where copies of bf16 are CUDA's, each NaN one pattern."""
    real = torch._foreach_copy_

    def as_cuda(into, source, *more):
        real(into, source, *more)
        if into[0].dtype == source[0].dtype == torch.bfloat16:
            for one in into:
                bits = one.view(torch.int16)
                bits[((bits & 0x7F80) == 0x7F80) & ((bits & 0x7F) != 0)] = 0x7FFF

    torch._foreach_copy_ = as_cuda
    return run_cases(*given)


@pytest.mark.slow
def test_bytes_arrive_where_copies_know_only_one_nan(recipe, base, adapters, tmp_path):
    for words in ((), (DOUBLE,)):
        case = of("all", adapters, "zero3", 1, 2, 2, words=(*words, "precision.params=bf16"), tp=2)
        results = []
        for run in (run_cases, under_cudas_rule):
            (folder := tmp_path / f"{run.__name__}-{len(words)}").mkdir()
            assert run_world(4, run, recipe, base, [case], folder) == [[]] * 4
            results.append(outcomes_of(case, folder)[0].result)
        assert same_bits(*results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["parallel.tp_size=2"], ["parallel.pp_size=2", "train.gradient_accumulation_steps=2"]]
)
def test_resume_is_bitwise_and_random_weights_are_one_process(words, recipe, base):
    stem = words[0][9:11]
    saving = ("lora.r=4", FOUR, DOUBLE, "model.init=random", f"model.path={base / 'model'}", "train.save_steps=2")
    saving += ("optim.lr_scheduler_type=constant",)
    straight = run_train(2, recipe, f"{stem}-whole", "train.steps=4", *saving, *words)
    run_train(2, recipe, f"{stem}-parts", "train.steps=2", *saving, *words)
    resumed = run_train(2, recipe, f"{stem}-parts", "train.steps=4", *saving, *words)
    assert losses(resumed)[-2:] == losses(straight)[-2:]
    one = run_train(1, recipe, f"{stem}-one", "train.steps=4", *saving, *words[1:])
    assert losses(one) == pytest.approx(losses(straight), rel=TOLERANCE)
