"""Shardbook: FSDP2/DTensor-native fine-tuning recipes for large language models.

For your own training loop, `shard_model` puts any module under a named stage, and `plan_module` says what a step of it
takes (docs/library.md). Importing the package does nothing else: no signal is handled, and no torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardbook.recipe import Parallel, Precision, RecipeError

if TYPE_CHECKING:
    from shardbook.optim.clip import clip_gradients
    from shardbook.parallel.library import shard_model
    from shardbook.parallel.sharding import ShardedModel
    from shardbook.plan.module import ModulePlan, plan_module

__all__ = [
    "ModulePlan",
    "Parallel",
    "Precision",
    "RecipeError",
    "ShardedModel",
    "clip_gradients",
    "plan_module",
    "shard_model",
]
HOMES = {"shard_model": "parallel.library", "ShardedModel": "parallel.sharding", "clip_gradients": "optim.clip"}
HOMES |= dict.fromkeys(("plan_module", "ModulePlan"), "plan.module")
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Imports the names that need torch on their first use, so that a command line is refused in milliseconds."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardbook.comm.versions import check_versions

    check_versions()  # of an older torch the import would fail in words of its own
    return getattr(import_module(f"shardbook.{HOMES[name]}"), name)
