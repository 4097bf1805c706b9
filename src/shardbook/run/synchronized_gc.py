"""Python's garbage collector, run in the same steps on every rank: else each rank's pause makes all others wait."""

import contextlib
import gc
from collections.abc import Callable, Iterator

EVERY = 100  # steps


@contextlib.contextmanager
def synchronized_gc() -> Iterator[Callable[[int], None]]:
    """Yields a function to call in each step, when its work is launched. Objects alive at the first call are never
    scanned again: modules, parameters and hooks of a 70B take a second."""
    was_on, frozen, first = gc.isenabled(), gc.get_freeze_count(), [True]

    def after(step: int) -> None:
        if first:
            first.clear()
            gc.collect()
            gc.freeze()
            gc.disable()
        elif step % EVERY == 0:
            gc.collect()

    try:
        yield after
    finally:
        if not frozen:  # else whoever forked this process had frozen all that it shares, and a scan copies its pages
            gc.unfreeze()
        if was_on:
            gc.enable()
