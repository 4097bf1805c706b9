"""The reference of preferences: what the policy says of every pair before the first step, asked once and kept in the
run directory. The policy itself answers, sharded as it is: there is no second model.

Invariant: it is never asked of weights that a step has changed. A run that goes on reads what was written; where that
is gone, or is of other data or weights, it ends.
"""

import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardbook.data.loader import Batching, eval_micro_batches, eval_rows
from shardbook.data.tokenized import Documents
from shardbook.model.adapters import weights_identity
from shardbook.objectives import Objective
from shardbook.objectives.preference import log_probabilities
from shardbook.parallel.sharding import ShardedModel
from shardbook.ranks.distributed import Ranks, broadcast_from_main
from shardbook.recipe import Recipe, RecipeError
from shardbook.run.console import Console
from shardbook.run.directory import write_whole

FILE = "reference.npz"
HASHED = 10_000  # encoded rows at once
Parts = tuple[Documents, Documents | None]  # trained and held out


def with_reference(
    parts: Parts,
    objective: Objective,
    batching: Batching,
    sharded: ShardedModel,
    recipe: Recipe,
    weights: Path,
    run: Path,
    earlier: Path | None,
    ranks: Ranks,
    console: Console,
) -> Parts:
    """`parts`, with the log-probability of each of their sequences under the model as it was loaded, where `objective`
    wants that: asked now, or, where the run goes on from the checkpoint `earlier`, read from that one's run.

    `weights`: the directory of the pretrained ones. Raises RecipeError where there is no reference of this data and
    these weights to go on with. Collective.
    """
    if not objective.reference:
        return parts
    own = run / FILE
    file = earlier.absolute().parents[1] / FILE if earlier else own
    begun_with = f"{weights_identity(recipe, weights)}, {recipe.lora.model_dump_json()}"
    digest = f"{begun_with}; {broadcast_from_main(lambda: [_digest(part) for part in parts if part])}"
    kept: dict[str, Any] = broadcast_from_main(lambda: _read(file))
    fits = kept.get("digest") == digest
    if earlier and not fits:
        why = "is of other data or other weights" if kept else "is missing"
        raise RecipeError(
            f"{file}: {why}, and checkpoint {earlier} cannot be its own reference; set [data], [model] and [lora] to "
            "what the run began with, or start a new run from its export (model.path)"
        )
    if not fits:
        asked = [_ask(part, batching, sharded, ranks, console) if part else np.empty(0) for part in parts]
        kept = {"digest": digest, "train": asked[0], "eval": asked[1]}
    if ranks.is_main and not (fits and own.is_file()):
        content = io.BytesIO()
        np.savez(content, **kept)
        write_whole(own, content.getvalue())
    console.print(f"reference {'read from' if fits else 'asked, and written to'} {file if fits else own}")
    train, held_out = parts
    return replace(train, reference=kept["train"]), held_out and replace(held_out, reference=kept["eval"])


@torch.no_grad()
def _ask(documents: Documents, batching: Batching, sharded: ShardedModel, ranks: Ranks, console: Console) -> np.ndarray:
    """fp32 [encoded, sequences]; infinite where a document is in no row."""
    found = torch.full((len(documents.encoded), batching.sequences), torch.inf)
    model, every = sharded.model.eval(), list(eval_rows(documents, batching))
    for number, (rows, micro) in enumerate(zip(every, eval_micro_batches(documents, batching), strict=True)):
        said, _ = log_probabilities(model, micro.to(ranks.device))
        found[[document for row in rows for document in row]] = said.view(-1, batching.sequences).cpu()
        if number and number % -(-len(every) // 10) == 0:
            console.print(f"reference {number * 100 // len(every)}% of {len(documents.rows):,} rows")
    sharded.reshard()
    model.train()
    found = found.to(ranks.device)
    dist.all_reduce(found, dist.ReduceOp.MIN)  # each is asked on one rank
    return found.cpu().numpy()


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    with np.load(file) as kept:
        return {name: str(value) if name == "digest" else value for name, value in kept.items()}


def _digest(documents: Documents) -> str:
    """Of every token and what is trained of it."""
    digest = hashlib.sha256()
    columns = documents.encoded.select_columns(["input_ids", "mask", "lengths"]).with_format("arrow")
    for table in columns.iter(batch_size=HASHED):
        for column in table.columns:
            digest.update(column.combine_chunks().flatten().to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()[:16]
