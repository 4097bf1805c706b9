"""The peak of a step's memory, by category and moment.

Invariant: a step is fullest at one of a few moments, and each is a sum of bytes that a rank keeps, gathers, sends and
holds for backward, and that the loss or one block needs on top. plan/simulate.py counts the same from the code itself,
and tests hold the two together. Sources of the counts: tensors that autograd saves in transformers' blocks and that
fully_shard holds; Korthikanti et al., arXiv 2205.05198, section 4, for the idea.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import compress
from math import prod

from transformers import PreTrainedConfig

from shardbook.arithmetic import ceil_div
from shardbook.memory.shelf import STAGINGS, fetched_bytes
from shardbook.model.attention import head_size, kernel_of
from shardbook.parallel.layout import Layout
from shardbook.parallel.schedule import Pipeline
from shardbook.parallel.units import Unit, backward_order
from shardbook.plan.formulas import predict_gathered_peak, predict_resident, predict_residual, predict_secondary
from shardbook.plan.kept import FP32, kept_by_a_block, loss_bytes, read_adapted, read_widths
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


@cache
def most_in_flight(pipeline: Pipeline, micros: int, micro: int, is_forward: bool) -> int:
    """Returns the most passes that hold activations while a micro-batch runs forward, or backward, through a chunk of
    layers: its own, and the passes whose backward is still to run."""
    flying = most = 0
    for action in pipeline.actions(micros):
        flying += action.is_forward
        if action.micro == micro and action.is_forward == is_forward:
            most = max(most, flying)
        flying -= not action.is_forward
    return most


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


class _Sharded:
    """Counts a rank's bytes of parameters and gradients where fully_shard gathers and reduces units."""

    def __init__(self, layout: Layout, micros: int):
        self.layout, self.micros = layout, micros
        self.order = [unit for unit in layout.units if unit.numel]
        self.spanning = [unit for unit in self.order if unit.spans and not unit.forward_only]
        self.back = [unit for unit in backward_order(self.order) if not unit.spans]
        self.compute, self.reduce = layout.dtype("params").itemsize, layout.dtype("reduce").itemsize
        self.master = layout.dtype("master").itemsize
        self.is_away = layout.offload.optimizer != "none"
        # what is reduced, on the device: across replicas it waits there in fully_shard's own buffers
        self.stays = not self.is_away or layout.replicas > 1
        self.fetched = fetched_bytes(layout)
        self.sizes = {unit: [unit.padded_numel(layout.shards, only) for only in (False, True)] for unit in self.order}

    def at(self, micro: int, phase: str, running: Unit, done: Sequence[Unit]) -> tuple[int, int, int, int]:
        """Returns the bytes of sums, of gathered parameters, of buffers, and of gradients of `running` that are not
        summed yet, in micro-batch `micro`. `phase`: forward, backward, backward done (all its gradients are there) or
        reduction of `running`; the backward of the units in `done` is over."""
        layout, is_last = self.layout, micro == self.micros - 1
        reduces, is_forward = layout.stage.syncs(is_last), phase == "forward"
        kept = {unit for unit in self.order if unit.spans or not unit.frees}
        if is_last:
            kept -= set(done)
        gathered = kept | {running}
        if phase == "reduction" and (running.frees or is_last):
            gathered.remove(running)
        if is_forward:  # fully_shard holds the last gather's output until the next one
            last = [unit for unit in self.order if not unit.spans and (unit.frees or not micro)][-1:]
        else:
            after = self.back.index(running) + 1 if running in self.back else len(self.back)
            ahead = self.back[after : after + layout.backward_prefetch]
            last = [unit for unit in ahead if unit.frees and unit.gathers_again]
        reducing = [running] if phase == "reduction" else [] if is_forward else list(done[-1:])
        buffers = (
            self._whole(last) * self.compute * (layout.shards > 1) + self._whole(reducing, True) * self.reduce * reduces
        )
        buffers += self.fetched
        own = self._whole([running], True) * self.compute * (phase in ("backward done", "reduction"))
        is_alone = layout.shards == 1 < layout.tp_size and phase == "reduction" and reduces
        if is_alone:  # copied once more, when its own are gone
            buffers, own = buffers + self._whole([running], True) * self.reduce, 0
        if reduces and (layout.stage.reduce_every_micro or self.micros == 1):
            shards = self._whole(self.order if micro else done, True) // layout.shards * self.stays
            # across replicas sums wait in the dtype of reduction
            sums = shards * (self.reduce if layout.replicas > 1 and (self.is_away or not is_last) else self.master)
            if layout.replicas > 1 and is_last and self.reduce != self.master and not self.is_away:
                sums += self._whole(done, True) // layout.shards * self.reduce
        elif micro and not is_last:
            sums = self._whole(self.order, True) * self.reduce
            own *= phase != "reduction"
        elif not micro:  # first gradients become sums, one unit after the other
            sums = self._whole([*done, *[running] * (phase == "reduction")], True) * self.reduce
            own *= self.reduce != self.compute or phase != "reduction"
        else:
            waiting = [unit for unit in self.order if unit not in done and not (is_alone and unit is running)]
            sums = (
                self._whole(waiting, True) * self.reduce
                + self._whole(done, True) // layout.shards * self.master * self.stays
            )
            own *= phase != "reduction"
        if reduces and not self.stays:  # on their way to the host
            sums += self._whole(done[-STAGINGS:], True) // layout.shards * self.reduce
        if phase == "reduction" and reduces:
            sums += self._whole([running], True) // layout.shards * self.reduce
        return sums, self._whole(gathered) * self.compute, buffers, own

    def _whole(self, units: Iterable[Unit], trained_only: bool = False) -> int:
        return sum(self.sizes[unit][trained_only] for unit in units)


class _Copied(_Sharded):
    """Counts the same bytes where each rank holds the whole model: parallel/copies.py."""

    def at(self, micro: int, phase: str, running: Unit, done: Sequence[Unit]) -> tuple[int, int, int, int]:
        layout = self.layout
        # what spans the pass begins with the last norm, before all others
        begun = {*self.order} if micro else {*done, *({running, *self.spanning} if phase != "forward" else ())}
        gathered = sum(unit.cast_numel(self.compute) for unit in self.order) * self.compute
        buckets = [bucket for chunk in layout.chunks for bucket in chunk.buckets]
        sizes, itemsize = [self._whole(bucket, True) for bucket in buckets], layout.sum_dtype.itemsize
        sums = sum(size for size, bucket in zip(sizes, buckets, strict=True) if begun & {*bucket}) * itemsize
        own = max((prod(shape) for shape in compress(running.shapes, running.trained)), default=0) * self.compute
        own *= phase == "reduction"
        if phase == "reduction" and len(done) == len(self.order) - 1 and itemsize != self.master:
            # weights in the dtype of compute are gone, and sums are cast one after the other: of the first ones there
            # are gradients already, of the others still sums
            cast = range(len(sizes))
            most = max(sum(sizes[: number + 1]) * self.master + sum(sizes[number:]) * itemsize for number in cast)
            if most > sums + gathered + own:
                return most, 0, 0, 0
        return sums, gathered, 0, own


def predict_moments(layout: Layout, config: PreTrainedConfig, recipe: Recipe) -> dict[str, Peak]:
    """Returns the bytes at the moments where a step can be fullest, in order, by name: of its first two micro-batches
    and its last the loss, and backward of the head, of the last blocks, of the first ones, and of the last unit."""
    work, state = count_work(layout, config, recipe), predict_resident(layout, 0, recipe.optim.name)
    micros = recipe.train.gradient_accumulation_steps
    lies = (_Copied if layout.copies else _Sharded)(layout, micros)
    vocabulary = ceil_div(config.vocab_size, layout.tp_size)
    by_head = [unit for unit in lies.back[:1] if any(shape[0] in (vocabulary, 1) for shape in unit.shapes)]
    blocks = [unit for unit in lies.back if unit not in by_head and unit.read_in_backward]
    pipeline = layout.pipeline
    tied = 0 if by_head or not pipeline.has_last_stage else work.head_gradient  # waits for the embedding's
    first = [*by_head, *lies.spanning, *lies.back][0]
    visits = [("loss", "forward", first, work.held, work.loss)] if pipeline.has_last_stage else []
    visits += [("head", "reduction", unit, work.held, 0) for unit in by_head]
    beside = [unit for unit in lies.order if unit.forward_only]
    widest = sorted(beside, key=lambda unit: unit.numel)[-1:]
    visits += [("teacher", "forward", unit, 0, work.teacher) for unit in widest]
    count = len(blocks)
    numbers = {"last block": 0, "last block but one": 1, "second block": count - 2, "first block": count - 1}
    for name, number in numbers.items():
        for unit in blocks[number : number + 1]:
            held, own = work.held * (count - number) // count, work.held // work.layers
            visits.append((f"{name}, MLP", "backward", unit, held, work.gate + tied))
            visits.append((f"{name}, norm", "backward done", unit, held - own, work.norm + tied))
            visits.append((f"{name}, reduced", "reduction", unit, held - own, tied))
    outer = [unit for unit in [*lies.back, *lies.spanning] if unit not in by_head and unit not in blocks]
    for unit in outer[-1:]:
        # a tied weight's two gradients and, for a moment, their sum
        visits += [("end", "backward", unit, 0, 3 * tied), ("end, reduced", "reduction", unit, 0, 0)]
    moments = {}
    for micro in sorted({0, min(1, micros - 1), micros - 1}):
        for name, phase, unit, held, working in visits:
            order = [*lies.back, *lies.spanning]
            done = order[: order.index(unit)] if phase != "forward" else []
            others = most_in_flight(pipeline, micros, micro, phase == "forward") - 1
            # what comes next is there, and a slope that came is no block's own
            arrived = work.stream * (phase != "forward") * (1 + (unit is not blocks[0])) if pipeline.ranks > 1 else 0
            before_all = phase == "forward" and pipeline.schedule == "gpipe" and pipeline.ranks > 1
            sums, gathered, buffers, own = lies.at(0 if before_all else micro, phase, unit, done)
            moments[f"micro-batch {micro + 1}, {name}"] = Peak(
                params=int(state.params_bytes),
                grads=sums + predict_residual(layout),
                optimizer=int(state.optimizer_bytes),
                gathered=gathered + predict_secondary(layout),
                buffers=buffers,
                activations=held + work.before_blocks + work.passing + others * work.of_a_pass(pipeline) + arrived,
                working=working + own,
            )
    if layout.tp_size > 1:  # after all else, their sums
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
