"""Shardbook: FSDP2/DTensor-native fine-tuning recipes for large language models.

For a loop of one's own: `shard_model` puts any module under a named stage (docs/library.md).
"""

from typing import TYPE_CHECKING, Any

from shardbook.recipe import Parallel, Precision, RecipeError

if TYPE_CHECKING:
    from shardbook.parallel.library import shard_model
    from shardbook.parallel.sharding import ShardedModel

__all__ = ["Parallel", "Precision", "RecipeError", "ShardedModel", "shard_model"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for: a command line is refused in milliseconds."""
    if name == "shard_model":
        from shardbook.parallel.library import shard_model

        return shard_model
    if name == "ShardedModel":
        from shardbook.parallel.sharding import ShardedModel

        return ShardedModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
