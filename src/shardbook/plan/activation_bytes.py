"""The bytes of a micro-batch that no ZeRO stage changes: what blocks keep and need (measure_blocks.py measures it),
and the loss."""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from shardbook.model.loss_head import PRODUCT_ROWS
from shardbook.parallel.layout import Layout
from shardbook.parallel.schedule import Pipeline
from shardbook.plan.measure_blocks import Block, fullest, kinds_of, measure_blocks
from shardbook.recipe import Lora, Recipe

FP32 = 4
BATCH = 5 * 8  # bytes of a token's numbers in a MicroBatch


@dataclass(frozen=True)
class BlockBytes:
    """The bytes of one block."""

    kind: tuple[int, bool]  # of measure_blocks.py, and whether it is recomputed
    kept: int  # from forward to backward
    inside: int  # beside that, at the fullest moment of its backward, with gradients of its parameters
    forward: int  # at the fullest moment of its forward, with what it will keep by then


@dataclass(frozen=True)
class ActivationBytes:
    """The bytes of a micro-batch that no ZeRO stage changes."""

    blocks: tuple[tuple[BlockBytes, ...], ...]  # of each of the rank's chunks of layers, in order
    offloaded: int  # of each recomputed block its input, where activations are offloaded
    stream: int  # what passes from block to block
    keeps_input: bool  # a block's input is among what it keeps
    before_blocks: int  # the batch, rotation, a dense mask
    loss: int
    loss_kept: int  # of that, and of the last norm, until its backward
    loss_backward: int  # when the head's gradient is cast to the dtype of compute
    head_gradient: int  # in the dtype of compute
    norm: int  # what the last norm needs in backward
    teacher: int  # what a block of the model beside needs in forward

    def held(self, chunk: int, count: int | None = None) -> int:
        """Returns the bytes that the first `count` blocks of a chunk (None: all) hold for backward."""
        blocks = self.blocks[chunk][:count]
        recomputed = sum(block.kind[1] for block in blocks)
        # all inputs leave but the last; two are back at once
        return sum(block.kept for block in blocks) - self.offloaded * max(0, recomputed - 3)

    def looked_at(self, chunk: int) -> list[int]:
        """Returns which of a chunk's blocks may be fullest in backward, the last first: of each kind of block the last
        two, where most is held, and the first two, where most is reduced."""
        alike = dict[tuple[int, bool], list[int]]()
        for number, block in enumerate(self.blocks[chunk]):
            alike.setdefault(block.kind, []).append(number)
        return sorted({number for numbers in alike.values() for number in numbers[:2] + numbers[-2:]}, reverse=True)

    def around(self, pipeline: Pipeline, chunk: int) -> int:
        """Returns the bytes that a pass through a chunk holds until its backward, beside those of its blocks."""
        takes, gives = not (pipeline.is_first(chunk) or self.keeps_input), not pipeline.is_last(chunk)
        return self.before_blocks + self.stream * (takes + gives)

    def of_a_pass(self, pipeline: Pipeline, chunk: int) -> int:
        """Returns the bytes that a pass through a chunk holds while others run; of the last one the loss's too."""
        return self.held(chunk) + self.around(pipeline, chunk) + self.loss_kept * pipeline.is_last(chunk)


def count_activation_bytes(layout: Layout, config: PreTrainedConfig, recipe: Recipe) -> ActivationBytes:
    """Returns the bytes of a micro-batch of full rows (data.max_length). With a budget, and compiled, it is fewer."""
    dtype, pipeline, budget = layout.dtype("params"), layout.pipeline, recipe.activation.budget
    itemsize, hidden = dtype.itemsize, config.hidden_size
    kinds = kinds_of(config)
    numbers = layout.blocks(len(kinds))  # not the config's number of layers: some families have two in a block
    rows, tokens = recipe.train.per_device_train_batch_size, recipe.micro_tokens // layout.cp_size
    size = tokens, recipe.micro_tokens**2 // rows
    again = {*recipe.activation.recomputed(numbers)}
    kind = "selective" if recipe.activation.kind == "selective" else "full"
    keys = [(kinds[number], number in again) for number in numbers]
    under = {
        is_again: measure_blocks(
            config,
            recipe,
            kind if is_again else "none",
            layout.precision.params,
            layout.expert_load,
            **layout.block_sizes,
        )
        for is_again in {is_again for _, is_again in keys}
    }
    around = next(iter(under.values()))

    def work_of(key: tuple[int, bool], block: Block) -> BlockBytes:
        kept = block.kept.of(*size)
        # where each rank has all parameters, a gradient does not wait for the end of its block's backward
        inside = fullest(block.alone if layout.is_replicated else block.backward, *size) - int(kept)
        if budget is not None:
            kept = max(block.stream.of(*size), budget * kept)
        return BlockBytes(key, int(kept), inside, fullest(block.forward, *size))

    each = {(kind, is_again): under[is_again].blocks[kind] for kind, is_again in set(keys)}
    first, bytes_of = each[keys[0]], {key: work_of(key, block) for key, block in each.items()}
    runs = [pipeline.own_layers(chunk, len(kinds)) for chunk in range(pipeline.chunks)]
    stream = int(first.stream.of(*size))
    trains_head = not recipe.lora.r or "lm_head" in recipe.lora.modules_to_save
    every_output = recipe.outputs(config.vocab_size)
    outputs = layout.share_of(every_output)
    scored = tokens if outputs > 1 else 2 * rows  # positions that the head sees
    chunk, cast = min(recipe.train.loss_chunk_tokens or scored, scored), itemsize * (itemsize != FP32)
    head, grad_hidden, after = outputs * hidden * trains_head, scored * hidden * itemsize, int(around.after.of(*size))
    loss = loss_bytes(scored, chunk, outputs, hidden, itemsize, trains_head, layout.teacher, every_output)
    forward, backward = sum(loss), grad_hidden + head * (FP32 + cast)
    kept = loss[1] - grad_hidden  # gradients replace hidden states
    if recipe.recomputes_logits:  # gradients are made in backward, of hidden states that are kept
        forward, backward = grad_hidden + chunk * outputs * (FP32 + cast), max(forward, backward)
        kept = grad_hidden
    # logits, which some families have in fp32, a copy and probabilities, until their backward
    routed = sum(layout.balanced) * tokens * FP32
    forward, kept = forward + 3 * routed, kept + 3 * routed
    return ActivationBytes(
        blocks=tuple(tuple(bytes_of[kinds[number], number in again] for number in run) for run in runs),
        offloaded=stream * (recipe.offload.activations != "none"),
        stream=stream,
        keeps_input=first.keeps_input,
        # the gradient of a router's logits is there from the loss on
        before_blocks=int(around.before.of(*size)) + BATCH * tokens + routed + tokens * bool(routed),
        loss=after + forward,
        loss_kept=after + kept,
        loss_backward=after + backward,
        head_gradient=head * itemsize,
        norm=int(around.norm.of(*size)),
        teacher=forward_bytes(layout.teacher, recipe, layout.precision.params, size) if layout.teacher else 0,
    )


def forward_bytes(config: PreTrainedConfig, recipe: Recipe, dtype: str, size: tuple[int, int]) -> int:
    """Returns the bytes that a forward without a backward needs in the widest block of a frozen model of `config`."""
    blocks = measure_blocks(config, without_adapters(recipe), "full", dtype).blocks.values()
    return max(fullest(block.forward, *size) for block in blocks)


def without_adapters(recipe: Recipe) -> Recipe:
    """Returns `recipe` with blocks as a teacher has them."""
    return recipe.model_copy(update={"lora": Lora(), "model": recipe.model.model_copy(update={"load_in_4bit": False})})


def loss_bytes(
    tokens: int,
    chunk: int,
    vocabulary: int,
    hidden: int,
    itemsize: int,
    is_trained: bool = True,
    teacher: PreTrainedConfig | None = None,
    full_vocabulary: int = 0,
) -> tuple[int, int]:
    """Returns the bytes that the loss needs for a chunk, and those for its gradients, all `tokens` trained, and the
    head too where it `is_trained`.

    A chunk takes the larger of two moments: its logits, their softmax in fp32, which becomes their gradient, and that
    in the compute dtype (all one tensor, where that is fp32); or the last of these and the product that is added to the
    head's gradient, which is in fp32. Hidden states of trained positions count with their gradient. The logits of a
    `teacher` are beside, with three more tensors of their size in fp32 (one is the logits, where all is fp32).
    `full_vocabulary`: with what other ranks have of it (0: none); the softmax of a part does not overwrite logits.
    """
    is_cast, is_part = itemsize != FP32, vocabulary < full_vocabulary
    most = max(vocabulary, full_vocabulary)
    teacher_vocabulary, width = (min(teacher.vocab_size, most), teacher.hidden_size) if teacher else (0, 0)
    logits = chunk * vocabulary * (FP32 + (1 if teacher_vocabulary else 2) * itemsize * is_cast)
    logits += chunk * vocabulary * FP32 * (is_part and not is_cast)
    logits += chunk * teacher_vocabulary * (3 * FP32 + itemsize * is_cast)
    product = chunk * vocabulary * itemsize + min(vocabulary, PRODUCT_ROWS) * hidden * itemsize * is_cast
    hidden_states = tokens * (2 * hidden + width) * itemsize
    return max(logits, product * is_trained), vocabulary * hidden * FP32 * is_trained + hidden_states
