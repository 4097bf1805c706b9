"""Bad steps: counts the steps whose gradient norm is NaN or infinite, which change nothing, and names their ranks and
rows.

Invariant: counted on the device and read with the loss, so the host waits no more often than without; every rank reads
the same counts, so all end the run at the same step.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.data.loader import Loader
from shardbook.ranks.exits import RunFailed
from shardbook.run.checkpoint import TrainState

COUNTS = 3  # bad steps in a row up to now, the most in a row, and in all; the first since the last read follows


class BadSteps:
    """Counts the bad steps of a run that goes on from `state`. More than `allowed` in a row end it. `tell`: takes a
    line for people."""

    def __init__(
        self, loader: Loader, state: TrainState, allowed: int, device: torch.device, tell: Callable[[str], None]
    ):
        self.loader, self.allowed, self.tell = loader, allowed, tell
        self.known = float(state.log.get("bad_steps", 0))  # in all, those of the launches before too
        self.alone = False  # set where the other ranks may have ended: what this one knows must do
        self.rows_before = loader.consumed_rows - state.step * loader.rows_per_step
        self.losses: list[Tensor] = []
        # after the counts: the first bad step since the last read, and for each of its micro-batches on this rank
        # whether the loss was not finite
        self.counts = torch.zeros(COUNTS + 1 + loader.accumulation, dtype=torch.float64, device=device)
        self.counts[COUNTS - 1] = self.known

    def watch(self, passes: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yields the terms of a step's micro-batches, and keeps their losses."""
        self.losses = []
        for terms in passes:
            if terms.ndim:  # else of a pipeline stage without a loss, which yields a zero for each of its chunks
                self.losses.append(terms[0])
            yield terms

    def count(self, step: int, norm: Tensor) -> None:
        """Counts `step` by its gradient norm, on the device."""
        bad = (~torch.isfinite(norm.to(self.counts.device, non_blocking=True))).double()
        in_a_row, most, total, first = self.counts[: COUNTS + 1].unbind()
        in_a_row = (in_a_row + 1) * bad
        flags = torch.zeros_like(self.counts[COUNTS + 1 :])
        if self.losses:
            flags = (~torch.isfinite(torch.stack(self.losses))).double()
        this = torch.cat([torch.full_like(flags[:1], step), flags])
        first = torch.where((first == 0) * bad > 0, this, self.counts[COUNTS:])
        self.counts = torch.cat([torch.stack([in_a_row, torch.maximum(most, in_a_row), total + bad]), first])

    def take(self) -> Tensor:
        """Returns the counts for `read`, on the device; the next bad step is the first one again."""
        taken = self.counts
        self.counts = torch.cat([taken[:COUNTS], torch.zeros_like(taken[COUNTS:])])
        return taken

    def read(self, step: int, counts: list[float], said: str) -> float:
        """Returns the number of bad steps so far, and tells of those since the last read. Raises RunFailed where too
        many were in a row. `said`: the loss and the norm of `step`, with which the `counts` were read. Collective where
        one was."""
        _, most, total, first, *flags = counts
        new, self.known = total - self.known, total
        if new:
            where = self._locate(int(first), [micro for micro, flag in enumerate(flags) if flag])
            if most > self.allowed:
                earlier = f"step {first:.0f}, the first whose norm was not finite: " * (first < step)
                raise RunFailed(f"step {step}: {said}; lower optim.learning_rate, or look at {earlier}{where}")
            which = f"step {first:.0f}" if new == 1 else f"{new:.0f} steps from step {first:.0f} on"
            self.tell(f"left out {which}: the gradient norm is not finite; {where}")
        return total

    def _locate(self, step: int, micros: list[int]) -> str:
        """Returns a line that names the ranks whose losses in `step` are not finite, and their rows; else all rows."""
        before = self.rows_before + (step - 1) * self.loader.rows_per_step
        own = ", ".join(self.loader.name_rows(before, micro) for micro in micros)
        everyone = [own]
        if not self.alone:
            everyone = [""] * dist.get_world_size()
            dist.all_gather_object(everyone, own)
        if found := [f"rank {rank}: {rows}" for rank, rows in enumerate(everyone) if rows]:
            return "; ".join(found[:3]) + f"; and {len(found) - 3} more ranks" * (len(found) > 3)
        rows = f"rows {before} to {before + self.loader.rows_per_step - 1} of the run"
        return f"{rows}: every loss is finite, so it arose in backward"
