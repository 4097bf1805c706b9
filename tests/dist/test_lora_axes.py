"""LoRA beside tensor and pipeline parallel: numbers against transformers + peft in one process, bytes as predicted, and
files that know nothing of the axes."""

from functools import cache

import pytest
import reference
import torch
from adapted import train_adapted, words_of, write_adapters
from cases import TOLERANCE, Case, assert_case, assert_events, assert_exact_bytes, outcomes_of, run_cases
from tensor_cases import THIRDS
from world import run_world

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
