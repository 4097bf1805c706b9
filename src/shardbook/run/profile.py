"""A profile of some steps: a trace of each rank for Perfetto (ui.perfetto.dev) and, on a GPU, what its memory held.

Invariant: steps outside of `train.profile_steps` cost nothing, and what is measured never changes what is computed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from shardbook.comm.torch_private import record_memory, write_memory_snapshot
from shardbook.ranks.progress import long_phase

EVENTS = 200_000  # allocations and frees that a memory snapshot holds, the last ones


class Profile(AbstractContextManager["Profile"]):
    """Records the steps from the first to the last of `steps` (none: nothing) into `folder`/profile/."""

    def __init__(self, folder: Path, steps: Sequence[int], rank: int):
        self.folder, self.rank = folder / "profile", rank
        self.first, self.last = steps or (0, -1)
        self.running: profile | None = None

    def advance(self, step: int) -> None:
        """Step `step` is about to begin; those before it are done. Collective after the last step of a profile."""
        if self.running and step > self.last:
            with long_phase("a profile's file"):
                self._write()
                # on the host (gloo), whose limit is long: in the step's first collective NCCL's would end this rank,
                # where another takes that much longer for its file
                dist.barrier()
        if step == self.first:
            kinds = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(ProfilerActivity.CUDA)
                record_memory(EVENTS)
            self.running = profile(activities=kinds)
            self.running.start()

    def _write(self) -> None:
        running, self.running = self.running, None
        assert running
        running.stop()
        self.folder.mkdir(exist_ok=True)
        running.export_chrome_trace(str(self.folder / f"rank-{self.rank}.json.gz"))
        if torch.cuda.is_available():
            write_memory_snapshot(str(self.folder / f"rank-{self.rank}-memory.pickle"))
            record_memory(None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.running:  # the run ends inside of the steps that were asked for, or fails there
            self._write()
