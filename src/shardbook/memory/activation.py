"""Activation checkpointing: chooses which activations a block keeps from forward to backward.

Invariant: parameter names do not change, gradients do not change by a bit, and the checkpoint lies INSIDE the sharded
block (its forward is replaced, not the module), so recomputation issues no second all-gather. A block with experts
keeps which ones its router chose: a near tie that fell otherwise would send tokens to others. Apply before compile and
before the stage.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardbook.comm.torch_private import TorchDispatchMode, set_memory_budget
from shardbook.model.experts import stacked_parameters
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
TOP_K = torch.ops.aten.topk.default
Policy = Callable[..., CheckpointPolicy]


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
    blocks_here = {number: block for number, block in chosen if block is not None}
    policy = keep_saved_ops if activation.checkpointing == "selective" else None
    for block in blocks_here.values():
        block.forward = recomputed(block.forward, is_random, policy, bool(stacked_parameters(block)))
    return list(blocks_here)


def keep_saved_ops(context: Any, op: Any, *positional: Any, **named: Any) -> CheckpointPolicy:
    """Returns the policy of selective activation checkpointing for one operation: SAVED_OPS without adapters'."""
    is_saved = str(op) in SAVED_OPS
    if is_saved and str(op) == "aten.mm.default":
        left, right = positional[:2]
        is_saved = not is_low_rank(left.shape[1], right.shape[1])
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def is_low_rank(depth: int, width: int) -> bool:
    """Returns whether a product is so wide beside its `depth` (an adapter's second) that it is recomputed, not kept."""
    return 8 * depth <= width


def keep_chosen(policy: Policy | None, context: Any, op: Any, *positional: Any, **named: Any) -> CheckpointPolicy:
    """Returns MUST_SAVE for top-k, else what `policy` says."""
    if op is TOP_K:
        return CheckpointPolicy.MUST_SAVE
    return policy(context, op, *positional, **named) if policy else CheckpointPolicy.PREFER_RECOMPUTE


class Choices(TorchDispatchMode):
    """Notes in `chosen` what each top-k of a forward chooses; `again`, each chooses what was noted. The chosen scores
    are gathered both times: torch's selective contexts want the same operations. What is compiled inside, as flex
    attention, stays compiled."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, chosen: list[Tensor], again: bool):
        super().__init__()
        self.chosen, self.again, self.number = chosen, again, 0

    def __enter__(self) -> Any:
        self.number = 0  # backward may run a block again twice
        return super().__enter__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is not TOP_K:
            return op(*args, **(kwargs or {}))
        scores, _, dim = (*args, -1)[:3]
        if not self.again:
            self.chosen.append(op(*args, **(kwargs or {}))[1])
        ids = self.chosen[self.number]
        self.number += 1
        return scores.gather(dim, ids), ids


def choice_contexts(policy: Policy | None) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of a forward and of its recomputation, in which a router chooses the same experts. torch's
    own selective contexts cannot keep its top-k: routers divide the values in place."""
    chosen = list[Tensor]()
    keep, again = Choices(chosen, again=False), Choices(chosen, again=True)
    if policy is None:
        return keep, again
    forward, backward = create_selective_checkpoint_contexts(policy)
    return _both(forward, keep), _both(backward, again)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def recomputed(
    forward: Callable[..., Tensor], is_random: bool = False, policy: Policy | None = None, has_router: bool = False
) -> Callable[..., Tensor]:
    """Returns a `forward` that backward runs again instead of keeping activations, but for what `policy` saves and, if
    it `has_router`, the experts that were chosen."""
    eager: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": is_random}
    if policy or has_router:
        saved = partial(keep_chosen, policy) if has_router else policy
        eager["context_fn"] = partial(create_selective_checkpoint_contexts, saved)
    compiled = eager.copy()
    if "respect_saved_tensors_hooks" in signature(checkpoint).parameters:  # from torch 2.14 on
        # offloading's hook takes blocks' inputs, not what selective recompute saves inside of them
        eager["respect_saved_tensors_hooks"] = False
    if has_router:
        eager["context_fn"] = partial(choice_contexts, policy)

    # a function, not functools.partial(checkpoint, ...): torch.compile skips a partial and silently compiles nothing
    def recomputing(*positional: Any, **named: Any) -> Tensor:
        # the random state is restored only where blocks have dropout (lora_dropout: a config with dropout is refused)
        if torch.compiler.is_compiling():  # compiled code has no operations in place, and takes torch's own contexts
            return checkpoint(forward, *positional, **compiled, **named)
        return checkpoint(forward, *positional, **eager, **named)

    return recomputing
