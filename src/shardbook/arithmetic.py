"""Whole numbers: rounded up, for counts of shards, blocks and rows, and steps that are due. Imports nothing of this
package."""


def ceil_div(count: int, by: int) -> int:
    """Returns how many parts of `by` hold `count`: the quotient, rounded up."""
    return -(-count // by)


def round_up(count: int, multiple: int) -> int:
    """Returns the least multiple of `multiple` that is not below `count`."""
    return ceil_div(count, multiple) * multiple


def is_due(step: int, every: int) -> bool:
    """Returns whether `step` is one of those that come `every` so many; never where that is 0."""
    return every > 0 and step % every == 0
