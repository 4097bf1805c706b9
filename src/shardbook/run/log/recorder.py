"""The recorder: writes the rows of steps to metrics.jsonl and the trackers, and samples to samples.jsonl.

Invariant: a row is there once, also after a kill: a run that goes on removes the rows of steps that it repeats. A
tracker may fail (trackers.py): the file comes first.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from shardbook.paths import naming, write_whole
from shardbook.recipe import RecipeError, Run, first_line
from shardbook.run.log.trackers import Trackers
from shardbook.terminal import print_line

Metrics = dict[str, float | int]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines, without a last one that a kill tore. Raises RecipeError where another
    one is damaged."""
    lines, newline, _ = path.read_bytes().rpartition(b"\n")
    rows = []
    for number, line in enumerate(lines.split(b"\n") if newline else (), 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise RecipeError(f"{path}: row {number} is damaged ({first_line(error)})") from None
    return rows


class Recorder(contextlib.AbstractContextManager["Recorder"]):
    """Writes metrics.jsonl, samples.jsonl and the trackers on rank 0; on other ranks it does nothing."""

    def __init__(
        self,
        folder: Path,
        name: str,
        run: Run,
        config: dict[str, Any],
        is_main: bool,
        done_steps: int,
        saved_bytes: int = 0,
    ):
        """Takes `saved_bytes`, the length of the file when `done_steps` were saved; a shorter one is said."""
        self.file, self.path = None, folder / "metrics.jsonl"
        if not is_main:
            return
        path, self.samples = self.path, folder / "samples.jsonl"
        for each in [path, *[self.samples] * self.samples.exists()]:
            # A run that died after its last checkpoint repeats steps: their old lines go, so that steps stay unique.
            # not splitlines: a sample may contain Unicode's other line ends. The last line may end inside a character
            lines = each.read_text(errors="replace").split("\n")[:-1] if done_steps and each.exists() else []
            write_whole(each, "".join(line + "\n" for line in lines if _step_of(line) <= done_steps))
        if (size := path.stat().st_size) < saved_bytes:
            lost = f"{saved_bytes - size:,} of {saved_bytes:,} bytes are gone since step {done_steps} was saved"
            print_line(f"{path}: {lost}; rows of steps before that are absent")
        self.file = path.open("a")
        self.trackers = Trackers(folder, name, run, config)

    def log(self, step: int, metrics: Metrics) -> None:
        """Appends one object. `step` 0 is before the first step."""
        if self.file is None:
            return
        with naming(self.path):
            self.file.write(json.dumps({"step": step, **metrics}) + "\n")
            self.file.flush()
        self.trackers.log(step, metrics)

    def sync(self) -> int:
        """Makes the rows durable: none is lost that a checkpoint has. Returns the file's bytes; 0 on other ranks."""
        if self.file is None:
            return 0
        with self.path.open("rb") as file:  # its own is closed when the last step is saved
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

    def log_samples(self, samples: list[dict[str, Any]]) -> None:
        """Appends one object for each sample: `step`, `prompt`, `completion`, and its length in `tokens`."""
        if self.file is None:
            return
        with naming(self.samples), self.samples.open("a") as file:
            file.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        self.trackers.log_samples(samples)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Closes the file and the trackers."""
        if self.file is not None:
            with naming(self.path):
                self.file.close()
            self.trackers.finish()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:  # cut off by a kill in mid-line
        return float("inf")
