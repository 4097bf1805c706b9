"""The peak of a step's memory, by category and moment.

Invariant: a step is fullest at one of a few moments, and each is a sum of bytes that a rank keeps, gathers, sends and
holds for backward, and that the loss or one block needs on top. plan/simulate.py counts the same from the code itself,
and tests hold the two together. Sources of the counts: tensors that autograd saves in transformers' blocks and that
fully_shard holds; Korthikanti et al., arXiv 2205.05198, section 4, for the idea.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from transformers import PreTrainedConfig

from shardbook.arithmetic import ceil_div
from shardbook.memory.host_state import fetched_bytes
from shardbook.model.attention import head_size, heads_of
from shardbook.parallel.layout import Layout
from shardbook.parallel.units import Unit, backward_order
from shardbook.plan.activation_bytes import FP32, ActivationBytes, count_activation_bytes, forward_bytes
from shardbook.plan.events import step_passes
from shardbook.plan.formulas import predict_gathered_peak, predict_resident, predict_secondary
from shardbook.plan.measure_blocks import kinds_of
from shardbook.plan.memory_replay import CopiedBytes, ShardedBytes
from shardbook.recipe import Recipe

GB = 10**9


@dataclass(frozen=True)
class Peak:
    """The bytes of one rank at a moment of a step."""

    params: int
    grads: int  # sums: reduced, or waiting to be
    optimizer: int
    gathered: int  # parameters in the dtype of compute, hpZ's secondary shards
    buffers: int  # of gathers in flight and of a reduction's input
    activations: int  # held for backward by all blocks
    working: int  # tensors of the loss or of one running block, and its gradients before they are reduced

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / GB:.1f}" for name, value in asdict(self).items())
        return f"{self.total / GB:.1f} GB ({parts})"


# by event and unit: a name for people, bytes that blocks hold for backward, and bytes that are needed on top
Moments = dict[tuple[str, Unit | None], tuple[str, int, int]]


def _moments(layout: Layout, chunk: int, units: Sequence[Unit], work: ActivationBytes, vocabulary: int) -> Moments:
    """Returns the moments of a chunk of layers with these `units` at which a pass may be fullest: the loss, backward of
    the head, of the last blocks, of the first ones, and of the last unit, and the end."""
    order, pipeline = [unit for unit in units if unit.numel], layout.pipeline
    spanning = [unit for unit in order if unit.is_root_like and not unit.forward_only]
    back = [unit for unit in backward_order(order) if not unit.is_root_like]
    outer = [unit for unit in back[:1] if not unit.in_block]
    by_head = [unit for unit in outer if any(shape[0] in (vocabulary, 1) for shape in unit.shapes)]
    blocks = [unit for unit in back if unit not in by_head and unit.read_in_backward and not unit.is_experts]
    experts = [unit for unit in back if unit.is_experts]
    experts_of = {block: unit for block in blocks for unit in experts if unit.modules[0] in block.inside}
    # the head's gradient, which waits for the embedding's
    tied = 0 if by_head or not pipeline.is_last(chunk) else work.head_gradient
    # Along pp a buffer waits for the next receive. The gradient that was received before is there too, but for the
    # backward of the chunk's last block, which consumes it.
    ahead = work.stream * (pipeline.ranks > 1 and not (pipeline.is_last(chunk) and pipeline.schedule == "gpipe"))
    recv = ahead + work.stream * (pipeline.ranks > 1 and not pipeline.is_last(chunk))
    moments: Moments = {("end of backward", None): ("end, sums", recv, 0)} if layout.is_replicated else {}
    if pipeline.is_last(chunk):
        moments["end of forward", None] = "loss", work.held(chunk), work.loss
        moments["backward of the loss", None] = "loss, backward", work.held(chunk), work.loss_backward
        if not by_head:
            moments["start of backward", None] = "last norm", work.held(chunk), work.norm + tied
    for unit in sorted((unit for unit in order if unit.forward_only), key=lambda unit: unit.numel)[-1:]:
        moments["forward", unit] = "teacher", 0, work.teacher
    for unit in by_head:
        moments["gather", unit] = "head, gathered", work.held(chunk), work.stream
        moments["reduction", unit] = "head", work.held(chunk) + recv, 0
    count = len(blocks)
    for number in work.looked_at(chunk):
        unit, name, grads = blocks[count - 1 - number], f"block {number + 1}", recv if number < count - 1 else ahead
        held = work.held(chunk, number + 1) + grads
        block, before = work.blocks[chunk][number], work.held(chunk, number)
        moments["gather", unit] = f"{name}, gathered", before, work.stream
        moments["forward", unit] = f"{name}, forward", before, block.forward
        moments["backward", unit] = name, held, block.inside + tied
        moments["reduction", unit] = f"{name}, reduced", before + grads, tied
        if inner := experts_of.get(unit):  # the fullest moment is theirs; after it their gradients are gone
            moments["forward", inner] = f"{name}, experts, forward", before, block.forward
            moments["backward", inner] = f"{name}, experts", held, block.inside + tied
            gradients = inner.padded_numel(1, trained_only=True) * layout.dtype("params").itemsize
            moments["backward", unit] = name, held, max(0, block.inside - gradients) + tied
    others = [unit for unit in [*back, *spanning] if unit not in by_head and unit not in blocks]
    for unit in [unit for unit in others if not unit.is_experts][-1:]:
        # a tied weight's two gradients and, for a moment, their sum
        moments["backward", unit], moments["reduction", unit] = ("end", recv, 3 * tied), ("end, reduced", recv, 0)
    return moments


def predict_moments(layout: Layout, config: PreTrainedConfig, recipe: Recipe) -> dict[str, Peak]:
    """Returns the bytes at the moments where a step can be fullest, in order, by name: of its first two micro-batches
    and its last, and the fullest of all."""
    work, state = count_activation_bytes(layout, config, recipe), predict_resident(layout, 0, recipe.optim.name)
    micros, pipeline = recipe.train.gradient_accumulation_steps, layout.pipeline
    of_chunks = [
        _moments(layout, number, chunk.units, work, layout.share_of(config.vocab_size))
        for number, chunk in enumerate(layout.chunks)
    ]
    # more micro-batches bring nothing that these do not: but in gpipe all forwards are before the first backward
    few = micros if pipeline.schedule == "gpipe" else min(micros, layout.steady_micros)
    live = (CopiedBytes if layout.is_replicated else ShardedBytes)(layout, few)
    named = {unit for moments in of_chunks for _, unit in moments}
    constants = {"params": int(state.params_bytes), "optimizer": int(state.optimizer_bytes)}
    secondary, passes = predict_secondary(layout), Counter[int]()  # on their way through each chunk
    peaks = list[tuple[bool, str, Peak]]()
    for action, events in step_passes(layout, few):
        passes[action.chunk] += action.is_forward
        others = passes - Counter([action.chunk])
        around = work.around(pipeline, action.chunk)
        around += sum(work.of_a_pass(pipeline, chunk) * count for chunk, count in others.items())
        for moment, unit, (sums, gathered, buffers, working) in live.follow(action, events, named):
            if (moment, unit) in of_chunks[action.chunk]:
                name, activations, on_top = of_chunks[action.chunk][moment, unit]
                peak = Peak(
                    **constants,
                    grads=sums,
                    gathered=gathered + secondary,
                    buffers=buffers,
                    activations=activations + around,
                    working=working + on_top,
                )
                number = micros if action.micro == few - 1 else action.micro + 1
                where = f", chunk {action.chunk + 1}" * (pipeline.chunks > 1)
                is_shown = moment != "gather" and number in (1, 2, micros)
                peaks.append((is_shown, f"micro-batch {number}{where}, {name}", peak))
        passes[action.chunk] -= not action.is_forward
    fullest = max(peaks, key=lambda each: each[2].total)
    shown = {name: peak for is_shown, name, peak in peaks if is_shown or name == fullest[1]}
    if layout.replicated_numel:  # after all else, their sums
        params, sums, optimizer = (int(size) for size in asdict(state).values())
        flat = layout.replicated_numel * layout.dtype("master").itemsize
        shown["what is not cut"] = Peak(params, sums, optimizer, gathered=0, buffers=flat, activations=0, working=0)
    return shown


def predict_peak(layout: Layout, config: PreTrainedConfig, recipe: Recipe) -> Peak:
    """Returns the fullest moment of a step of a model of `config` with `recipe`'s micro-batches, recompute and loss."""
    return max(predict_moments(layout, config, recipe).values(), key=lambda moment: moment.total)


def predict_generation(layout: Layout, config: PreTrainedConfig, recipe: Recipe) -> Peak:
    """Returns the bytes while samples are generated: every parameter stays gathered (with hpZ, as in a forward), beside
    keys and values, which a pipeline keeps none of. Prompts count as full: with their continuation they have
    data.max_length tokens. Layers that keep a state in place of keys count as if they had keys: their states are not
    measured."""
    state, asked = predict_resident(layout, 0, recipe.optim.name), recipe.generate
    itemsize, length = layout.dtype("params").itemsize, recipe.data.max_length
    rows = ceil_div(asked.count, layout.data_rank(0)[1])
    tokens, layers = rows * length, len(layout.blocks(len(kinds_of(config))))
    units = [unit for unit in layout.units if layout.is_replicated or not unit.forward_only]
    numels = [unit.padded_numel(layout.shards_of(unit)) for unit in units]
    if layout.is_replicated:
        numels = [unit.cast_numel(itemsize) for unit in units]
    gathered = predict_gathered_peak(layout) if layout.switches.secondary else sum(numels) * itemsize
    size = tokens, rows * length**2
    block = forward_bytes(config, recipe, layout.precision.params, size) + rows * length**2
    keys = layout.share_of(heads_of(config)[1]) * head_size(config)
    drawn = rows * config.vocab_size * (itemsize + FP32)  # temperature is the host's work
    return Peak(
        params=int(state.params_bytes),
        grads=0,
        optimizer=int(state.optimizer_bytes),
        gathered=gathered + predict_secondary(layout),
        buffers=max(numels) * itemsize * (layout.shards > 1) + fetched_bytes(layout),
        activations=tokens * (2 * layers * keys + 2 * head_size(config)) * itemsize,
        working=max(block, drawn),
    )


def predict_fullest(layout: Layout, config: PreTrainedConfig, recipe: Recipe) -> Peak:
    """Returns the peak of a whole run: that of its steps, or of generating between them."""
    step = predict_peak(layout, config, recipe)
    between = [predict_generation(layout, config, recipe)] if recipe.generate.steps else []
    return max([step, *between], key=lambda moment: moment.total)
