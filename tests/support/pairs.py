"""What tests of pairs share: rows as the reference wants them, and runs that were cut off."""

import shutil

from cases import STEPS, TOLERANCE
from world import metrics

# A pair's gradient is the difference of two, the sum of whose sizes is 2 to 6 times its own here: so is their rounding.
DIFFERENCE = 4 * TOLERANCE


def pairs_of_steps(recipe, tiny, words, rows, steps=STEPS):
    """The pairs of each of `steps` steps of `rows` rows, as the reference wants them."""
    return [[pair for row in step for pair in row] for step in pair_rows_of_steps(recipe, tiny, words, rows, steps)]


def answers_of_first(recipe, tiny, words, rows):
    """The answers in each of the `rows` rows of the first step, by which traffic along tp, cp and pp is counted."""
    (first,) = pair_rows_of_steps(recipe, tiny, words, rows, 1)
    return [[answer for pair in row for answer in pair] for row in first]


def pair_rows_of_steps(recipe, tiny, words, rows, steps=STEPS):
    """The same by row."""
    from transformers import AutoTokenizer

    from shardbook.data.loader import Batching, Loader
    from shardbook.data.tokenized import build_documents
    from shardbook.recipe import load_recipe

    data = load_recipe(recipe, words).data
    documents, _ = build_documents(data, AutoTokenizer.from_pretrained(tiny / "model"), tiny / "model", 2)
    loader = Loader(documents, Batching(data.max_length * 2, 1, 0, 1, sequences=2), rows, seed=42)
    picked = [[loader.row_at(step * rows + row) for row in range(rows)] for step in range(steps)]

    def pair(number):
        document = documents.encoded[number]
        ids, mask, cut = document["input_ids"], document["mask"], document["lengths"][0]
        return (ids[:cut], mask[:cut]), (ids[cut:], mask[cut:])

    return [[[pair(number) for number in row] for row in step] for step in picked]


def all_but_speed(run):
    """Nor what only the first step after a start says."""
    return [{name: value for name, value in row.items() if name[:5] in ("train", "eval/")} for row in metrics(run)]


def go_on_from(straight, name, step, keep=True):
    """A copy of the straight run as it was after `step` (0: during the pass over the reference)."""
    run = straight.parent / name
    shutil.copytree(straight, run, ignore=shutil.ignore_patterns("export"))
    for later in (run / "checkpoints").iterdir():
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    (run / "run.json").unlink()
    if not keep:
        (run / "reference.npz").unlink()
    return run
