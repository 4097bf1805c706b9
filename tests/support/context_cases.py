"""The cases of context parallel: beside every stage, and models whose heads do not divide among the ranks."""

import itertools

from cases import PAIRWISE, Case, layouts
from tensor_cases import MODELS, OPTIONS

LONG = ("data.max_length=256",)  # rows of several documents, which slices cut
THIRDS = ("data.max_length=252",)


def of_model(model: str, stage: str, replicas: int, shards: int, cp: int, **how) -> Case:
    return Case(stage, replicas, shards, tied=MODELS[model][1], cp=cp, model=model, **how)


def quick_cases() -> list[Case]:
    """Each stage beside cp 2 on two ranks, every pair of options among them, one over replicas, of
    five steps and three micro-batches; then what else is most unlike. The rest is in the slow run."""
    chosen = []
    for number, layout in enumerate(layouts(1)):
        picked = [values[pick] for values, pick in zip(OPTIONS, PAIRWISE[number % len(PAIRWISE)], strict=True)]
        chosen.append(Case(*layout, *picked, LONG, cp=2))
    return [
        *chosen,
        Case("hsdp", 2, 1, 3, True, False, extra=LONG, cp=2, steps=5),
        of_model("nine", "zero3", 1, 2, 2, micros=2, clips=True, checkpointing="every:2", extra=LONG),
        of_model("qwen3", "zero2", 1, 1, 2, micros=2, clips=True, extra=("data.packing=false",)),
        Case("zero3", 1, 1, 2, True, checkpointing="full", extra=LONG, cp=2, tp=2),
    ]


def covering_cases() -> list[Case]:
    """What else there is, each once: with quick_cases a covering set."""
    both = ("data.packing=false", "train.per_device_train_batch_size=2")
    chosen = [
        Case("zero1", 1, 2, clips=True, tied=False, checkpointing="full", extra=LONG, cp=2),
        Case("zero3", 1, 2, 2, True, checkpointing="full", extra=LONG, cp=2),
        Case("zero3", 1, 1, 2, checkpointing="selective", extra=LONG, cp=4),  # two heads of keys, four ranks
        Case("ddp", 2, 1, extra=LONG, cp=2),
        Case("zero2", 1, 2, 2, tied=False, checkpointing="full", cp=2),
        Case("zero3", 1, 1, 2, cp=3, extra=THIRDS),
        Case("hsdp", 1, 2, 2, True, cp=2),
        Case("ddp", 1, 1, 2, checkpointing="selective", cp=2, tp=2),
        of_model("six", "zero2", 1, 1, 4, clips=True, extra=("train.loss_chunk_tokens=16",)),
        of_model("nine", "zero1", 1, 1, 3, clips=True, extra=THIRDS),
        of_model("nine", "ddp", 1, 1, 4, checkpointing="full"),
        of_model("one", "zero2", 1, 1, 2),
        of_model("biased", "zero3", 1, 1, 2, micros=2, checkpointing="selective"),
        of_model("qwen2", "zero1", 1, 1, 2, extra=("train.per_device_train_batch_size=2",)),
        of_model("qwen3", "zero3", 1, 2, 2, micros=2, clips=True, extra=both[:1]),
        of_model("smollm3", "zero3", 1, 1, 2, extra=both),
        of_model("granite", "ddp", 1, 1, 2, micros=2, clips=True),
        of_model("mistral", "zero2", 1, 1, 2, micros=2, extra=("train.per_device_train_batch_size=2", *LONG)),
    ]
    return quick_cases() + chosen


def every_case() -> list[Case]:
    """The product of stages, sizes and options, and each model beside each number of ranks that it allows."""
    sizes, chosen = ((2, 1), (2, 2), (3, 1), (4, 1)), covering_cases()
    for cp, ranks in sizes:
        extra = THIRDS if cp == 3 else LONG
        options = list(itertools.product(*OPTIONS))
        chosen += [Case(*layout, *picked, extra, cp=cp) for layout in layouts(ranks) for picked in options]
        for model in MODELS:
            how = {"micros": 2, "extra": extra}
            chosen.append(of_model(model, "zero3", 1, ranks, cp, clips=True, checkpointing="full", **how))
            chosen.append(of_model(model, "zero1", 1, ranks, cp, checkpointing="selective", **how))
    return list(dict.fromkeys(chosen))
