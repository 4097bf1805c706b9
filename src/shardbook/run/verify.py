"""Verifies the checkpoints of a run, without torch and without ranks."""

from pathlib import Path

from shardbook.recipe import RecipeError
from shardbook.run.stored_items import in_gb, list_checkpoints, verify
from shardbook.terminal import print_line


def verify_run(run: Path) -> int:
    """Reads every checkpoint of a run directory, newest first, and prints a line for each. Returns the exit code: 1
    where one is damaged or not read."""
    found, code = list_checkpoints(run / "checkpoints"), 0
    if not found:
        raise RecipeError(f"{run}: has no checkpoint; name a run directory with checkpoints/step-<n>")
    for path in found:
        try:
            verify(path)
            size = in_gb(sum(each.stat().st_size for each in path.iterdir()))
            print_line(f"checkpoint {path}: whole, {size}")
        except (RecipeError, OSError) as error:
            there = path.exists()
            code = max(code, int(there))
            print_line(error if there else f"checkpoint {path}: its run has removed it meanwhile")
    return code
