"""The recipe that evaluates a model: its run's own recipe, or a plain one for an export, a directory or a hub id."""

from pathlib import Path

from shardbook.ranks.launch import launch_ranks
from shardbook.ranks.machine import choose_nproc
from shardbook.recipe import Recipe, RecipeError, load_recipe, note_gone, parse_recipe

PLAIN = "[data]\nmax_length = 1024\nskip_untrainable = true\n[train]\nsteps = 1\n"
# One step and nothing beside it: of a run's reference only the rows that its steps reach are asked.
FIXED = ["train.steps=1", "train.epochs=0", "train.eval_steps=0", "train.compile=false", "train.profile_steps=[]"]
FIXED += ["train.resume_from_checkpoint=", "generate.steps=0", "run.report_to=none"]
# how a run names the rows that it holds out: the one that is given takes the place of the run's other one
HELD_OUT = {"data.eval": "data.eval_size=0", "data.eval_size": "data.eval="}
NONE = ("", "''", '""', "[]", "0", "0.0")  # how a word names no rows


def evaluation_recipe(model: str, words: list[str]) -> tuple[Recipe, Path | None]:
    """Returns the recipe that evaluates `model`, and its directory where it is a run's. `words`: overrides, among them
    the rows to evaluate in place of those that the run held out: data=ROWS, data.eval=ROWS, or data.eval_size, of the
    rows in data.train. Raises RecipeError without rows."""
    more = list[str]()
    for word in words:
        rows = word.removeprefix("data=")
        if rows == word or rows.startswith("{"):
            more.append(word)
        else:
            more += [f"data.train={rows}", f"data.eval={rows}", "data.eval_size=0", "data.weights=[]"]
    named = dict(word.partition("=")[::2] for word in more)
    for key, other in HELD_OUT.items():
        if named.get(key, "0") not in NONE and other.partition("=")[0] not in named:
            more.append(other)
    resolved = Path(model) / "resolved.toml"
    if is_run := resolved.is_file():
        recipe = load_recipe(resolved, FIXED + more, is_past=True)
    else:
        recipe = parse_recipe(PLAIN, model, [f"model.path={model}", *FIXED, *more])
    if not (recipe.data.eval or recipe.data.eval_size):
        raise RecipeError(f"eval {model}: " + "its run held no rows out; " * is_run + "name rows with data=FILE")
    return recipe, resolved.parent if is_run else None


def describe_rows(recipe: Recipe, run: Path | None) -> str:
    """Returns words on the rows that `recipe` evaluates where they are not those that the run held out; else none."""
    if run is None or rows_of(recipe) == (before := rows_of(load_recipe(run / "resolved.toml", is_past=True))):
        return ""
    return f"{rows_of(recipe)}, in place of {before or 'none'} of the run"


def rows_of(recipe: Recipe) -> str:
    """Returns the override that names the held-out rows of `recipe`; empty where there are none."""
    named = {f"data.{key}": getattr(recipe.data, key) for key in ("eval", "eval_size")}
    return " ".join(f"{key}={value}" for key, value in named.items() if value)


def launch_evaluation(model: str, words: list[str], nproc: int | None, is_json: bool) -> int:
    """Runs the ranks that evaluate `model`, by its recipe. Returns the exit code."""
    recipe, run = evaluation_recipe(model, words)
    if run:
        note_gone(run / "resolved.toml")
    nproc, words = choose_nproc(recipe.parallel, nproc), [model, *words, *(["--json"] * is_json)]
    return launch_ranks(nproc, words, module="shardbook.evaluate")
