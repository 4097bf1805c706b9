"""The saver of a run that ends by a number that is not finite."""

from types import SimpleNamespace

import pytest

from shardbook.ranks.exits import RunFailed
from shardbook.run.checkpoint.save import Saver
from shardbook.run.log.step_log import NotFinite


def test_a_save_that_fails_then_is_told_and_hides_nothing(capfd):
    def finish():
        raise RunFailed("checkpoint of step 2: cannot be written (OSError: No space left on device)")

    saver = object.__new__(Saver)
    saver.async_save = SimpleNamespace(finish=finish)
    with pytest.raises(NotFinite, match=r"^step 3"), saver:
        raise NotFinite("step 3: train/loss is nan")
    assert capfd.readouterr().out == (
        "warning  checkpoint of step 2: cannot be written (OSError: No space left on device)\n"
    )
