"""The commands that only read and write files: export, push, init and recipes."""

import sys
from pathlib import Path

from shardbook.recipe import RecipeError, find_recipe, list_recipes, load_recipe, note_gone


def run_export(run: Path, checkpoint: Path | None, out: Path | None, dtype: str | None, merges: bool) -> int:
    """Writes a checkpoint as a Hugging Face directory, one 5 GB file in memory at a time, without a process group."""
    _check_run(run)
    recipe = load_recipe(run / "resolved.toml", is_past=True)
    from shardbook.run.result.export import export_run

    note_gone(run / "resolved.toml")
    export_run(run, recipe, checkpoint, out, dtype or recipe.train.export_dtype, merges)
    return 0


def run_push(run: Path, repo: str, public: bool, export: Path | None) -> int:
    """Sends a finished run's result to the Hub, in one commit."""
    _check_run(run)
    from shardbook.ranks.exits import RunFailed
    from shardbook.run.result.hub import push_run

    try:
        print(f"{run} -> {push_run(run, repo, public, export)}")
    except RunFailed as error:
        print(f"shardbook: {error}", file=sys.stderr)
        return 1
    return 0


def _check_run(run: Path) -> None:
    if not (run / "resolved.toml").is_file():
        raise RecipeError(f"{run}: not a run directory (no resolved.toml in it)")


def run_init(file: Path, of: str) -> int:
    """Writes a copy of the recipe `of`, whose run is named after the file."""
    if file.suffix != ".toml":
        file = file.with_name(f"{file.name}.toml")
    if file.exists():
        raise RecipeError(f"{file}: is there already; name another file")
    source = find_recipe(of)
    lines = source.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(("# run:", "# predicted:", "# measured:"))]
    file.write_text("".join([f"# From {source.stem}.\n# run: shardbook train {file}\n", *kept]))
    print(f"{file}: a copy of {source.stem}; shardbook train --help lists every key")
    return 0


def show_recipes() -> int:
    recipes = list_recipes()
    width = max(map(len, recipes), default=0)
    for name, path in recipes.items():
        print(f"{name:<{width}}  {path.read_text().splitlines()[0].removeprefix('#').strip()}")
    return 0
