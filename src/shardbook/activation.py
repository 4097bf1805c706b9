"""Activation checkpointing: what a block keeps from forward to backward.

Invariant: parameter names do not change, and the checkpoint lies INSIDE the sharded block (its forward is replaced,
not the module), so recomputation issues no second all-gather. Apply before compile and before the stage.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def apply_checkpointing(blocks: list[nn.Module], checkpointing: str) -> None:
    """`none`: keep everything. `full`: keep a block's input, recompute the rest in backward (non-reentrant)."""
    match checkpointing:
        case "none":
            return
        case "full":
            for block in blocks:
                block.forward = recomputed(block.forward)
        case other:
            raise ValueError(f"activation.checkpointing = {other!r}: must be none or full")


def recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward`, run again in backward instead of keeping its activations."""

    # a function of its own: torch.compile steps over functools.partial(checkpoint, ...) and compiles nothing, silently
    def recomputing(*positional: Any, **named: Any) -> Tensor:
        # nothing random runs in these blocks (a config with dropout is refused), so no random state to put back
        return checkpoint(forward, *positional, use_reentrant=False, preserve_rng_state=False, **named)

    return recomputing
