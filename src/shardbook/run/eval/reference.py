"""Reference log-probabilities (of DPO's reference model): the policy's, of every pair, before the first step. They are
computed once and kept in the run directory. The sharded policy itself computes them: there is no second model.

Invariant: they are computed with the weights that a run begins with, never with weights that a step has changed:
start.py loads those first, also where a run goes on whose file is gone, or holds too few rows for more steps.
"""

import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.data.loader import MicroBatch, eval_micro_batches, eval_rows
from shardbook.data.tokenized import Documents, Row
from shardbook.model.adapters import weights_identity
from shardbook.objectives.preference import log_probabilities
from shardbook.parallel.sharding import ShardedModel
from shardbook.parallel.step import run_forward
from shardbook.paths import write_whole
from shardbook.ranks.distributed import Ranks, broadcast_from_main, sum_over_ranks
from shardbook.ranks.signals import StopFlag
from shardbook.recipe import RecipeError, first_line
from shardbook.run.log.console import Console
from shardbook.run.prepare import Job

FILE = "reference.npz"
HASHED = 10_000  # encoded rows at once


class Reference:
    """The reference of the rows that a job's loader hands out in its steps, and of the held-out rows; of no rows where
    the objective needs none."""

    def __init__(self, job: Job, run: Path, ranks: Ranks, console: Console, stop: StopFlag):
        self.is_wanted, self.recipe = job.objective.reference, job.recipe
        self.loader, self.held_out = job.loader, job.held_out
        self.file, self.ranks, self.console, self.stop = run / FILE, ranks, console, stop
        self.stopped = False  # before all was computed
        reached = range(min(job.steps * self.loader.rows_per_step, len(job.documents.rows)))
        trained = job.documents, [*map(self.loader.row_at, reached)]
        self.rows: dict[str, tuple[Documents, list[Row]]] = {"train": trained}
        self.rows |= {"eval": (job.held_out, job.held_out.rows)} if job.held_out else {}

    def read(self, sharded: ShardedModel, weights: Path, goes_on: bool, named: str = "") -> bool:
        """Reads the run directory's file, and returns whether it has all rows. Raises RecipeError where a run `goes_on`
        and the file is of other data, or of other weights than those in the directory `weights`; and where the run
        begins with the checkpoint `named` of a run with another reference. Collective."""
        if not self.is_wanted:
            return True
        model: Any = sharded.model
        base = model.frozen_identities.get("base")
        of = base or weights_identity(self.recipe.model, self.recipe.train.seed, weights)
        data = broadcast_from_main(lambda: [_digest(documents) for documents, _ in self.rows.values()])
        self.digest = f"{of}, {self.recipe.lora.model_dump_json()}; {' '.join(data)}"
        self.archive: dict[str, Any] = broadcast_from_main(lambda: _read(self.file))
        if self.archive.get("digest", self.digest) != self.digest:
            if goes_on:
                raise RecipeError(
                    f"{self.file}: is of other data or other weights; set [data], [model] and [lora] to what the run "
                    "began with, or choose another run.name"
                )
            self.archive = {}
        if named:
            run = Path(named).resolve().parent.parent
            theirs: dict[str, Any] = broadcast_from_main(lambda: _read(run / FILE))
            if theirs.get("digest") != self.digest:
                key = "lora.adapter" if self.recipe.lora.r else "model.path"
                raise RecipeError(
                    f"train.resume_from_checkpoint = {named!r}: the reference is the model that a run begins with, and "
                    f"{run / FILE} is {'of another one, or of other data' if theirs else 'not there'}; to begin with "
                    f"what that run learned set {key}={run / 'export'} in its place"
                )
            self.archive = self.archive or theirs
        sequences = self.loader.batching.sequences
        for name, (documents, _) in self.rows.items():
            self.archive.setdefault(name, np.full((len(documents.encoded), sequences), np.inf, np.float32))
        return not any(self._missing(name) for name in self.rows)

    def _missing(self, name: str) -> list[Row]:
        unknown = np.isinf(self.archive[name]).any(1)
        return [row for row in self.rows[name][1] if unknown[list(row)].any()]

    def compute(self, sharded: ShardedModel) -> None:
        """Computes the missing rows with the loaded weights in one pass, and saves all. Where a rank is asked to stop,
        all stop before the same micro-batch, and nothing is saved. Collective."""
        for name, (documents, rows) in self.rows.items():
            missing = self._missing(name)
            self.console.print(f"reference of {len(missing):,} of {len(rows):,} rows of data.{name} is computed")
            computed = self._compute(replace(documents, rows=missing), sharded)
            if self.stopped:
                return
            self.archive[name] = np.minimum(self.archive[name], computed)
        if self.ranks.is_main:
            content = io.BytesIO()
            np.savez(content, **(self.archive | {"digest": self.digest}))
            write_whole(self.file, content.getvalue())

    @torch.no_grad()
    def _compute(self, documents: Documents, sharded: ShardedModel) -> np.ndarray:
        """Returns log-probabilities, fp32 [encoded, sequences]; infinite for a document in no row."""
        batching, device = self.loader.batching, self.ranks.device
        logps = torch.full((len(documents.encoded), batching.sequences), torch.inf)

        def loss_function(model: Any, micro: MicroBatch) -> Tensor:
            return log_probabilities(model, micro, sharded.sum_slices)[0]

        model, every = sharded.model.eval(), eval_rows(documents, batching)
        for rows, micro in zip(every, eval_micro_batches(documents, batching), strict=True):
            self.stopped = sum_over_ranks(self.stop.asked)[0] > 0
            if self.stopped:
                break
            summed = run_forward(sharded, micro, loss_function, device)
            if summed.ndim:  # another stage than the last returns a single zero
                logps[[document for row in rows for document in row]] = summed.view(-1, batching.sequences).cpu()
        sharded.reshard()
        model.train()
        logps = logps.to(device)
        dist.all_reduce(logps, dist.ReduceOp.MIN)  # each document is finite on the ranks that computed its loss
        return logps.cpu().numpy()

    def attach(self) -> Documents | None:
        """Gives the loader's documents their reference, and returns the held-out documents with theirs."""
        if not self.is_wanted:
            return self.held_out
        self.loader.documents = replace(self.loader.documents, reference=self.archive["train"])
        return self.held_out and replace(self.held_out, reference=self.archive["eval"])


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        with np.load(file) as kept:
            return dict(kept) | {"digest": str(kept["digest"])}
    except Exception as error:  # zip, zlib and numpy each have their own
        why = f"{type(error).__name__}: {first_line(error)}"
        raise RecipeError(f"{file}: damaged ({why}); remove it, and the reference is computed again") from None


def _digest(documents: Documents) -> str:
    """Returns a digest of all tokens, their trained mask and their lengths."""
    digest = hashlib.sha256()
    columns = documents.encoded.select_columns(["input_ids", "mask", "lengths"]).with_format("arrow")
    for table in columns.iter(batch_size=HASHED):
        for column in table.columns:
            digest.update(column.combine_chunks().flatten().to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()[:16]
