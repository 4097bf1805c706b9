"""The cases of pipeline parallel: beside every stage, every schedule, and the other axes."""

import itertools

from cases import PAIRWISE, Case, layouts
from tensor_cases import MODELS, OPTIONS

LONG = ("data.max_length=256",)  # rows of several documents, which slices cut


def quick_cases() -> list[Case]:
    """Each stage on two stages of a model, every pair of options among them; then each other thing once."""
    every = [*layouts(1), *layouts(2)[:4], ("hsdp", 2, 1)]
    chosen = []
    for number, layout in enumerate(every):
        picked = [values[pick] for values, pick in zip(OPTIONS, PAIRWISE[number % len(PAIRWISE)], strict=True)]
        chosen.append(Case(*layout, *picked, pp=2, schedule=("1f1b", "gpipe")[number % 2]))
    return chosen


def covering_cases() -> list[Case]:
    return quick_cases()


def every_case() -> list[Case]:
    return covering_cases()
