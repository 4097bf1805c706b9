"""Activation checkpointing: what a block keeps from forward to backward.

Invariant: parameter names do not change, and the checkpoint lies INSIDE the sharded block (its forward is replaced,
not the module), so recomputation issues no second all-gather. Apply before compile and before the stage.
"""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def apply_checkpointing(blocks: list[nn.Module], checkpointing: str) -> None:
    """`none`: keep everything. `full`: keep a block's input, recompute the rest in backward (non-reentrant)."""
    match checkpointing:
        case "none":
            return
        case "full":
            for block in blocks:
                # preserve_rng_state costs a device sync a block; these families have no dropout to repeat
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        case other:
            raise ValueError(f"activation.checkpointing = {other!r}: must be none or full")
