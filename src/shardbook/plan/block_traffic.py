"""Lists what a micro-batch sends along tp, cp, ep and pp: all-gathers of tokens, all-to-alls of heads and of tokens,
activations.

Invariant: as events.py, whose list of a step has them between the all-gathers and reductions of units.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress, islice, takewhile
from typing import Any

from transformers import PreTrainedConfig

from shardbook.axes import EP, TP
from shardbook.data.loader import MicroBatch
from shardbook.model.attention import head_size
from shardbook.model.flops import experts_per_token
from shardbook.model.routers import BALANCE_NUMBERS
from shardbook.parallel.context import own_heads, partition_heads
from shardbook.parallel.dispatch import CHOICE_BYTES, COUNT_BYTES, WEIGHT_BYTES, Splits, plan_splits
from shardbook.parallel.layout import Layout
from shardbook.parallel.schedule import bubble, in_flight
from shardbook.plan.events import BlockTraffic, Collectives
from shardbook.recipe import Recipe

FP32 = 4
LOSS_PART_BYTES = 3 * FP32  # of each trained token, by each rank: three numbers of its part of the logits
DISTILLED = (5 * FP32, FP32)  # the same beside a teacher: five numbers, and then one
SEQUENCE_BYTES = FP32  # of each answer of a pair: its log-probability or score

Micros = Callable[[], Sequence[MicroBatch]]


def read_inside(
    layout: Layout,
    config: PreTrainedConfig,
    recipe: Recipe,
    rank: int = 0,
    micros_of: Micros | None = None,
    routing: Sequence[Splits] = (),
) -> list[BlockTraffic]:
    """Returns what the global `rank` sends along tp, cp, ep and pp inside the passes of each micro-batch of the step
    that `micros_of` makes; None: rows are full, and every token but the first of each sequence is trained. Empty
    without tp, cp, ep, pp and routers that are balanced.

    `routing`: the rows that the rank sent to experts and received for its own, of each block with experts in each
    micro-batch, in order; empty: as where each expert is chosen as often, but the rank's `layout.expert_load` times
    that.
    """
    is_alone = layout.tp_size == layout.cp_size == layout.pipeline.ranks == layout.ep_size == 1
    if is_alone and not layout.balanced:
        return []
    if micros := micros_of() if micros_of else None:
        sizes = [(m.input_ids.numel(), sum(m.trained), len(m.trained)) for m in micros]
        routing_of = routing_of_micros(layout, routing, len(sizes))
        return [_inside(layout, config, recipe, rank, *size, of) for size, of in zip(sizes, routing_of, strict=True)]
    tokens, sequences = recipe.micro_tokens, recipe.micro_tokens // recipe.data.max_length
    full = tokens // layout.cp_size, (tokens - sequences) // layout.cp_size, sequences
    return [_inside(layout, config, recipe, rank, *full)] * recipe.train.gradient_accumulation_steps


def _inside(
    layout: Layout,
    config: PreTrainedConfig,
    recipe: Recipe,
    rank: int,
    tokens: int,
    trained: int,
    sequences: int,
    routing: Sequence[Splits] = (),
) -> BlockTraffic:
    """Returns what a micro-batch of `tokens`, `trained` of them trained, in so many `sequences`, sends.

    Along tp a block gathers tokens before attention and MLP and scatters after both, the embedding scatters, the last
    norm gathers; the loss gathers numbers, chunk by chunk. Along cp a block sends queries, keys and values, and
    attention's result back; a loss of pairs sums a number of each sequence. Backward goes the other way round. A
    recomputed block sends forward's again, but for its last scatter, whose result is not needed.
    """
    tp_size, itemsize = layout.tp_size, layout.dtype("params").itemsize
    of_tokens, chunk = tokens * config.hidden_size * itemsize, recipe.train.loss_chunk_tokens or max(1, trained)
    gather, scatter = ((op, TP, of_tokens) for op in ("all_gather", "reduce_scatter")) if tp_size > 1 else ((), ())
    to_heads, to_seq, grad_to_heads, grad_to_seq = _exchanges(layout, config, rank, tokens * itemsize)
    has_logits = tp_size > 1 and recipe.method != "reward"  # a score is no part of a vocabulary
    sizes = [min(chunk, trained - first) for first in range(0, trained, chunk)] if has_logits else []
    row_bytes: tuple[int, ...] = (LOSS_PART_BYTES,)
    beside: BlockTraffic | None = None
    if teacher := layout.teacher:
        row_bytes = (layout.share_of(teacher.vocab_size) * itemsize, *DISTILLED)  # its logits, gathered, before
        beside = _inside(replace(layout, teacher=None, experts=0), teacher, recipe, rank, tokens, 0, 0)
    loss_gathers = [("all_gather", TP, size * tp_size * each) for size in sizes for each in row_bytes]
    is_summed = layout.cp_size > 1 and recipe.sequences > 1
    slice_sum = ("all_reduce", layout.context_axis, sequences * SEQUENCE_BYTES) if is_summed else ()
    counted = sum(layout.balanced) + BALANCE_NUMBERS
    counts = ("all_reduce", layout.axis_of_all, counted * FP32) if layout.balanced else ()

    def sends(*each: Any) -> Collectives:
        return tuple(send for send in each if send)

    again = gather, to_heads, to_seq, scatter, gather  # of a block that runs again: all but its last scatter
    # the gradient of a block's last result; that of the MLP's input, and of attention's result; of heads; of the input
    ends = (gather,), (scatter, gather), (grad_to_seq, grad_to_heads), (scatter,)
    reached = gradients_of_first(layout)
    first = [send for each in compress(ends, reached) for send in each]
    backward = [send for each in ends for send in each]
    return BlockTraffic(
        layers=config.num_hidden_layers,
        recomputed=frozenset(recipe.activation.recomputed(list(range(config.num_hidden_layers)))),
        forward=sends(gather, to_heads, to_seq, scatter, gather, scatter),
        backward=sends(*backward),
        # the gradient of the last result comes before what is recomputed
        recompute=sends(backward[0], *again, *backward[1:]),
        first=(sends(*first), sends(first[0], *again, *first[1:])),
        embedding=(sends(scatter), sends(gather) if reached[-1] else ()),
        loss=(
            sends(gather, *loss_gathers, slice_sum, counts),
            sends(*loss_gathers * recipe.recomputes_logits, scatter),
        ),
        experts=expert_exchanges(layout, config, tokens, routing),
        beside=beside,
        stream_bytes=of_tokens // tp_size,
    )


def routing_of_micros(layout: Layout, routing: Sequence[Splits], micros: int) -> list[list[Splits]]:
    """Returns of each of `micros` micro-batches what its part of `routing` is, in the order of blocks."""
    parts, left = [list[Splits]() for _ in range(micros)], iter(routing)
    counts = [len(chunk.expert_units) for chunk in layout.chunks]
    for action in layout.pipeline.actions(micros) if routing else ():
        if action.is_forward:
            parts[action.micro] += islice(left, counts[action.chunk])
    return parts


def expert_exchanges(
    layout: Layout, config: PreTrainedConfig, tokens: int, routing: Sequence[Splits]
) -> tuple[tuple[Collectives, Collectives, Collectives], ...]:
    """Returns what experts exchange along ep, for `tokens` of this rank: in forward, in backward, and in the backward
    of a block that runs again. One for each block's `routing`; one for all where there is none.
    Forward sends numbers of choices and tokens, then these, and sums of what experts made of them back."""
    if not (layout.expert_units and layout.experts):  # a teacher's are gathered whole
        return ()
    axis = layout.counted_axis(layout.expert_units[0], EP)
    row_bytes = layout.expert_width * layout.dtype("params").itemsize
    even = tokens, experts_per_token(config), layout.experts, layout.ep_size, layout.expert_load

    def exchanges(*sizes: int) -> Collectives:
        return tuple(("all_to_all", axis, size) for size in sizes)

    of_blocks = []
    for splits in routing or [plan_splits(*even)]:
        sent, received, choices_sent, choices_received = map(sum, splits)
        rows = exchanges(sent * row_bytes, received * row_bytes)
        forward = exchanges((layout.experts + layout.ep_size) * COUNT_BYTES, choices_sent * CHOICE_BYTES) + rows
        backward = rows + exchanges(choices_received * WEIGHT_BYTES)
        of_blocks.append((forward, backward, forward + backward))
    return tuple(of_blocks)


def gradients_of_first(layout: Layout) -> tuple[bool, bool, bool, bool]:
    """Returns which gradients the backward of the model's first block computes: of its last result, of attention's
    result, of heads, of its input. With adapters no gradient goes through what lies before the first of them."""
    names = list(takewhile(lambda name: ".1." not in name, layout.placements))
    trained = {name for name in names if layout.placements[name].trained}
    outer = set(takewhile(lambda name: ".0." not in name, names))
    attention = {name for name in trained - outer if "self_attn" in name}
    of_input = bool(trained & outer)
    of_heads = of_input or any("o_proj" not in name for name in attention)
    return True, of_heads or bool(attention), of_heads, of_input


def _exchanges(layout: Layout, config: PreTrainedConfig, rank: int, token_bytes: int) -> list[Any]:
    """Returns the all-to-alls of a block of the global `rank` along cp, each of `token_bytes` a number of a head: to
    other ranks and back in forward, and the gradients of both."""
    if layout.cp_size == 1:
        return [()] * 4
    heads, key_heads = own_heads(config, layout.tp_size, rank % layout.tp_size)
    shares = partition_heads(heads, key_heads, layout.cp_size)
    heads_here, keys = shares[rank // layout.tp_size % layout.cp_size]
    given = heads + 2 * sum(len(each) for _, each in shares)
    # heads' tokens of the whole row
    inside = layout.cp_size * heads_here, layout.cp_size * (heads_here + 2 * len(keys))
    return [
        ("all_to_all", layout.context_axis, count * token_bytes * head_size(config))
        for count in (given, *inside, heads)
    ]


def describe_sharing(layout: Layout) -> str:
    """Returns a sentence on tp: the ranks that share matrices, whether attention's stay whole on each, and whether the
    ranks are more than a node has; empty without tp."""
    if layout.tp_size == 1:
        return ""
    sentence = f"{layout.tp_size} ranks share matrices, and tokens between them"
    keys = (each for name, each in layout.placements.items() if "self_attn.k_proj.weight" in name)
    if any(each.tp_dim is None for each in keys):
        sentence += "; heads do not divide, so attention has matrices that stay whole on each"
    if layout.tp_size > (node := layout.ranks_per_node):
        sentence += f"; slow: a node has {node} ranks, and what they send in every block goes between nodes"
    return sentence


def describe_experts(
    layout: Layout, config: PreTrainedConfig, recipe: Recipe, peaks: tuple[int, int] | None = None
) -> str:
    """Returns a sentence on ep: how many experts a rank has, how many tokens of a rank's micro-batch make its exchanges
    as large as the gathers and reductions of experts that they replace, and whether the ranks are more than a node has;
    empty without ep. `peaks`: the bytes of a rank as planned, and where all tokens choose its experts."""
    if layout.ep_size == 1:
        return ""
    each = layout.experts // layout.ep_size
    sentence = (
        f"{layout.ep_size} ranks share {layout.experts} experts of a block, {each} on each, and send tokens there"
    )
    if layout.stage.reshard_after_forward and layout.expert_units:  # a pipeline stage may have none
        itemsize, reduce = layout.dtype("params").itemsize, layout.dtype("reduce").itemsize
        unit, many = layout.expert_units[0], recipe.micro_tokens
        gathered = (2 * unit.numel * itemsize + unit.padded_numel(1, trained_only=True) * reduce) * layout.ep_size
        forward, backward, recompute = expert_exchanges(replace(layout, expert_load=1.0), config, many, ())[0]
        passes = forward + (recompute if recipe.activation.kind not in ("none", "budget") else backward)
        even = gathered * many // sum(payload for _, _, payload in passes)
        sentence += f"; fewer bytes than gathering all of them while a micro-batch of a rank has under {even:,} tokens"
    if (node := layout.ranks_per_node) % layout.ep_size:
        sentence += f"; slow: a node has {node} ranks, and tokens go between nodes in every block"
    if peaks:
        planned, worst = (f"{size / 1e9:.1f} GB" for size in peaks)
        times, most = f"{layout.expert_load:g} times " * (layout.expert_load > 1), layout.most_expert_load
        sentence += f"; a rank with {times}the mean of rows takes {planned}, at worst, with {most:g} times it, {worst}"
    return sentence


def describe_pipeline(layout: Layout, micros: int) -> str:
    """Returns a sentence on the pipeline: its stages, their bubble, activations that the first holds, and reasons why
    it is slow; empty without pp."""
    pipeline, stage = layout.pipeline, layout.stage
    if pipeline.ranks == 1:
        return ""
    most, least = max(pipeline.layers), min(pipeline.layers)
    blocks = f"{most} blocks" if most == least else f"{least} to {most} blocks"
    sentence = f"{len(pipeline.layers)} stages of {blocks} on {pipeline.ranks} ranks, {pipeline.schedule}: "
    held = in_flight(pipeline.schedule, 0, pipeline.ranks, micros, pipeline.chunks)
    sentence += f"the first holds activations of {held} passes; "
    sentence += f"bubble {bubble(pipeline.ranks, micros, pipeline.chunks):.0%} of computing"
    if micros < pipeline.ranks:
        sentence += f"; slow: {micros} micro-batches for {pipeline.ranks} ranks (train.gradient_accumulation_steps)"
    if stage.reshard_after_forward and layout.shards > 1:
        sentence += f"; {stage.name} gathers each block {2 * micros} times a step, zero1 and zero2 once"
    return sentence


def describe_splitting(layout: Layout, config: PreTrainedConfig) -> str:
    """Returns a sentence on cp: the ranks that split rows, whether their heads are uneven, and whether the ranks are
    more than a node has; empty without cp."""
    if layout.cp_size == 1:
        return ""
    sentence = f"{layout.cp_size} ranks split each row, and inside attention its heads"
    shares = partition_heads(*own_heads(config, layout.tp_size, 0), layout.cp_size)
    most, least = max(heads for heads, _ in shares), min(heads for heads, _ in shares)
    if most > least:
        sentence += f"; they do not go round: a rank has {most} of them or {least}"
    if layout.cp_size * layout.tp_size > (node := layout.ranks_per_node):
        sentence += f"; a node has {node} ranks, and what they exchange in every block goes between nodes"
    return sentence
