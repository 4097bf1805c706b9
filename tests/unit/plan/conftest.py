"""Fake tensors of a process of its own, which the tests of a room share."""

from concurrent.futures import ProcessPoolExecutor

import pytest
from world import forks


@pytest.fixture(scope="module")
def apart():
    """Runs a function in a process of its own: a process has one process group, and other tests may have made it."""
    with ProcessPoolExecutor(1, mp_context=forks()) as pool:
        yield lambda function, *words: pool.submit(function, *words).result(240)
