"""LoRA beside tensor and pipeline parallel: numbers against transformers + peft in one process, bytes as predicted, and
files that know nothing of the axes."""

import copy
import dataclasses
import json
import shutil
from functools import cache

import pytest
import reference
import torch
from adapted import train_adapted, words_of, write_adapters
from cases import (
    TOLERANCE,
    Case,
    assert_case,
    assert_events,
    assert_exact_bytes,
    assert_parity,
    outcomes_of,
    relative_error,
    run_cases,
    same_bits,
)
from pairs import DIFFERENCE
from safetensors.torch import load_file
from tensor_cases import THIRDS
from tiny import write_pairs
from traced import traced
from world import losses, run_train, run_world, train_rank

from shardbook.local_tensors import local_part

peft = pytest.importorskip("peft")

ALL = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
OUTER = ["embed_tokens", "lm_head"]
KINDS = {  # peft's settings, and the model
    "all": (ALL, "model"),
    "rank-3": (ALL | {"r": 3}, "untied"),  # no number of ranks divides it
    "rslora": ({"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"], "use_rslora": True}, "model"),
    "saved": ({"r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "o_proj"], "modules_to_save": OUTER}, "untied"),
    "dora": ({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "use_dora": True}, "untied"),
    "nine": (ALL, "nine"),  # heads that two ranks do not share evenly, so attention's matrices stay whole
    "nine-dora": ({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj"], "use_dora": True}, "nine"),
    "biased": (ALL, "biased"),
    "deep": (ALL, "deep"),
}
TIED = {"untied": False, "biased": False}


def plain_model(models, kind: str):
    load = reference.AutoModelForCausalLM.from_pretrained
    return load(models / KINDS[kind][1], dtype=torch.float64, attn_implementation="eager")


@pytest.fixture(scope="module")
def adapters(models, tmp_path_factory):
    """Adapters of each kind as peft writes them, A and B (and magnitudes) at random."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapters(folder, KINDS, lambda kind: plain_model(models, kind))
    return folder


def of(kind: str, stage: str, replicas: int, shards: int, micros: int = 1, **how) -> tuple[str, Case]:
    model = KINDS[kind][1]
    return kind, Case(stage, replicas, shards, micros, tied=TIED.get(model, True), model=model, **how)


LOOPED = {"pp": 2, "chunks": 2, "schedule": "interleaved"}
QUICK = [
    of("all", "zero3", 1, 1, 2, clips=True, checkpointing="full", tp=2, steps=5),
    of("nine", "zero1", 1, 1, 1, checkpointing="selective", tp=2),
    of("saved", "zero2", 1, 1, 2, clips=True, tp=2),
    of("all", "zero3", 1, 1, 3, clips=True, checkpointing="full", pp=2, steps=5),
    of("deep", "zero1", 1, 1, 2, **LOOPED),
]
SLOW = [
    of("rank-3", "ddp", 1, 1, 1, checkpointing="every:2", tp=2),
    of("rslora", "zero3", 1, 1, 2, clips=True, checkpointing="full", tp=2),
    of("dora", "zero3", 1, 1, 2, clips=True, checkpointing="full", tp=2),
    of("nine-dora", "zero2", 1, 1, 1, tp=2),
    of("biased", "zero3", 1, 1, 2, clips=True, checkpointing="selective", tp=2),
    of("saved", "zero3", 1, 1, 2, checkpointing="full", pp=2),
    of("dora", "zero2", 1, 1, 3, clips=True, pp=2, schedule="gpipe"),
    of("rslora", "ddp", 1, 1, 2, checkpointing="selective", pp=2),
    of("rank-3", "zero1", 1, 1, 1, tp=3, extra=THIRDS),
    of("all", "zero3", 1, 2, 3, clips=True, checkpointing="full", tp=2),
    of("all", "hsdp", 2, 1, 2, clips=True, tp=2),
    of("all", "ddp", 2, 1, 1, tp=2),
    of("all", "zero3", 1, 1, 2, clips=True, checkpointing="full", tp=4),  # two heads of keys
    of("dora", "zero1", 1, 2, 1, checkpointing="selective", tp=2),
    of("saved", "zero3", 1, 2, 2, clips=True, checkpointing="full", tp=2),
    of("nine", "zero3", 1, 2, 2, clips=True, tp=2),
    of("all", "zero2", 1, 2, 3, clips=True, checkpointing="full", pp=2),
    of("rank-3", "ddp", 2, 1, 2, pp=2),
    of("all", "zero3", 1, 1, 3, clips=True, checkpointing="full", pp=2, tp=2),
    of("deep", "zero3", 1, 1, 2, clips=True, tp=2, **LOOPED),
    of("biased", "zero2", 1, 1, 2, pp=2, tp=2, checkpointing="selective"),
]


@pytest.fixture(scope="module")
def outcomes(recipe, models, adapters, tmp_path_factory, request):
    """The outcomes of a case by rank; the first case of a world runs all of that world's that were asked for."""
    results = tmp_path_factory.mktemp("results")
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    asked = [item.callspec.params["case"] for item in items if "case" in item.callspec.params]

    @cache
    def run(world: int) -> None:
        chosen = [adapted(*each, adapters) for each in asked if each[1].world == world]
        assert run_world(world, run_cases, recipe, models, chosen, results) == [[]] * world

    def found(case: Case):
        run(case.world)
        return outcomes_of(case, results)

    return found


def adapted(kind: str, case: Case, adapters) -> Case:
    """The case, beginning with an adapter of that kind."""
    return Case(**vars(case) | {"extra": (*case.extra, *words_of(KINDS[kind][0], adapters / kind))})


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)],
    ids=lambda each: f"{each[0]}-{each[1].name}",
)
def test_it_is_peft_in_one_process(case, adapters, recipe, models, outcomes):
    kind, plain = case
    run, tolerance = adapted(kind, plain, adapters), TOLERANCE * (4 if plain.pp > 1 < plain.tp else 1)
    want = train_adapted(plain_model(models, kind), adapters / kind, recipe, models, run)
    worst = assert_case(run, outcomes(run), want, tolerance)
    assert_events(outcomes(run))
    print(f"\nworst {worst:.1e}  {kind} {plain.name}")


SAVING = ("optim.eps=1e-3", "optim.lr_scheduler_type=constant", "train.save_steps=2", "train.eval_steps=2")
SPLIT = {  # six rows a step in each: world, words
    "one": (1, ["train.gradient_accumulation_steps=6"]),
    "tp2": (2, ["parallel.tp_size=2", "train.gradient_accumulation_steps=6"]),
    "pp2": (2, ["parallel.pp_size=2", "train.gradient_accumulation_steps=6"]),
    "tp2 x dp2": (4, ["parallel.tp_size=2", "train.gradient_accumulation_steps=3"]),
    "pp2 x tp2": (4, ["parallel.pp_size=2", "parallel.tp_size=2", "train.gradient_accumulation_steps=6"]),
    "looped": (
        2,
        [
            "parallel.pp_size=2",
            "parallel.pipeline_schedule=interleaved",
            "parallel.pipeline_chunks=2",
            "train.gradient_accumulation_steps=6",
        ],
    ),
}


def run_as(recipe, layout: str, name: str, steps: int, *words: str):
    world, split = SPLIT[layout]
    return run_train(world, recipe, name, f"train.steps={steps}", *SAVING, *words, *split)


def trained_of(run) -> dict[str, torch.Tensor]:
    """An export's tensors, as peft names them."""
    return load_file(run / "export" / "adapter_model.safetensors")


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert max(relative_error(ours[name], theirs[name]) for name in theirs) < TOLERANCE


def test_one_process_goes_on_from_what_two_saved(recipe, models):
    """Each a checkpoint of peft's whole tensors, and an export of them."""
    words = ("lora.r=4", "lora.lora_alpha=8")
    straight = run_as(recipe, "tp2", "straight", 4, *words)
    elsewhere = straight.parent / "elsewhere"
    shutil.copytree(straight, elsewhere, ignore=shutil.ignore_patterns("export", "run.json", "step-000004"))
    run_as(recipe, "one", elsewhere.name, 4, *words)
    assert losses(elsewhere) == pytest.approx(losses(straight), rel=TOLERANCE)
    assert_near(trained_of(elsewhere), trained_of(straight))


WAYS = [
    ("tp2", "model", ()),
    ("pp2", "untied", ("lora.modules_to_save=[lm_head]",)),
    ("tp2 x dp2", "untied", ("lora.modules_to_save=[embed_tokens]",)),
    ("tp2 x dp2", "untied", ("lora.use_dora=true", "lora.target_modules=[q_proj,up_proj]")),
    ("pp2 x tp2", "nine", ()),
    ("looped", "deep", ("lora.use_dora=true",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "model", "words"), WAYS)
def test_files_know_nothing_of_the_axes(layout, model, words, recipe, models, tmp_path):
    """Beginning with new adapters: it resumes bitwise, one process goes on from its checkpoint and it from one
    process's, and what it exports peft loads, and `--merge` merges."""
    from shardbook.cli import main

    words = ("lora.r=4", "lora.lora_alpha=8", f"model.path={models}/{model}", *words)
    stem = f"{layout}-{model}-{len(words)}".replace(" ", "")
    straight = run_as(recipe, layout, f"{stem}-straight", 4, *words)
    parts = run_as(recipe, layout, f"{stem}-parts", 2, *words)
    one = run_as(recipe, "one", f"{stem}-one", 4, *words)
    half = run_as(recipe, "one", f"{stem}-half", 2, *words)
    elsewhere, back = (straight.parent / f"{stem}-{name}" for name in ("elsewhere", "back"))
    for source, run in ((parts, elsewhere), (half, back)):
        shutil.copytree(source, run, ignore=shutil.ignore_patterns("export", "run.json"))
    run_as(recipe, layout, parts.name, 4, *words)
    run_as(recipe, "one", elsewhere.name, 4, *words)
    run_as(recipe, layout, back.name, 4, *words)
    assert losses(parts)[-2:] == losses(straight)[-2:]
    assert all(torch.equal(value, trained_of(straight)[name]) for name, value in trained_of(parts).items())
    for run in (straight, elsewhere, back):
        assert losses(run) == pytest.approx(losses(one), rel=TOLERANCE)
        assert_near(trained_of(run), trained_of(one))
    settings = [json.loads((run / "export" / "adapter_config.json").read_text()) for run in (straight, one)]
    assert settings[0] == settings[1]
    base = reference.AutoModelForCausalLM.from_pretrained(models / model, dtype=torch.float32)
    logits = [
        peft.PeftModel.from_pretrained(copy.deepcopy(base), run / "export").eval()(torch.arange(3, 60)[None]).logits
        for run in (straight, one)
    ]
    assert relative_error(*logits) < TOLERANCE
    assert main(["export", str(straight), "--merge", "--dtype", "fp32", "--out", str(tmp_path / "merged")]) == 0
    merged = reference.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert relative_error(merged(torch.arange(3, 60)[None]).logits, logits[0]) < TOLERANCE
    said = run_world(1, train_rank, [str(recipe), f"run.name={parts.name}", "train.steps=5", *words, "lora.r=8"])
    assert said[0][0] == 2 and "is of another model" in said[0][2]


def drawn_rows_of(words):
    """Planted bug: each rank takes the first columns of what is drawn, not its own."""
    from shardbook.model import adapters

    real = adapters.local_box

    def first_columns(tensor, *name):
        box = real(tensor, *name)
        return dataclasses.replace(box, offsets=(box.offsets[0], *[0] * (len(box.offsets) - 1)))

    adapters.local_box = first_columns
    return train_rank(words)


@pytest.mark.slow
def test_planted_the_wrong_columns_are_drawn(recipe, tiny):
    words = [str(recipe), "lora.r=4", "train.steps=3", "parallel.tp_size=2", *SAVING]
    assert [code for code, *_ in run_world(2, drawn_rows_of, [*words, "run.name=wrong-columns"])] == [0, 0]
    right = run_train(2, recipe, "right-columns", *words[1:])
    wrong = losses(recipe.parent / "wrong-columns")
    assert wrong[0] == losses(right)[0] and wrong[2] != pytest.approx(losses(right)[2], rel=TOLERANCE)


def loads_the_wrong_columns():
    from shardbook.model import adapter_files

    real = adapter_files.local_box
    adapter_files.local_box = lambda tensor: dataclasses.replace(
        box := real(tensor), offsets=tuple(0 for _ in box.sizes)
    )


def high_is_not_summed():
    """B of a row-parallel matrix, the same on each rank, keeps its partial gradient."""
    from shardbook.parallel import sharding

    real = sharding.sum_replicated_gradients

    def sums_some(model, mesh, layout):
        kept = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name and p.grad is not None}
        before = {name: local_part(grad).clone() for name, grad in kept.items()}
        real(model, mesh, layout)
        for name, grad in kept.items():
            local_part(grad).copy_(before[name])

    sharding.sum_replicated_gradients = sums_some


def planted(bug, *given):
    bug()
    return run_cases(*given)


@pytest.mark.parametrize("bug", [loads_the_wrong_columns, pytest.param(high_is_not_summed, marks=pytest.mark.slow)])
def test_a_planted_bug_turns_it_red(bug, recipe, models, adapters, tmp_path):
    kind, plain = of("all", "zero3", 1, 1, 1, clips=True, tp=2)
    case = adapted(kind, plain, adapters)
    assert run_world(2, planted, bug, recipe, models, [case], tmp_path) == [[], []]
    with pytest.raises(AssertionError, match=r"e-|losses|gradient|drifted"):
        want = train_adapted(plain_model(models, kind), adapters / kind, recipe, models, case)
        assert_case(case, outcomes_of(case, tmp_path), want)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("optim.name=adamw_bf16", "precision.master=bf16")], ids=["fp32", "bf16"])
def test_a_pipeline_has_the_bits_of_one_stage(words, recipe, models, adapters, tmp_path):
    """Frozen weights are not tied by gradients, so nothing is added in another order, nor rounded in another way."""
    orders = [{}, {"pp": 2, "schedule": "gpipe"}, LOOPED]
    found = []
    for order in orders:
        case = adapted(*of("deep", "zero3", 1, 1, 4, extra=words, **order), adapters)
        assert run_world(case.world, run_cases, recipe, models, [case], tmp_path) == [[]] * case.world
        found.append(outcomes_of(case, tmp_path))
        assert_exact_bytes(found[-1])
    assert all(same_bits(other[0].result, found[0][0].result) for other in found[1:])


PAIRS = ("method=dpo", "data.max_length=96", "lora.r=4", "lora.lora_alpha=8", "optim.learning_rate=1e-3")


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("preference.precompute_ref_log_probs=false",)], ids=["before", "in each step"])
def test_preferences_are_those_of_one_process(words, recipe, tmp_path):
    """The reference is the base without its adapters, in each step or before the first."""
    file, split = write_pairs(tmp_path / "pairs.jsonl", 24), ["parallel.tp_size=2"]
    more = (*PAIRS, *words, f"data.train={file}", "train.steps=3", "train.gradient_accumulation_steps=2")
    one, two = (run_train(world, recipe, f"dpo-{len(words)}-{world}", *more, *split[: world - 1]) for world in (1, 2))
    assert losses(two) == pytest.approx(losses(one), rel=DIFFERENCE) and losses(one)[2] != losses(one)[0]
    assert max(relative_error(w, trained_of(one)[name]) for name, w in trained_of(two).items()) < 10 * DIFFERENCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "dora"])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_compiled_it_is_the_same(axes, kind, recipe, models, adapters, tmp_path):
    cases = []
    for words in ((), ("train.compile=true",)):
        _, plain = of(kind, "zero3", 1, 1, 2, clips=True, checkpointing="full", extra=words, **axes)
        cases.append(adapted(kind, plain, adapters))
    assert run_world(2, traced, run_cases, recipe, models, cases, tmp_path) == [[], []]
    plain, compiled = [outcomes_of(case, tmp_path) for case in cases]
    assert_parity(compiled[0].result, plain[0].result)
    assert_exact_bytes(compiled)


FIRST = {  # what of the first block has adapters: its backward sends the less the later the first of them is
    "q": ["q_proj"],
    "o": ["o_proj"],
    "gate": ["gate_proj", "down_proj"],
    "down": ["down_proj"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "full", "selective"])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"cp": 2}, {"pp": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_before_the_first_adapter_no_gradient_is_sent(axes, kind, recipe, models, tmp_path):
    words = [(*words_of(ALL | {"target_modules": names}, ""), "precision.frozen=bf16") for names in FIRST.values()]
    cases = [Case("zero3", 1, 1, 2, True, checkpointing=kind, extra=each, **axes) for each in words]
    world = cases[0].world
    assert run_world(world, run_cases, recipe, models, cases, tmp_path) == [[]] * world
    for case in cases:
        found = outcomes_of(case, tmp_path)
        assert_exact_bytes(found)
        assert_events(found)
