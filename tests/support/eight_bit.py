"""torchao, which `make` puts into a folder of its own: what can be imported transformers imports, in every process."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "8bit"


def add_torchao() -> bool:
    """Make it importable in this process. Returns whether it is there."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.util.find_spec("torchao") is not None
