"""Closed formulas for the traffic along tp, cp and pp in a step: gathers of tokens, exchanges of heads, activations.

Invariant: as formulas.py, which has the collectives of a whole step (sums of tp-replicated gradients, the norm).
"""

from collections.abc import Callable, Sequence

from transformers import PreTrainedConfig

from shardbook.arithmetic import ceil_div
from shardbook.axes import PP_BACKWARD, PP_FORWARD, TP
from shardbook.comm.ledger import Traffic, Volume, add_traffic
from shardbook.data.loader import MicroBatch
from shardbook.model.attention import head_size
from shardbook.model.context import own_heads, partition_heads
from shardbook.parallel.layout import Layout
from shardbook.parallel.schedule import bubble, in_flight
from shardbook.recipe import Recipe

TOLD_BYTES = 3 * 4  # of each trained token, by each rank: three fp32 numbers of its part of the logits

Micros = Callable[[], Sequence[MicroBatch]]


def axes_traffic(
    layout: Layout, config: PreTrainedConfig, recipe: Recipe, rank: int = 0, micros_of: Micros | None = None
) -> Traffic:
    """Returns the traffic of the global `rank` in the step whose micro-batches `micros_of` makes; None: rows are full,
    and every token but the first of each sequence is trained."""
    if layout.tp_size == layout.cp_size == layout.pipeline.ranks == 1:
        return {}
    micros = micros_of() if micros_of else None
    sizes = [(m.input_ids.numel(), len(m.targets)) for m in micros] if micros else full_micros(layout, recipe)
    tokens = [tokens for tokens, _ in sizes]
    inside = tensor_traffic(layout, config, recipe, sizes), context_traffic(layout, config, recipe, rank, tokens)
    return add_traffic(*inside, pipeline_traffic(layout, config, tokens))


def full_micros(layout: Layout, recipe: Recipe) -> list[tuple[int, int]]:
    tokens, sequences = recipe.micro_tokens, recipe.micro_tokens // recipe.data.max_length
    full = tokens // layout.cp_size, (tokens - sequences) // layout.cp_size
    return [full] * recipe.train.gradient_accumulation_steps


def tensor_traffic(
    layout: Layout, config: PreTrainedConfig, recipe: Recipe, sizes: Sequence[tuple[int, int]]
) -> Traffic:
    """Returns the all-gathers and reduce-scatters of tokens along tp. `sizes`: tokens, and trained tokens, of each
    micro-batch.

    A block gathers before attention and MLP and scatters after both, backward the other way round; a recomputed block
    gathers twice more and scatters once more: the result of its last scatter is not needed again. The embedding
    scatters, the last norm gathers; the loss gathers numbers, chunk by chunk.
    """
    if layout.tp_size == 1:
        return {}
    numbers, more = layout.blocks(config.num_hidden_layers), recipe.forwards_per_micro - 1
    layers, again = len(numbers), len(recipe.activation.recomputed(numbers))
    chunk, itemsize = recipe.train.loss_chunk_tokens, layout.dtype("params").itemsize
    outer = layout.pipeline.has_first_stage + layout.pipeline.has_last_stage
    gathers = 4 * layers + 2 * again + outer + more * (2 * layers + 1)
    scatters = 4 * layers + again + outer + more * (2 * layers + 1)
    scored = 1 + more + recipe.recomputes_logits
    gathered = scattered = Volume()
    for tokens, trained in sizes:
        payload = tokens * config.hidden_size * itemsize
        chunks = ceil_div(trained, chunk or max(1, trained))
        told = Volume(scored * chunks, scored * trained * layout.tp_size * TOLD_BYTES)
        gathered += Volume(gathers, gathers * payload) + (told if layout.pipeline.has_last_stage else Volume())
        scattered += Volume(scatters, scatters * payload)
    return {("all_gather", TP): gathered, ("reduce_scatter", TP): scattered}


def context_traffic(
    layout: Layout, config: PreTrainedConfig, recipe: Recipe, rank: int, sizes: Sequence[int]
) -> Traffic:
    """Returns the all-to-alls of blocks; `sizes`: this rank's tokens of each micro-batch. Forward sends queries, keys
    and values, and attention's result back; backward the other way round; a recomputed block sends forward's again."""
    if layout.cp_size == 1:
        return {}
    heads, key_heads = own_heads(config, layout.tp_size, rank % layout.tp_size)
    shares = partition_heads(heads, key_heads, layout.cp_size)
    own, keys = shares[rank // layout.tp_size % layout.cp_size]
    of_all = heads + 2 * sum(len(each) for _, each in shares)
    numbers = layout.blocks(config.num_hidden_layers)
    layers = len(numbers)
    forwards = layers * recipe.forwards_per_micro + len(recipe.activation.recomputed(numbers))
    inside = layout.cp_size * own, layout.cp_size * (own + 2 * len(keys))  # heads' tokens of the whole row
    each = forwards * (of_all + inside[0]) + layers * (inside[1] + heads)
    payload = each * sum(sizes) * head_size(config) * layout.dtype("params").itemsize
    return {("all_to_all", layout.context_axis): Volume(2 * (forwards + layers) * len(sizes), payload)}


def pipeline_traffic(layout: Layout, config: PreTrainedConfig, sizes: Sequence[int]) -> Traffic:
    """Returns the sends of activations and gradients along pp; `sizes`: this rank's tokens of each micro-batch."""
    pipeline, found = layout.pipeline, dict[tuple[str, str], Volume]()
    for chunk in range(pipeline.chunks) if pipeline.ranks > 1 else ():
        payload = (
            sum(tokens // layout.tp_size for tokens in sizes) * config.hidden_size * layout.dtype("params").itemsize
        )
        sent = Volume(len(sizes), payload)
        for axis, is_end in ((PP_FORWARD, pipeline.is_last(chunk)), (PP_BACKWARD, pipeline.is_first(chunk))):
            if not is_end:
                found["p2p", axis] = found.get(("p2p", axis), Volume()) + sent
    return found


def describe_sharing(layout: Layout) -> str:
    """Returns a sentence on tp: the ranks that share matrices, whether attention's stay whole on each, and whether the
    ranks are more than a node has; empty without tp."""
    if layout.tp_size == 1:
        return ""
    said = f"{layout.tp_size} ranks share matrices, and tokens between them"
    if any(hidden and not cut for unit in layout.units for hidden, cut in zip(unit.hidden, unit.cut, strict=True)):
        said += "; heads do not divide, so attention has matrices that stay whole on each"
    if layout.tp_size > layout.ranks_per_node:
        said += (
            f"; slow: a node has {layout.ranks_per_node} ranks, and what they send in every block goes between nodes"
        )
    return said


def describe_pipeline(layout: Layout, micros: int) -> str:
    """Returns a sentence on the pipeline: its stages, their bubble, activations that the first holds, and reasons why
    it is slow; empty without pp."""
    pipeline, stage = layout.pipeline, layout.stage
    if pipeline.ranks == 1:
        return ""
    most, least = max(pipeline.layers), min(pipeline.layers)
    blocks = f"{most} blocks" if most == least else f"{least} to {most} blocks"
    said = f"{len(pipeline.layers)} stages of {blocks} on {pipeline.ranks} ranks, {pipeline.schedule}: "
    held = in_flight(pipeline.schedule, 0, pipeline.ranks, micros, pipeline.chunks)
    said += f"the first holds activations of {held} passes; "
    said += f"bubble {bubble(pipeline.ranks, micros, pipeline.chunks):.0%} of computing"
    if micros < pipeline.ranks:
        said += f"; slow: {micros} micro-batches for {pipeline.ranks} ranks (train.gradient_accumulation_steps)"
    if stage.reshard_after_forward and layout.shards > 1:
        said += f"; {stage.name} gathers each block {2 * micros} times a step, zero1 and zero2 once"
    return said


def describe_splitting(layout: Layout, config: PreTrainedConfig) -> str:
    """Returns a sentence on cp: the ranks that split rows, whether their heads are uneven, and whether the ranks are
    more than a node has; empty without cp."""
    if layout.cp_size == 1:
        return ""
    said = f"{layout.cp_size} ranks split each row, and inside attention its heads"
    shares = partition_heads(*own_heads(config, layout.tp_size, 0), layout.cp_size)
    most, least = max(own for own, _ in shares), min(own for own, _ in shares)
    if most > least:
        said += f"; they do not go round: a rank has {most} of them or {least}"
    node = layout.ranks_per_node
    if layout.cp_size * layout.tp_size > node:
        said += f"; a node has {node} ranks, and what they exchange in every block goes between nodes"
    return said
