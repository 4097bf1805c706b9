"""What is planted is met wherever the package imported the real one by name, and can be taken back."""

from importlib import import_module

import pytest
from planted import replace

PLACES = [import_module(f"shardbook.{name}") for name in ("parallel.sharding", "plan.simulate", "run.build")]


def test_a_plant_is_met_wherever_it_was_imported_and_taken_back():
    def planted(*given):
        raise NotImplementedError

    real = PLACES[0].apply_stage
    replace(real, planted)
    assert [place.apply_stage for place in PLACES] == [planted] * 3
    replace(planted, real)
    assert [place.apply_stage for place in PLACES] == [real] * 3


def test_a_plant_that_replaces_nothing_is_seen():
    with pytest.raises(AssertionError, match="no module of the package has"):
        replace(lambda: None, None)
