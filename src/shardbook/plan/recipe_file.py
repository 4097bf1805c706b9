"""The advised recipe as a file: what differs from the defaults, and beside each key that the advice changed, why.

Invariant: the file loads to the recipe that was advised.
"""

from pathlib import Path

from shardbook.plan.report import Report, describe_path, settings
from shardbook.recipe import RecipeError, dump_recipe, flatten_recipe

REASONS = {  # by the key or section that the advice changed
    "parallel.stage": "the fastest stage that fits",
    "parallel": "with it a step is faster, or fits",
    "offload.path": "a directory on a local disk of each node",
    "offload": "the GPUs alone have not the memory",
    "activation": "the cheapest recompute with which activations fit",
    "train": "the fastest split of a step's rows that fits",
}


def write_recipe_file(report: Report, path: Path) -> None:
    """Writes the advised recipe to `path`. Raises RecipeError where nothing fits, or it cannot be written."""
    if report.advice.best is None:
        raise RecipeError(f"--write {path}: {report.advice.why}")
    asked, cluster = report.planner.recipe, report.cluster
    recipe = report.advice.best.recipe.model_copy(update={"precision": report.asked})  # with its `auto`
    before, changed = flatten_recipe(asked), settings(report.advice.best)
    comments = [
        f"{asked.model.path}: the fastest that fits {cluster.gpus} x {report.gpu_name}, as `shardbook plan` has it."
    ]
    comments += [f"{cluster.words()}; {cluster.node_words()}.", f"{report.advice.why}.", *describe_path(report)]
    lines, section = [f"# {line}" for line in comments], ""
    for line in dump_recipe(recipe, with_defaults=False).splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        key = f"{section}.{line.partition(' = ')[0]}"
        if key in changed and before[key] != changed[key]:
            why = REASONS.get(key) or REASONS[section]
            line += f"  # {why}" + f"; it was {before[key]}" * (before[key] != "")
        lines.append(line)
    try:
        path.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise RecipeError(f"--write {path}: cannot be written ({error.strerror})") from None
