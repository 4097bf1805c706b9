"""Sums over the slices of a row, which context-parallel ranks have: losses of pairs are functions of whole sequences.

Invariant: what is summed here is the same on every rank that has a slice, and so is each term that is made of it.
"""

from collections.abc import Callable

from torch import Tensor

# Sums what each slice has of every sequence, fp32 [sequences], over slices; a gradient passes as it is, since each rank
# goes backward into its own slice. Collective.
SumSlices = Callable[[Tensor], Tensor]


def of_one_slice(part: Tensor) -> Tensor:
    """Returns `part`: where rows are not split it is the sum."""
    return part
