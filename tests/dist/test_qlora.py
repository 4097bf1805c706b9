"""QLoRA on every stage: numbers against transformers + peft on a base that an independent NF4 rounded, bytes as
predicted, shards, checkpoints and refusals."""

import dataclasses
import hashlib
import itertools
import json
from functools import cache

import pytest
import reference
import torch
from adapted import ours, write_adapters, write_rounded
from cases import (
    DECAY,
    MAX_NORM,
    RATE,
    Case,
    assert_exact_bytes,
    assert_parity,
    assert_replicas_agree,
    documents_of_steps,
    expected_traffic,
    outcomes_of,
    run_cases,
    same_bits,
)
from traced import traced
from world import losses, run_train, run_world, train_rank

peft = pytest.importorskip("peft")

SHAPE = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}  # whole blocks of 64
FOUR = "model.load_in_4bit=true"
KINDS = {  # peft's settings, and whether the model is tied
    "all": ({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}, True),
    "dora": ({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "use_dora": True}, False),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """`model` (tied) and `untied`, each as files and, in `rounded`, with the matrices of blocks in NF4."""
    folder = tmp_path_factory.mktemp("base")
    for name, changes in {"model": {}, "untied": {"tied": False, "vocab": 287}}.items():
        write_rounded(folder, name, **changes, **SHAPE)
    return folder


def rounded(base, kind: str):
    folder = base / "rounded" / ("model" if KINDS[kind][1] else "untied")
    return reference.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Adapters of each kind as peft writes them, A and B (and magnitudes) at random."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapters(folder, KINDS, lambda kind: rounded(base, kind))
    return folder


def words_of(kind: str, adapters) -> tuple[str, ...]:
    settings, _ = KINDS[kind]
    words = [f"lora.{key}={json.dumps(value)}".replace('"all-linear"', "all-linear") for key, value in settings.items()]
    return (FOUR, *words, f"lora.adapter={adapters / kind}")


@pytest.fixture(scope="module")
def wanted_of(recipe, tiny, base, adapters):
    """What transformers + peft make of a case's data."""

    @cache
    def train(kind: str, rows: int, clips: bool) -> reference.Result:
        model = peft.PeftModel.from_pretrained(rounded(base, kind), adapters / kind, is_trainable=True)
        steps = documents_of_steps(recipe, tiny, rows)

        def loss_of(step):
            parts = [reference.document_loss(model, document) for document in steps[step]]
            return sum(part for part, _ in parts) / sum(count for _, count in parts)

        result = reference.descend(model, loss_of, len(steps), RATE, DECAY, MAX_NORM if clips else 0.0)
        result.gradients = [{ours(name): g for name, g in found.items()} for found in result.gradients]
        result.weights = {ours(name): weight for name, weight in result.weights.items()}
        return result

    return lambda case, kind: train(kind, case.world * case.micros, case.clips)


LAYOUTS = [("ddp", 2, 1), ("zero1", 1, 2), ("zero2", 1, 2), ("zero3", 1, 2), ("hsdp", 2, 1), ("hsdp", 1, 2)]
OPTIONS = [(1, False, "none"), (3, True, "full"), (1, True, "selective"), (2, False, "none")]


def cases_of(kind: str, adapters) -> list[Case]:
    options = itertools.cycle(OPTIONS if kind == "all" else OPTIONS[1:] + OPTIONS[:1])
    layouts = [*LAYOUTS, ("ddp", 1, 1), ("zero3", 1, 1)]
    return [
        Case(*layout, *two, KINDS[kind][1], kept, words_of(kind, adapters))
        for layout in layouts
        for *two, kept in [next(options)]
    ]


def is_packed(name: str) -> bool:
    return ".layers." in name and name.endswith("_proj.weight")


def without_packed(result: reference.Result) -> reference.Result:
    return dataclasses.replace(result, weights={n: w for n, w in result.weights.items() if not is_packed(n)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "dora"])
def test_every_stage_is_peft_on_the_rounded_base(kind, recipe, tiny, base, adapters, wanted_of, tmp_path):
    cases = cases_of(kind, adapters)
    for world in (1, 2):
        chosen = [case for case in cases if case.world == world]
        assert run_world(world, run_cases, recipe, base, chosen, tmp_path) == [[]] * world
    for case in cases:
        outcomes, want = outcomes_of(case, tmp_path), wanted_of(case, kind)
        assert_parity(outcomes[0].result, without_packed(want))
        assert_replicas_agree(outcomes)
        assert_exact_bytes(outcomes)
        # four bits a number and an fp32 for each 64, in tensors of fp32
        shapes = {
            n: torch.Size((w.shape[0], w.shape[1] // 8 + w.shape[1] // 64)) if is_packed(n) else w.shape
            for n, w in want.weights.items()
        }
        measured = {key: (volume.calls, volume.payload_bytes) for key, volume in outcomes[0].traffic[0].items()}
        assert measured == expected_traffic(case, shapes, set(want.gradients[0]))
        kept = outcomes[0].result.weights
        assert not any(is_packed(name) for name in kept) and any(name.endswith("weight_packed") for name in kept)


@pytest.mark.slow
def test_two_ranks_bitwise(recipe, base, adapters, tmp_path):
    for micros, classes in ((1, [["ddp", "zero1", "zero2", "zero3"]]), (3, [["ddp", "zero1"], ["zero2", "zero3"]])):
        cases = {
            s: Case(s, *((2, 1) if s == "ddp" else (1, 2)), micros, extra=words_of("all", adapters))
            for s in itertools.chain(*classes)
        }
        assert run_world(2, run_cases, recipe, base, list(cases.values()), tmp_path) == [[], []]
        for group in classes:
            first, *others = [outcomes_of(cases[stage], tmp_path)[0].result for stage in group]
            assert all(same_bits(first, other) for other in others)


@pytest.mark.slow
def test_any_number_of_ranks_holds_the_same_bytes(recipe, base, adapters, tmp_path):
    extra = (*words_of("all", adapters), "model.bnb_4bit_use_double_quant=true")
    found = []
    for ranks in (1, 2, 3, 4):
        case = Case("zero3", 1, ranks, extra=extra)
        assert run_world(ranks, run_cases, recipe, base, [case], tmp_path) == [[]] * ranks
        found.append(outcomes_of(case, tmp_path)[0].result.weights)
        assert_exact_bytes(outcomes_of(case, tmp_path))
    packed = [name for name in found[0] if name.endswith(("weight_packed", "weight_absmax"))]
    assert len(packed) == 2 * 7 * 3
    for others in found[1:]:
        assert all(torch.equal(found[0][name].view(torch.uint8), others[name].view(torch.uint8)) for name in packed)


@pytest.mark.parametrize("stage", ["ddp", pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_under_bf16_it_keeps_and_sends_what_is_predicted(stage, recipe, base, adapters, tmp_path):
    extra = (*words_of("all", adapters), "precision.params=bf16", "model.bnb_4bit_use_double_quant=true")
    case = Case(stage, *((2, 1) if stage == "ddp" else (1, 2)), 3, extra=extra)
    assert run_world(2, run_cases, recipe, base, [case], tmp_path) == [[], []]
    assert_exact_bytes(outcomes_of(case, tmp_path))
    weights = outcomes_of(case, tmp_path)[0].result.weights
    assert {w.dtype for n, w in weights.items() if "lora" not in n} == {torch.bfloat16}


def run_under_cudas_rule(recipe, base, cases, results, planted=None):
    """On each rank: run_cases where copies of bf16 are CUDA's, each NaN one pattern. Returns its errors, and digests of
    all packed bytes that products met."""
    from shardbook.model import adapters

    planted and planted()
    copy, product, met = torch._foreach_copy_, adapters.packed_product, set()

    def as_cuda(into, source, *more):
        copy(into, source, *more)
        if into[0].dtype == source[0].dtype == torch.bfloat16:
            for one in into:
                bits = one.view(torch.int16)
                bits[((bits & 0x7F80) == 0x7F80) & ((bits & 0x7F) != 0)] = 0x7FFF

    def noting(module, *given):
        met.update((digest(module.weight_packed), digest(module.weight_absmax)))
        return product(module, *given)

    torch._foreach_copy_, adapters.packed_product = as_cuda, noting
    return run_cases(recipe, base, cases, results), met


def digest(tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().clone().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def assert_bytes_arrive(layouts, recipe, base, adapters, tmp_path, planted=None):
    """Whatever CUDA does to numbers: what products meet are the bytes at rest, and every result is the same."""
    extra = (*words_of("all", adapters), "precision.params=bf16")
    switches = {"zeropp": ("parallel.quantize_gradients=[8, 8]",)}
    cases = [Case(*layout, 3, extra=(*extra, *switches.get(layout[0], ()))) for layout in layouts]
    world, (plain, ruled) = cases[0].world, (tmp_path / "plain", tmp_path / "ruled")
    plain.mkdir(), ruled.mkdir()
    assert run_world(world, run_cases, recipe, base, cases, plain) == [[]] * world
    for errors, met in run_world(world, run_under_cudas_rule, recipe, base, cases, ruled, planted):
        assert not errors
        for case in cases:
            want = outcomes_of(case, plain)[0].result
            assert met == {digest(w) for n, w in want.weights.items() if n.endswith(("_packed", "_absmax"))}
    for case in cases:
        assert same_bits(outcomes_of(case, ruled)[0].result, outcomes_of(case, plain)[0].result)
        assert_exact_bytes(outcomes_of(case, ruled))


@pytest.mark.parametrize(
    "layouts",
    [
        [("zero1", 1, 2), ("zero3", 1, 2)],
        pytest.param([("zero2", 1, 2)], marks=pytest.mark.slow),
        pytest.param([("hsdp", 2, 2), ("zeropp", 1, 4)], marks=pytest.mark.slow),
        pytest.param([("zero3", 1, 3)], marks=pytest.mark.slow),  # shards of unlike length
    ],
)
def test_bytes_arrive_where_copies_know_only_one_nan(layouts, recipe, base, adapters, tmp_path):
    assert_bytes_arrive(layouts, recipe, base, adapters, tmp_path)


def gathered_as_numbers():
    from shardbook.parallel import sharding

    sharding.gather_bytes = lambda unit: None


def test_planted_gathered_as_numbers_they_do_not(recipe, base, adapters, tmp_path):
    with pytest.raises(AssertionError, match="Extra items"):
        assert_bytes_arrive([("zero3", 1, 2)], recipe, base, adapters, tmp_path, gathered_as_numbers)


@pytest.mark.slow
def test_compiled_it_is_the_same(recipe, base, adapters, tmp_path):
    words = words_of("all", adapters)
    cases = [Case("zero3", 1, 2, 3, extra=words), Case("zero3", 1, 2, 3, extra=(*words, "train.compile=true"))]
    assert run_world(2, traced, run_cases, recipe, base, cases, tmp_path) == [[], []]
    plain, compiled = [outcomes_of(case, tmp_path)[0] for case in cases]
    assert_parity(compiled.result, plain.result)
    assert_exact_bytes([compiled])


@pytest.mark.slow
def test_resume_is_bitwise_and_other_bits_are_another_base(recipe, base, tmp_path):
    words = ("lora.r=4", FOUR, f"model.path={base / 'model'}", "optim.lr_scheduler_type=constant", "train.save_steps=2")
    straight = run_train(2, recipe, "whole", "train.steps=4", *words)
    run_train(2, recipe, "parts", "train.steps=2", *words)
    resumed = run_train(2, recipe, "parts", "train.steps=4", *words)
    assert losses(resumed)[-2:] == losses(straight)[-2:]
    shapes = json.loads((recipe.parent / "parts" / "checkpoints" / "step-000002" / "state.json").read_text())["shapes"]
    assert all("lora" in name for name in shapes)
    for change in ("model.load_in_4bit=false", "model.bnb_4bit_use_double_quant=true"):
        assert "holds adapters of another base model" in refusal(
            recipe, "run.name=parts", "train.steps=5", *words, change
        )


@pytest.mark.slow
def test_random_weights_are_those_of_the_same_seed_rounded(recipe, base, tmp_path):
    """And what begins with B = 0 begins with the rounded base's loss."""
    words = ("lora.r=4", "model.init=random", f"model.path={base / 'model'}", "train.steps=1", "train.save_steps=0")
    in_four, whole = (
        losses(run_train(1, recipe, name, *words, *more))[0] for name, more in (("four", (FOUR,)), ("all", ()))
    )
    assert in_four != whole and in_four == pytest.approx(whole, rel=0.02)


def refusal(recipe, *words: str) -> str:
    """The one line that one rank ends with, exit code 2."""
    ((code, _, said),) = run_world(1, train_rank, [str(recipe), "run.name=refused", "train.steps=1", *words])
    assert code == 2 and said.startswith("shardbook: ") and said.count("\n") == 1, said
    return said


REFUSED = {
    FOUR: "four bits cannot be trained; set lora.r=16",
    f"lora.r=4 {FOUR} parallel.stage=zeropp parallel.quantize_weights=8": "leave parallel.quantize_weights out",
    f"lora.r=4 {FOUR} parallel.stage=zeropp parallel.secondary_shard=2": "leave parallel.secondary_shard out",
    f"lora.r=4 {FOUR} parallel.stage=hsdp parallel.secondary_shard=node": "= 'node': torch keeps no secondary shard",
    "lora.r=4 model.bnb_4bit_use_double_quant=true": "nothing is in 4 bits",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(words, recipe):
    from shardbook.recipe import RecipeError, load_recipe

    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, words.split())
    assert REFUSED[words] in str(caught.value) and "\n" not in str(caught.value)


def test_a_width_of_no_whole_blocks_is_refused_before_anything_is_built(recipe):
    assert "have 32 numbers; must be a multiple of 64" in refusal(recipe, "lora.r=4", FOUR)
