"""Activation checkpointing: what a block keeps from forward to backward.

Invariant: parameter names do not change, gradients do not change by a bit, and the checkpoint lies INSIDE the sharded
block (its forward is replaced, not the module), so recomputation issues no second all-gather. Apply before compile
and before the stage.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardbook.comm.torch_private import set_memory_budget
from shardbook.recipe import Activation, RecipeError

# Ops whose outputs `selective` keeps: dear to compute and small to hold, they are matrix products with a weight and the
# fused attention kernels. Not bmm: in eager attention its outputs are the scores, length squared. The ops go by their
# names, so that modules which define some of them need not be imported.
SAVED_OPS = {
    "aten.mm.default",
    "aten.addmm.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch_attn._varlen_attn.default",
    "flex_attention",
}


def apply_checkpointing(
    blocks: Sequence[nn.Module | None], activation: Activation, is_random: bool = False
) -> list[int]:
    """Makes blocks recompute in backward (non-reentrant), as `activation.checkpointing` says. Returns their numbers.
    `blocks`: all blocks of the model, None for blocks on other ranks. RecipeError where n is above their number.

    `none`: keep everything. `full`: keep a block's input. `every:<n>`: full, on blocks 0, n, 2n, ... `selective`: keep
    a block's input and the outputs of SAVED_OPS. `budget:<b>`: torch.compile keeps the activations that are dearest to
    recompute, within b times the bytes that it would keep by itself; this holds for the whole process, for everything
    compiled afterwards. `is_random`: blocks have dropout, and a recomputed block must drop the same elements.
    """
    set_memory_budget(1.0 if activation.budget is None else activation.budget)
    if activation.every > len(blocks):
        raise RecipeError(
            f"activation.checkpointing = {activation.checkpointing!r}: the model has {len(blocks)} blocks; "
            f"must be every:1 to every:{len(blocks)}, or none"
        )
    chosen = ((number, blocks[number]) for number in activation.recomputed(range(len(blocks))))
    own = {number: block for number, block in chosen if block is not None}
    options: dict[str, Any] = {}
    if activation.checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_saved_ops)
    for block in own.values():
        block.forward = recomputed(block.forward, is_random, **options)
    return list(own)


def keep_saved_ops(context: Any, op: Any, *positional: Any, **named: Any) -> CheckpointPolicy:
    is_saved = str(op) in SAVED_OPS
    if is_saved and str(op) == "aten.mm.default":
        left, right = positional[:2]
        is_saved = not is_low_rank(left.shape[1], right.shape[1])
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def is_low_rank(depth: int, width: int) -> bool:
    """Returns whether a product is so wide beside its `depth` (an adapter's second) that it is recomputed, not kept."""
    return 8 * depth <= width


def recomputed(forward: Callable[..., Tensor], is_random: bool = False, **options: Any) -> Callable[..., Tensor]:
    """Returns a `forward` that backward runs again instead of keeping activations. `options`: torch's checkpoint's."""

    # a function, not functools.partial(checkpoint, ...): torch.compile skips a partial and silently compiles nothing
    def recomputing(*positional: Any, **named: Any) -> Tensor:
        # the random state is restored only where blocks have dropout (lora_dropout: a config with dropout is refused)
        return checkpoint(forward, *positional, use_reentrant=False, preserve_rng_state=is_random, **options, **named)

    return recomputing
