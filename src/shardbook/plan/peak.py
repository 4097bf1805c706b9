"""The peak of a step's memory on a GPU, by category; and what to change where it does not fit.

Invariant: what a rank keeps, gathers and holds for backward is exact (tests count it). The work of one block, the loss
and the reduction on top of it are upper estimates: allocators and compilers reuse some of that. Sources of the counts:
what autograd saves of transformers' blocks; Korthikanti et al., arXiv 2205.05198, section 4, for the idea.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from transformers import PreTrainedConfig

from shardbook.axes import DP_SHARD
from shardbook.model.attention import head_size
from shardbook.model.families import FAMILIES
from shardbook.parallel.layout import Layout
from shardbook.parallel.stages import find_stage
from shardbook.plan.formulas import predict_gathered_peak, predict_resident, predict_residual, predict_secondary
from shardbook.recipe import Recipe

FP32 = 4
GB = 10**9


@dataclass(frozen=True)
class Widths:
    """Numbers that a block has for each token."""

    hidden: int
    queries: int  # all heads together
    keys: int  # keys of all heads; values are as many
    inner: int
    heads: int
    key_heads: int
    head_norms: bool  # queries and keys are normalised by head


def read_widths(config: PreTrainedConfig) -> Widths:
    heads, key_heads, size = config.num_attention_heads, config.num_key_value_heads, head_size(config)
    norms = FAMILIES[config.model_type].head_norms
    return Widths(config.hidden_size, heads * size, key_heads * size, config.intermediate_size, heads, key_heads, norms)


def kept_by_a_block(kind: str, of: Widths, itemsize: int) -> int:
    """Bytes that a block holds from forward to backward for one token. `kind`: none, full or selective; `itemsize`: of
    the dtype it computes in. Under a kernel that takes document boundaries or plain causal rows, not compiled.

    none: a norm keeps its input in fp32, its scale, and its result twice (before and after its weight); attention its
    queries, keys, values, result, and one fp32 a head (torch 2.11 has keys and values repeated, and holds as many as
    queries); the MLP four of its inner width. full: the block's input.
    selective: that and the results of SAVED_OPS.
    """
    attention = (2 * of.queries + 2 * of.keys) * itemsize + of.heads * FP32
    if kind == "full":
        return of.hidden * itemsize
    if kind == "selective":
        return 3 * of.hidden * itemsize + attention + 2 * of.inner * itemsize

    def norm(width: int, count: int) -> int:
        return width * (FP32 + 2 * itemsize) + count * FP32

    # a head's norm keeps its result once: what its weight made goes through the rotation, which keeps nothing
    by_head = norm(of.queries, of.heads) + norm(of.keys, of.key_heads) - (of.queries + of.keys) * itemsize
    return 2 * norm(of.hidden, 1) + attention + 4 * of.inner * itemsize + by_head * of.head_norms


def loss_bytes(tokens: int, chunk: int, vocabulary: int, hidden: int, itemsize: int) -> tuple[int, int]:
    """Bytes that the loss needs: of a chunk's logits, and of the gradients it makes, all `tokens` trained.

    Logits, their log-softmax in fp32 which becomes their gradient, and that in the dtype of compute. The head's
    gradient added up in fp32, and one chunk's product or the result in the dtype of compute; hidden states of trained
    positions and their gradient.
    """
    is_cast = itemsize != FP32
    logits = chunk * vocabulary * (itemsize + FP32 + itemsize * is_cast)
    return logits, vocabulary * hidden * (FP32 + itemsize * is_cast) + 2 * tokens * hidden * itemsize


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank at the fullest moment of a step."""

    params: int
    grads: int
    optimizer: int
    gathered: int  # parameters in the dtype of compute, one gather in flight, hpZ's secondary shards
    activations: int  # what all blocks hold for backward
    working: int  # more that one block, the loss or a reduction needs

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / GB:.1f}" for name, value in asdict(self).items())
        return f"{self.total / GB:.1f} GB ({parts})"


def predict_peak(layout: Layout, config: PreTrainedConfig, recipe: Recipe) -> Peak:
    """The peak under `layout` of a model of `config`, for the micro-batches, checkpointing and loss of `recipe`.

    Rows count as full (data.max_length). With a budget, and compiled, blocks keep less than is said here.
    """
    of, itemsize = read_widths(config), layout.dtype("params").itemsize
    rows, layers = recipe.train.per_device_train_batch_size, config.num_hidden_layers
    tokens = rows * recipe.data.max_length
    kind, _, amount = recipe.activation.checkpointing.partition(":")
    kept = {name: kept_by_a_block(name, of, itemsize) for name in ("none", "full", "selective")}
    match kind:  # blocks that backward runs again
        case "none" | "budget":
            again = 0
        case "every":
            again = -(-layers // int(amount))
        case _:
            again = layers
    held = again * kept["selective" if kind == "selective" else "full"] + (layers - again) * kept["none"]
    if kind == "budget":
        held = int(layers * max(kept["full"], float(amount) * kept["none"]))
    dense = 0
    if config._attn_implementation in ("sdpa", "eager") and recipe.data.packing:
        # of bool, for all blocks; and in the dtype of compute, which each holds that is not run again
        dense = rows * recipe.data.max_length**2 * (1 + itemsize * max(1, layers - again))
    state = predict_resident(layout, 0, recipe.optim.name)
    largest = max(unit.padded_numel(layout.shards) for unit in layout.units)
    # gradients of a unit in the dtype of compute, then in that of the reduction
    reducing = largest * (itemsize + layout.dtype("reduce").itemsize) * (layout.world_size > 1)
    whole, unreduced = sum(unit.padded_numel(layout.shards) for unit in layout.units), 0
    if layout.shards == 1:  # sums become the gradients in place, or make place for them unit by unit
        unreduced = whole * max(0, layout.sum_dtype.itemsize - layout.dtype("master").itemsize)
    elif not layout.stage.reduce_every_micro and recipe.train.gradient_accumulation_steps > 1:
        unreduced = whole * layout.dtype("reduce").itemsize
    # of a block in backward: what it holds, made again, and gradients of the MLP's three
    block = tokens * ((kept["none"] if again else 0) + 3 * of.inner * itemsize)
    chunk = min(recipe.train.loss_chunk_tokens or tokens, tokens)
    loss = sum(loss_bytes(tokens, chunk, config.vocab_size, of.hidden, itemsize))
    return Peak(
        params=int(state.params_bytes),
        grads=int(state.grads_bytes) + predict_residual(layout) + unreduced,
        optimizer=int(state.optimizer_bytes),
        gathered=predict_gathered_peak(layout) + largest * itemsize * (layout.shards > 1) + predict_secondary(layout),
        activations=held * tokens + dense,
        working=max(loss, block + reducing),
    )


def smallest_change(layout: Layout, config: PreTrainedConfig, recipe: Recipe, room: float) -> str:
    """What to set so that the peak is at most `room` bytes: the first that is enough of those that change one thing,
    the cheapest in time first. Empty where none is."""
    for words, changed_layout, changed in _changes(layout, recipe):
        if predict_peak(changed_layout, config, changed).total <= room:
            return words
    return ""


def _changes(layout: Layout, recipe: Recipe) -> Iterator[tuple[str, Layout, Recipe]]:
    batch, steps = recipe.train.per_device_train_batch_size, recipe.train.gradient_accumulation_steps
    while batch > 1:
        batch, steps = -(-batch // 2), steps * 2
        keys = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
        words = " ".join(f"train.{key}={value}" for key, value in keys.items())
        yield words, layout, recipe.model_copy(update={"train": recipe.train.model_copy(update=keys)})
    kinds = ["none", "selective", "full"]
    now = recipe.activation.checkpointing
    for kind in kinds[kinds.index(now) + 1 if now in kinds else 1 :]:
        activation = recipe.activation.model_copy(update={"checkpointing": kind})
        yield f"activation.checkpointing={kind}", layout, recipe.model_copy(update={"activation": activation})
    if not layout.stage.reshard_after_forward and layout.world_size > 1:
        units = tuple(replace(unit, frees=True, reshard_after_forward=not unit.spans) for unit in layout.units)
        sizes = dict.fromkeys(layout.sizes, 1) | {DP_SHARD: layout.world_size}
        yield "parallel.stage=zero3", replace(layout, stage=find_stage("zero3"), sizes=sizes, units=units), recipe
    for times in (2, 4, 8) if layout.stage.shards else ():
        sizes = layout.sizes | {DP_SHARD: layout.shards * times}
        yield f"{layout.world_size * times} ranks", replace(layout, sizes=sizes), recipe
