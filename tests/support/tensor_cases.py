"""The cases of tensor parallel: beside every stage, and models whose heads do not divide or whose blocks hold more."""

import itertools
from pathlib import Path

from cases import CHECKPOINTING, CLIPS, MICROS, PAIRWISE, TIED, Case, layouts
from tiny import write_model

NINE = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}  # as SmolLM2-135M
# name -> (family, tied, what else); beside "model" and "untied", which have 4 heads and 2 of keys and values
MODELS = {
    "nine": ("llama", True, NINE),
    "six": ("llama", False, NINE | {"num_attention_heads": 6}),
    "one": ("llama", True, {"num_key_value_heads": 1}),
    "biased": ("llama", False, {"attention_bias": True, "mlp_bias": True}),
    "nine-biased": ("llama", True, NINE | {"attention_bias": True}),
}
MODELS |= {family: (family, family != "qwen2", {}) for family in ("qwen2", "qwen3", "smollm3", "granite", "mistral")}
SAID = {  # of those, for a table
    "nine": "llama, 9 heads, 3 of keys",
    "six": "llama, 6 heads, 3 of keys",
    "one": "llama, 4 heads, 1 of keys",
    "biased": "llama with biases",
    "nine-biased": "llama, 9 heads, with biases",
}
SAID |= {name: name for name in MODELS if name not in SAID}
THIRDS = ("data.max_length=126",)  # a row's tokens divide by three
OPTIONS = MICROS, CLIPS, TIED, CHECKPOINTING


def write_models(folder: Path) -> None:
    for tied in (True, False):  # with blocks for many stages, which do not go round
        write_model(folder / ("deep" if tied else "deep-untied"), tied=tied, num_hidden_layers=7)
    for name, (family, tied, changes) in MODELS.items():
        write_model(folder / name, family, tied, 259 if tied else 287, **changes)


def of_model(model: str, stage: str, replicas: int, shards: int, tp: int, **how) -> Case:
    return Case(stage, replicas, shards, tied=MODELS[model][1], tp=tp, model=model, **how)


def quick_cases() -> list[Case]:
    """Each stage beside tp 2 on two ranks, every pair of options among them, one over replicas, of
    five steps and three micro-batches; then what else is most unlike. The rest is in the slow run."""
    chosen = []
    for number, layout in enumerate(layouts(1)):
        picked = [values[pick] for values, pick in zip(OPTIONS, PAIRWISE[number % len(PAIRWISE)], strict=True)]
        chosen.append(Case(*layout, *picked, tp=2))
    return [
        *chosen,
        Case("hsdp", 2, 1, 3, True, False, tp=2, steps=5),
        of_model("nine", "zero3", 1, 2, 2, micros=2, clips=True, checkpointing="every:2"),
        Case("zero3", 1, 1, 2, tp=3, extra=THIRDS),  # its heads whole
        of_model("biased", "zero3", 1, 1, 2, micros=2, checkpointing="selective"),
        of_model("qwen3", "zero3", 1, 1, 2, micros=2, clips=True, extra=("data.packing=false",)),
    ]


def covering_cases() -> list[Case]:
    """What else there is, each once: with quick_cases a covering set."""
    both = ("data.packing=false", "train.per_device_train_batch_size=2")
    chosen = [
        Case("zero1", 1, 2, clips=True, tied=False, checkpointing="full", tp=2),
        Case("zero3", 1, 2, 2, True, checkpointing="full", tp=2),
        Case("zero3", 1, 1, 2, checkpointing="selective", tp=4),  # two heads of keys, four ranks
        of_model("six", "zero2", 1, 1, 4, clips=True, extra=("train.loss_chunk_tokens=16",)),
        of_model("nine", "zero1", 1, 1, 3, clips=True, extra=THIRDS),  # cut
        of_model("qwen2", "zero1", 1, 1, 2, extra=("train.per_device_train_batch_size=2",)),
        Case("ddp", 2, 1, tp=2),
        Case("zero2", 1, 2, 2, tied=False, checkpointing="full", tp=2),
        Case("hsdp", 1, 2, 2, True, tp=2),
        of_model("nine-biased", "ddp", 1, 1, 4, checkpointing="full"),
        of_model("one", "zero2", 1, 1, 2),
        of_model("qwen3", "zero3", 1, 2, 2, micros=2, clips=True, extra=both[:1]),
        of_model("smollm3", "zero3", 1, 1, 2, extra=both),
        of_model("granite", "ddp", 1, 1, 2, micros=2, clips=True),
        of_model("mistral", "zero2", 1, 1, 2, micros=2),
    ]
    return quick_cases() + chosen


def every_case() -> list[Case]:
    """The product of stages, sizes and options, and each model beside each number of ranks that it allows."""
    sizes, chosen = ((2, 1), (2, 2), (3, 1), (4, 1)), covering_cases()
    for tp, ranks in sizes:
        extra = THIRDS if tp == 3 else ()
        options = list(itertools.product(*OPTIONS))
        chosen += [Case(*layout, *picked, extra, tp) for layout in layouts(ranks) for picked in options]
        for model in MODELS:
            how = {"micros": 2, "extra": extra}
            chosen.append(of_model(model, "zero3", 1, ranks, tp, clips=True, checkpointing="full", **how))
            chosen.append(of_model(model, "zero1", 1, ranks, tp, checkpointing="selective", **how))
    return list(dict.fromkeys(chosen))
