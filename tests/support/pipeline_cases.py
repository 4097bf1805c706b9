"""The cases of pipeline parallel: beside every stage, every schedule, and the other axes."""

import itertools

from cases import PAIRWISE, Case, layouts
from tensor_cases import MODELS, OPTIONS

LONG = ("data.max_length=256",)  # rows of several documents, which slices cut


def deep(stage: str, replicas: int, shards: int, micros: int, tied: bool = True, **how) -> Case:
    """A model of seven blocks."""
    return Case(stage, replicas, shards, micros, tied=tied, model="deep" if tied else "deep-untied", **how)


def quick_cases() -> list[Case]:
    """Each stage beside two stages of a model, every pair of options among them, one over replicas, of five
    steps; then what else is most unlike. The rest is in the slow run."""
    chosen = []
    for number, layout in enumerate(layouts(1)):
        picked = [values[pick] for values, pick in zip(OPTIONS, PAIRWISE[number % len(PAIRWISE)], strict=True)]
        chosen.append(Case(*layout, *picked, pp=2, schedule=("1f1b", "gpipe")[number % 2]))
    return [
        *chosen,
        Case("hsdp", 2, 1, 3, True, False, pp=2, schedule="gpipe", steps=5),
        deep("zero3", 1, 1, 4, pp=2, chunks=2, schedule="interleaved", clips=True, checkpointing="full"),
        deep("zero2", 1, 1, 6, pp=4, extra=("data.packing=false",)),
        Case("zero3", 1, 1, 3, True, checkpointing="every:2", pp=2, tp=2),
    ]


def covering_cases() -> list[Case]:
    """What else there is, each once: with quick_cases a covering set."""
    chosen = [
        Case("ddp", 2, 1, pp=2, schedule="gpipe"),
        Case("zero1", 1, 2, 1, True, False, "full", pp=2),
        Case("zero2", 1, 2, 3, tied=False, checkpointing="full", pp=2, schedule="gpipe"),
        Case("zero3", 1, 2, 3, True, checkpointing="full", pp=2),
        deep("zero1", 1, 2, 2, tied=False, pp=2, chunks=3, schedule="interleaved"),
        Case("zero1", 1, 1, 3, True, False, "selective", extra=LONG, pp=2, cp=2),
        Case("hsdp", 1, 2, 3, True, pp=2),
        deep("ddp", 2, 1, 4, pp=2, chunks=2, schedule="interleaved", clips=True),
        deep("ddp", 1, 1, 4, tied=False, pp=4, schedule="gpipe", checkpointing="selective"),
        deep("zero2", 1, 1, 3, pp=3, clips=True, extra=("train.per_device_train_batch_size=2",)),
        deep("zero3", 1, 1, 2, pp=2, chunks=2, schedule="interleaved", tp=2, clips=True),
        deep("zero2", 1, 1, 2, tied=False, pp=2, chunks=2, schedule="interleaved", cp=2, extra=LONG),
        Case("zero2", 1, 1, 1, True, False, pp=2, tp=2),
        Case("zero3", 1, 1, 3, True, checkpointing="full", extra=LONG, pp=2, cp=2),
        *(of_model(model, "zero3", 1, 1, micros=3, clips=True) for model in ("qwen3", "granite", "smollm3")),
        of_model("biased", "zero1", 1, 2, micros=3, checkpointing="selective"),
        of_model("mistral", "zero2", 1, 1, extra=("data.packing=false", "train.per_device_train_batch_size=2")),
    ]
    return quick_cases() + chosen


def of_model(model: str, stage: str, replicas: int, shards: int, **how) -> Case:
    return Case(stage, replicas, shards, tied=MODELS[model][1], pp=2, model=model, **how)


def every_case() -> list[Case]:
    """The product of stages, sizes and options under each schedule, and each model."""
    chosen = covering_cases()
    for pp, ranks in ((2, 1), (2, 2), (3, 1)):
        options = list(itertools.product(*OPTIONS))
        for schedule in ("1f1b", "gpipe"):
            chosen += [
                Case(*layout, *picked, pp=pp, schedule=schedule) for layout in layouts(ranks) for picked in options
            ]
    for layout in (*layouts(1), *layouts(2)):
        for micros, clips, tied, kind in itertools.product((2, 4), *OPTIONS[1:]):
            how = {"clips": clips, "tied": tied, "checkpointing": kind}
            chosen.append(deep(*layout, micros, pp=2, chunks=2, schedule="interleaved", **how))
    chosen += [of_model(model, "zero3", 1, 2, micros=3, checkpointing="full") for model in MODELS]
    return list(dict.fromkeys(chosen))
