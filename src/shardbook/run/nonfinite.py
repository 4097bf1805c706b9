"""The first step whose gradient norm is NaN or infinite ends the run, with its ranks and rows.

Invariant: it is remembered on the device and read with a row, so the host waits no more often than without; the norm is
the same on every rank, so all ranks end the run at the same read. It does not ask weights: a checkpoint does.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.data.loader import Loader
from shardbook.ranks.exits import RunFailed


class FirstNonFinite:
    """Remembers the first step whose norm is not finite, in a run that has done `step` steps."""

    def __init__(self, loader: Loader, step: int, device: torch.device):
        self.loader = loader
        self.alone = False  # set where the other ranks may have ended: what this one knows must do
        self.rows_before = loader.consumed_rows - step * loader.rows_per_step
        # the step (0: none yet), and for each of its micro-batches on this rank whether the loss was not finite
        self.first = torch.zeros(1 + loader.accumulation, dtype=torch.float64, device=device)

    def note(self, step: int, norm: Tensor, terms: list[Tensor]) -> None:
        """Remembers `step` where its gradient norm is the first that is not finite, on the device, with the losses in
        the `terms` of its micro-batches."""
        is_first = ~torch.isfinite(norm.to(self.first.device, non_blocking=True)) & (self.first[0] == 0)
        flags = torch.zeros_like(self.first[1:])
        # a pipeline stage without a loss returns a zero for each of its chunks
        if losses := [of_micro[0] for of_micro in terms if of_micro.ndim]:
            flags = (~torch.isfinite(torch.stack(losses))).double()
        self.first = torch.where(is_first, torch.cat([torch.full_like(flags[:1], step), flags]), self.first)

    def check(self, step: int, first: list[float], values: str) -> None:
        """Raises RunFailed where `first`, read with the loss and norm of `step` (`values`, for people), has a step.
        Collective where it has."""
        number, *flags = first
        if number:
            rows = self._locate(int(number), [micro for micro, flag in enumerate(flags) if flag])
            what = values if number == step else f"train/grad_norm is not finite, as step {step} found"
            raise RunFailed(f"step {number:.0f}: {what}; lower optim.learning_rate, or look at {rows}")

    def _locate(self, step: int, micros: list[int]) -> str:
        """Returns a line that names the ranks whose losses in `step` are not finite, and their rows; else all rows."""
        before = self.rows_before + (step - 1) * self.loader.rows_per_step
        mine = ", ".join(self.loader.name_rows(before, micro) for micro in micros)
        everyone = [mine]
        if not self.alone:
            everyone = [""] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
        if named := [f"rank {rank}: {rows}" for rank, rows in enumerate(everyone) if rows]:
            return "; ".join(named[:3]) + f"; and {len(named) - 3} more ranks" * (len(named) > 3)
        rows = f"rows {before} to {before + self.loader.rows_per_step - 1} of the run"
        return f"{rows}: every loss is finite, so it arose in backward"
