"""The flags of a step: whether a rank was asked to stop, and how the save beside the steps goes, on all ranks.

Invariant: they are one sum of their own, begun when a step is launched and read before the next one is begun, so every
rank stops, and publishes, after the same step.
"""

from collections.abc import Callable
from typing import Protocol

from shardbook.ranks.distributed import begin_sum
from shardbook.ranks.signals import StopFlag


class SaveFlags(Protocol):
    """A save that ranks write beside their steps: three flags of this rank, and what their sums say of all."""

    def flags(self) -> list[float]: ...

    def take_flag_sums(self, sums: list[float]) -> None: ...


class StepFlags:
    """The flags of a run's steps. All ranks call `begin` and `stops` in turn."""

    def __init__(self, stop: StopFlag, saver: SaveFlags):
        self.stop, self.saver = stop, saver
        self._wait: Callable[[], list[float]]

    def begin(self) -> None:
        """Begins the sum of all ranks' flags. Collective."""
        self.stop.check_before_next_step = False
        self._wait = begin_sum(self.stop.asked, *self.saver.flags())

    def stops(self) -> bool:
        """Returns whether a rank was asked to stop, and hands on the sums of the save. Where an evaluation, samples or
        a save went by since `begin`, ranks ask each other once more. Collective."""
        stops, *of_save = self._wait()
        self.saver.take_flag_sums(of_save)
        if self.stop.check_before_next_step:
            (again,) = begin_sum(self.stop.asked)()
            stops += again
        return stops > 0
