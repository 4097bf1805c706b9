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

# What `selective` keeps: outputs that cost much to make and little to hold, which are matrix products with a weight and
# the fused attention kernels. Not bmm: in eager attention those are the scores, length squared. By name: those that lie
# in modules of their own need not be imported.
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
    """Make blocks recompute in backward (non-reentrant), as `activation.checkpointing` says. Returns their numbers.
    `blocks`: all of the model, None for those that are on other ranks.

    `none`: keep everything. `full`: keep a block's input. `every:<n>`: full, on blocks 0, n, 2n, ... `selective`: keep
    a block's input and the outputs of SAVED_OPS. `budget:<b>`: torch.compile keeps what recomputes dearest, within b
    times what it would keep by itself; for the whole process, of what is compiled afterwards. `is_random`: blocks drop
    something, and what is run again must drop the same.
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
        is_saved = not is_thin(left.shape[1], right.shape[1])
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def is_thin(depth: int, width: int) -> bool:
    """Whether a product over `depth` makes so much more than it takes (an adapter's second) that it is made again."""
    return 8 * depth <= width


def recomputed(forward: Callable[..., Tensor], is_random: bool = False, **options: Any) -> Callable[..., Tensor]:
    """`forward`, run again in backward instead of keeping its activations. `options` go to torch's checkpoint."""

    # a function of its own: torch.compile steps over functools.partial(checkpoint, ...) and compiles nothing, silently
    def recomputing(*positional: Any, **named: Any) -> Tensor:
        # where nothing random runs (a config with dropout is refused, lora_dropout is not) no state is put back
        return checkpoint(forward, *positional, use_reentrant=False, preserve_rng_state=is_random, **options, **named)

    return recomputing
