"""The peak of a step's memory, by category and moment.

Invariant: a step is fullest at one of a few moments, and each is a sum of bytes that a rank keeps, gathers, sends and
holds for backward, and that the loss or one block needs on top. plan/simulate.py counts the same from the code itself,
and tests hold the two together. Sources of the counts: tensors that autograd saves in transformers' blocks and that
fully_shard holds; Korthikanti et al., arXiv 2205.05198, section 4, for the idea.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from transformers import PreTrainedConfig

from shardbook.arithmetic import ceil_div
from shardbook.memory.shelf import fetched_bytes
from shardbook.model.attention import head_size, kernel_of
from shardbook.parallel.layout import Layout
from shardbook.parallel.schedule import Pipeline
from shardbook.parallel.units import Unit, backward_order
from shardbook.plan.events import step_passes
from shardbook.plan.formulas import predict_gathered_peak, predict_resident, predict_residual, predict_secondary
from shardbook.plan.kept import FP32, kept_by_a_block, loss_bytes, read_adapted, read_widths
from shardbook.plan.live import CopiedBytes, ShardedBytes
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
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / GB:.1f}" for name, value in asdict(self).items())
        return f"{self.total / GB:.1f} GB ({parts})"


@dataclass(frozen=True)
class BlockBytes:
    """The bytes of a micro-batch that no ZeRO stage changes."""

    held: int  # what all blocks hold for backward, of a chunk of layers where a rank has several
    layers: int
    stream: int  # what passes from block to block
    passing: int  # what one pass through them takes and gives, which is there until its backward
    before_blocks: int  # the batch, rotation, a dense mask
    loss: int
    loss_kept: int  # of that, until its backward
    head_gradient: int  # in the dtype of compute
    gate: int  # what a block's backward needs at its MLP, with the gradient of its largest matrix
    norm: int  # the same at its first norm, with none
    teacher: int  # what a block of the model beside needs in forward

    def of_a_pass(self, pipeline: Pipeline) -> int:
        """Returns the bytes that a pass holds until its backward, while others run; in gpipe the loss's too."""
        waits = pipeline.has_last_stage and pipeline.schedule == "gpipe"
        return self.held + self.before_blocks + self.passing + self.loss_kept * waits


def count_work(layout: Layout, config: PreTrainedConfig, recipe: Recipe) -> BlockBytes:
    """Returns the bytes of a micro-batch of full rows (data.max_length). With a budget, and compiled, it is fewer."""
    of, itemsize = read_widths(config, layout.tp_size, layout.cp_size), layout.dtype("params").itemsize
    numbers, pipeline = layout.blocks(config.num_hidden_layers), layout.pipeline
    rows, layers = recipe.train.per_device_train_batch_size, len(numbers)
    tokens = recipe.micro_tokens // layout.cp_size
    kind, budget = recipe.activation.kind, recipe.activation.budget
    adapted = read_adapted(recipe.lora, of)
    trains_head = not adapted.r or "lm_head" in recipe.lora.modules_to_save
    kept = {name: kept_by_a_block(name, of, itemsize, adapted) for name in ("none", "full", "selective")}
    if kernel_of(config) == "sdpa" or (layout.cp_size > 1 and adapted.trains("o_proj")):
        kept["none"] += of.queries * itemsize  # its result by head, and by token for the product that follows
    again = len(recipe.activation.recomputed(numbers))  # run in backward again
    of_again = kept["selective" if kind == "selective" else "full"]
    held = again * of_again + (layers - again) * kept["none"]
    if recipe.offload.activations != "none":  # all inputs leave but the last; two are back at once
        held -= max(0, again - 3) * kept["full"]
    if budget is not None:
        held = int(layers * max(kept["full"], budget * kept["none"]))
    dense = 0
    if kernel_of(config) in ("sdpa", "eager") and recipe.data.packing:
        dense = recipe.micro_tokens**2 // rows  # of bool, for all blocks; each has its own in the dtype of compute
    # backward of a gate: its three gradients, when the product's input, one of what was held, is gone; that of the
    # block's result (in fp32 the checkpoint itself is what a block's first norm keeps)
    alone = of_again - kept["full"] * (itemsize != FP32)
    widest = float(2 * of.inner + of.hidden)
    # the gradient of the MLP's matrix, or that matrix out of its four bits
    matrix = of.inner * of.hidden * itemsize * (not adapted.r or recipe.model.load_in_4bit)
    if of.tp_size > 1:
        # gathered slopes of all tokens: one at the last product; two at the first two, with the gradients of all three
        first = 2 * of.hidden - 3 * of.inner + 2 * matrix / itemsize / tokens
        widest = max(2 * of.inner, of.inner + of.hidden, first) + of.hidden / of.tp_size
    widest += of.hidden * (kind == "selective")  # what the last product made is kept, and not asked for
    gate = widest * itemsize + (kept["none"] - alone if again else 0)
    if again and adapted.decomposed and adapted.trains("down_proj"):
        gate -= (1 + (kind == "selective")) * of.hidden * itemsize  # gone by then
    outputs = ceil_div(recipe.outputs(config.vocab_size), layout.tp_size)
    scored = tokens if outputs > 1 else 2 * rows  # positions that the head sees
    chunk = min(recipe.train.loss_chunk_tokens or scored, scored)
    # the last norm's input in fp32, and its result before its weight
    last = tokens // of.tp_size * of.hidden * (FP32 + (not adapted.r) * itemsize)
    beside = read_widths(layout.teacher) if layout.teacher else None
    taught = (layout.teacher.vocab_size, beside.hidden) if beside else (0, 0)
    loss = loss_bytes(scored, chunk, outputs, of.hidden, itemsize, trains_head, taught, of.tp_size > 1)
    # the first norm's backward, step by step, in fp32; before it that of queries, with two gathered slopes
    norm = tokens // of.tp_size * of.hidden * (6 * FP32 + itemsize)
    shares = (FP32 + 3 * itemsize) * of.hidden / of.tp_size
    attention = int(tokens * (shares + (3 * of.hidden + of.queries) * itemsize)) * (of.tp_size > 1)
    stream = tokens // of.tp_size * of.hidden * itemsize
    # what came in is what a recomputed block keeps, or in fp32 its first norm; one more comes, and its slope
    is_kept = itemsize == FP32 or again == layers
    interleaved = pipeline.chunks > 1  # then each rank has passes that neither begin nor end
    passing = stream * (
        (interleaved or not pipeline.has_first_stage) * (not is_kept) + (interleaved or not pipeline.has_last_stage)
    )
    return BlockBytes(
        held=(int(held * tokens) + dense * itemsize * (layers - again)) // pipeline.chunks,
        layers=layers // pipeline.chunks,
        stream=stream,
        passing=passing,
        before_blocks=tokens * (2 * head_size(config) * itemsize + 5 * 8) + dense,
        loss=last + sum(loss),
        loss_kept=loss[1],
        head_gradient=outputs * of.hidden * itemsize * trains_head,
        gate=int(gate * tokens) + matrix + dense * itemsize * bool(again),
        norm=max(norm, attention),
        teacher=tokens * (2 * beside.hidden + 3 * beside.inner) * itemsize if beside else 0,
    )


Visits = dict[tuple[str, Unit | None], tuple[str, int, int]]  # name, held by blocks, and needed on top


def _visits(layout: Layout, chunk: int, own: Sequence[Unit], work: BlockBytes, vocabulary: int) -> Visits:
    """Returns the visits of the passes through a chunk of layers with the units `own`, by moment and unit: the loss,
    backward of the head, of the last blocks, of the first ones, and of the last unit, and the end."""
    order, pipeline = [unit for unit in own if unit.numel], layout.pipeline
    spanning = [unit for unit in order if unit.spans and not unit.forward_only]
    back = [unit for unit in backward_order(order) if not unit.spans]
    by_head = [unit for unit in back[:1] if any(shape[0] in (vocabulary, 1) for shape in unit.shapes)]
    blocks = [unit for unit in back if unit not in by_head and unit.read_in_backward]
    # waits for the embedding's
    tied = 0 if by_head or not pipeline.is_last(chunk) else work.head_gradient
    # the gradient that came; but for the last block, whose own it is, what comes next is there too
    came = work.stream * (pipeline.ranks > 1)
    visits: Visits = {("end of backward", None): ("end, sums", 2 * came, 0)} if layout.copies else {}
    if pipeline.is_last(chunk):
        visits["end of forward", None] = "loss", work.held, work.loss
    for unit in sorted((unit for unit in order if unit.forward_only), key=lambda unit: unit.numel)[-1:]:
        visits["forward", unit] = "teacher", 0, work.teacher
    for unit in by_head:
        visits["reduction", unit] = "head", work.held + 2 * came, 0
    count = len(blocks)
    numbers = {"last block": 0, "last block but one": 1, "second block": count - 2, "first block": count - 1}
    for name, number in numbers.items():
        for unit in blocks[number : number + 1]:
            arrived = came * (1 + (number > 0))
            held, after = work.held * (count - number) // count + arrived, arrived - work.held // work.layers
            after += work.held * (count - number) // count
            visits["backward", unit] = f"{name}, MLP", held, work.gate + tied
            visits["backward done", unit] = f"{name}, norm", after, work.norm + tied
            visits["reduction", unit] = f"{name}, reduced", after, tied
    for unit in [unit for unit in [*back, *spanning] if unit not in by_head and unit not in blocks][-1:]:
        # a tied weight's two gradients and, for a moment, their sum
        visits["backward", unit], visits["reduction", unit] = ("end", 2 * came, 3 * tied), ("end, reduced", 2 * came, 0)
    return visits


def predict_moments(layout: Layout, config: PreTrainedConfig, recipe: Recipe) -> dict[str, Peak]:
    """Returns the bytes at the moments where a step can be fullest, in order, by name: of its first two micro-batches
    and its last, and the fullest of all."""
    work, state = count_work(layout, config, recipe), predict_resident(layout, 0, recipe.optim.name)
    micros, pipeline, tp_size = recipe.train.gradient_accumulation_steps, layout.pipeline, layout.tp_size
    visits = [
        _visits(layout, number, chunk.units, work, ceil_div(config.vocab_size, tp_size))
        for number, chunk in enumerate(layout.chunks)
    ]
    # more micro-batches bring nothing that these do not: but in gpipe all forwards are before the first backward
    few = micros if pipeline.schedule == "gpipe" else min(micros, 3 * pipeline.ranks)
    live = (CopiedBytes if layout.copies else ShardedBytes)(layout, few)
    named, flying = {unit for chunk in visits for _, unit in chunk}, 0
    constants = {"params": int(state.params_bytes), "optimizer": int(state.optimizer_bytes)}
    residual, secondary = predict_residual(layout), predict_secondary(layout)
    found = list[tuple[int, str, Peak]]()
    for action, events in step_passes(layout, few):
        flying += action.is_forward
        around = work.before_blocks + work.passing + (flying - 1) * work.of_a_pass(pipeline)
        for moment, unit, (sums, gathered, buffers, own) in live.follow(action, events, named):
            if (moment, unit) in visits[action.chunk]:
                name, held, working = visits[action.chunk][moment, unit]
                peak = Peak(
                    **constants,
                    grads=sums + residual,
                    gathered=gathered + secondary,
                    buffers=buffers,
                    activations=held + around,
                    working=working + own,
                )
                number = micros if action.micro == few - 1 else action.micro + 1
                of_chunk = f", chunk {action.chunk + 1}" * (pipeline.chunks > 1)
                found.append((number, f"micro-batch {number}{of_chunk}, {name}", peak))
        flying -= not action.is_forward
    fullest = max(found, key=lambda each: each[2].total)
    moments = {name: peak for number, name, peak in found if number in (1, 2, micros) or name == fullest[1]}
    if tp_size > 1:  # after all else, their sums
        params, sums, optimizer = (int(size) for size in asdict(state).values())
        flat = layout.replicated_numel * layout.dtype("master").itemsize
        moments["what is not cut"] = Peak(params, sums, optimizer, gathered=0, buffers=flat, activations=0, working=0)
    return moments


def predict_peak(layout: Layout, config: PreTrainedConfig, recipe: Recipe) -> Peak:
    """Returns the fullest moment of a step of a model of `config` with `recipe`'s micro-batches, recompute and loss."""
    return max(predict_moments(layout, config, recipe).values(), key=lambda moment: moment.total)


def predict_generation(layout: Layout, config: PreTrainedConfig, recipe: Recipe) -> Peak:
    """Returns the bytes while samples are generated: every parameter stays gathered (with hpZ, as in a forward), beside
    a cache of keys and values. Prompts count as full: with their continuation they have data.max_length tokens."""
    of, state, asked = read_widths(config), predict_resident(layout, 0, recipe.optim.name), recipe.generate
    itemsize, length = layout.dtype("params").itemsize, recipe.data.max_length
    rows = ceil_div(asked.count, layout.data_rank(0)[1])
    tokens, layers = rows * length, config.num_hidden_layers
    units = [unit for unit in layout.units if layout.copies or not unit.forward_only]
    whole = [unit.cast_numel(itemsize) if layout.copies else unit.padded_numel(layout.shards) for unit in units]
    gathered = predict_gathered_peak(layout) if layout.switches.secondary else sum(whole) * itemsize
    mlp = tokens * (2 * of.hidden + 3 * of.inner) * itemsize + rows * length**2
    drawn = rows * config.vocab_size * (itemsize + FP32)  # temperature is the host's work
    return Peak(
        params=int(state.params_bytes),
        grads=predict_residual(layout),
        optimizer=int(state.optimizer_bytes),
        gathered=gathered + predict_secondary(layout),
        buffers=max(whole) * itemsize * (layout.shards > 1) + fetched_bytes(layout),
        activations=tokens * (2 * layers * of.keys + 2 * head_size(config)) * itemsize,
        working=max(mlp, drawn),
    )


def predict_fullest(layout: Layout, config: PreTrainedConfig, recipe: Recipe) -> Peak:
    """Returns the peak of a whole run: that of its steps, or of generating between them."""
    step = predict_peak(layout, config, recipe)
    between = [predict_generation(layout, config, recipe)] if recipe.generate.steps else []
    return max([step, *between], key=lambda moment: moment.total)
