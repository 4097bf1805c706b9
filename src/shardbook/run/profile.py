"""A profile of some steps: each rank's trace for Perfetto (ui.perfetto.dev) and, on a GPU, its memory snapshot.

Invariant: steps outside of `train.profile_steps` cost nothing, and a profile never changes a number.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from shardbook.comm.torch_private import record_memory, write_memory_snapshot
from shardbook.ranks.progress import long_phase
from shardbook.terminal import print_line

EVENTS = 200_000  # the last allocations and frees, which a memory snapshot holds


class Profile(AbstractContextManager["Profile"]):
    """Records the steps from the first to the last of `steps` (empty: none) into `folder`/profile/."""

    def __init__(self, folder: Path, steps: Sequence[int], rank: int):
        self.folder, self.rank = folder / "profile", rank
        self.first, self.last = steps or (0, -1)
        self.running: profile | None = None

    def advance(self, step: int) -> None:
        """Starts or ends the profile before step `step`, when earlier ones are done. Collective after its last step."""
        if self.running and step > self.last:
            with long_phase("a profile's file"):
                self._write()
                # wait for slower ranks here, on the host (gloo), with its long limit: in the step's first collective
                # NCCL's short one would end this rank
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
        running.export_chrome_trace(str(trace := self.folder / f"rank-{self.rank}.json.gz"))
        if torch.cuda.is_available():
            write_memory_snapshot(str(self.folder / f"rank-{self.rank}-memory.pickle"))
            record_memory(None)
        print_line(f"profile  {trace}, for ui.perfetto.dev", any_rank=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.running:  # the run ends, or fails, inside of the profiled steps
            self._write()
