"""How many files of the package a step passes through as it runs: what someone opens who follows a micro-batch."""

import sys
from pathlib import Path

import pytest
from planted import replace
from world import run_world, train_rank

SPLIT = ("parallel.stage=zero3", "parallel.tp_size=2", "parallel.pp_size=2", "train.gradient_accumulation_steps=2")


def visited_files(words: list[str]) -> list[str]:
    """The files below the package whose functions are called in the second step, of which no call is the first."""
    import shardbook
    from shardbook.parallel.step import run_step as real

    files, steps = set[str](), list[int]()

    def note(frame, event, _):
        if event == "call":
            files.add(frame.f_code.co_filename)

    def run_step(*given, **named):
        steps.append(len(steps))
        sys.setprofile(note if len(steps) == 2 else None)
        try:
            return real(*given, **named)
        finally:
            sys.setprofile(None)

    replace(real, run_step)
    assert train_rank(words)[0] == 0
    package = Path(shardbook.__file__).parent
    return sorted(str(Path(file).relative_to(package)) for file in files if Path(file).is_relative_to(package))


# As many as now: none may be added. Twelve are the aim.
@pytest.mark.parametrize(
    ("size", "words", "most"), [(2, ("parallel.stage=zero3",), 13), pytest.param(4, SPLIT, 19, marks=pytest.mark.slow)]
)
def test_a_micro_batch_passes_through_few_files(recipe, size, words, most):
    name = f"run.name=walk-{size}"
    walks = run_world(size, visited_files, [str(recipe), name, "train.steps=2", "data.eval_size=0", *words])
    assert max(map(len, walks)) <= most, walks
