"""Python's garbage, collected in the same steps on every rank: whenever each likes, one rank's pause is everybody's."""

import contextlib
import gc
from collections.abc import Callable, Iterator

EVERY = 100  # steps


@contextlib.contextmanager
def collected_together() -> Iterator[Callable[[int], None]]:
    """Call what it gives in each step, when its work is on its way. After the first one what lives is never looked at
    again: modules, parameters and hooks of a 70B take a second."""
    was_on, first = gc.isenabled(), [True]

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
        gc.unfreeze()
        if was_on:
            gc.enable()
