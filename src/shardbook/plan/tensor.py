"""What tensor parallel sends in a step, exactly.

Invariant: as formulas.py, whose terms of a whole step (sums of what is not cut, the norm) are there.
"""

from collections.abc import Sequence

from transformers import PreTrainedConfig

from shardbook.axes import TP
from shardbook.comm.ledger import Traffic, Volume
from shardbook.parallel.layout import Layout
from shardbook.recipe import Recipe

TOLD_BYTES = 3 * 4  # of each trained token, by each rank: three fp32 numbers of its part of the logits


def recomputed_blocks(recipe: Recipe, numbers: Sequence[int]) -> int:
    """How many of those blocks of a model run in backward again."""
    kind, _, amount = recipe.activation.checkpointing.partition(":")
    every = sum(number % int(amount or 1) == 0 for number in numbers)
    return {"none": 0, "budget": 0}.get(kind, every)


def tensor_traffic(
    layout: Layout, config: PreTrainedConfig, recipe: Recipe, sizes: Sequence[tuple[int, int]]
) -> Traffic:
    """Gathers and reduce-scatters of tokens along tp, of a step whose micro-batches have so many tokens, and trained
    ones.

    A block gathers before attention and MLP and scatters after both, backward the other way round; one that is
    recomputed gathers twice more and scatters once more: what its last scatter gives nobody asks for again. The
    embedding scatters, the last norm gathers; the loss gathers numbers, chunk by chunk.
    """
    if layout.alike == 1:
        return {}
    numbers, more = layout.blocks(config.num_hidden_layers), recipe.forwards - 1
    layers, again = len(numbers), recomputed_blocks(recipe, numbers)
    chunk, itemsize = recipe.train.loss_chunk_tokens, layout.dtype("params").itemsize
    outer = layout.pipeline.begins + layout.pipeline.ends
    gathers = 4 * layers + 2 * again + outer + more * (2 * layers + 1)
    scatters = 4 * layers + again + outer + more * (2 * layers + 1)
    scored = 1 + more + (recipe.sequences > 1)  # where each loss has a slope of its own, logits are made again
    gathered = scattered = Volume()
    for tokens, trained in sizes:
        payload = tokens * config.hidden_size * itemsize
        chunks = -(-trained // (chunk or max(1, trained)))
        told = Volume(scored * chunks, scored * trained * layout.alike * TOLD_BYTES)
        gathered += Volume(gathers, gathers * payload) + (told if layout.pipeline.ends else Volume())
        scattered += Volume(scatters, scatters * payload)
    return {("all_gather", TP): gathered, ("reduce_scatter", TP): scattered}


def describe_sharing(layout: Layout) -> str:
    """How many ranks share matrices, what of blocks stays whole on each, and whether they are more than a node has;
    empty where none do."""
    if layout.alike == 1:
        return ""
    said = f"{layout.alike} ranks share matrices, and tokens between them"
    if any(hidden and not cut for unit in layout.units for hidden, cut in zip(unit.hidden, unit.cut, strict=True)):
        said += "; heads do not divide, so attention has matrices that stay whole on each"
    if layout.alike > layout.ranks_per_node:
        said += (
            f"; slow: a node has {layout.ranks_per_node} ranks, and what they send in every block goes between nodes"
        )
    return said
