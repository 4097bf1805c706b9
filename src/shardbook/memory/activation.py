"""Activation checkpointing: chooses which activations a block keeps from forward to backward.

Invariant: parameter names do not change, gradients do not change by a bit, and the checkpoint lies INSIDE the sharded
block (its forward is replaced, not the module), so recomputation issues no second all-gather. A block with experts
keeps which ones its router chose: a near tie that fell otherwise would send tokens to others. Apply before compile and
before the stage.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardbook.comm.torch_private import TorchDispatchMode, keep_result, recall_result, set_memory_budget
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
    """Keeps in `kept`, by operation and in order, what each top-k of a forward chooses, and the results of operations
    that `policy` saves; `again`, these are returned in place of computing. Of a top-k the chosen scores are gathered
    both times. What is compiled inside, as flex attention, stays compiled.

    torch's own selective contexts will not do here: they cannot keep a router's top-k, whose values routers divide in
    place; and they want the same operations both times, where fully_shard's hooks on experts inside the block gather in
    forward, and may have gathered already when it runs again.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, kept: dict[Any, list[Any]], policy: Policy | None, again: bool):
        super().__init__()
        self.kept, self.policy, self.again, self.numbers = kept, policy, again, Counter[Any]()

    def __enter__(self) -> Any:
        self.numbers.clear()  # backward may run a block again twice
        return super().__enter__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if op is TOP_K:
            scores, _, dim = (*args, -1)[:3]
            ids = self._recall(op, lambda: op(*args, **named)[1])
            return scores.gather(dim, ids), ids
        if self.policy is None or self.policy(None, op, *args, **named) != CheckpointPolicy.MUST_SAVE:
            return op(*args, **named)
        return self._recall(op, lambda: op(*args, **named))

    def _recall(self, op: Any, compute: Callable[[], Any]) -> Any:
        number = self.numbers[op]
        self.numbers[op] += 1
        if self.again:
            kept = self.kept[op][number]
            assert kept is not None, "a block whose results are kept goes backward once"
            if op is not TOP_K:
                self.kept[op][number] = None  # the recomputed graph has it from now on
            return recall_result(kept)
        result = compute()
        self.kept[op].append(keep_result(result))
        return result


def choice_contexts(policy: Policy | None) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of a forward and of its recomputation, in which a router chooses the same experts, and what
    `policy` saves is not computed again."""
    kept = defaultdict[Any, list[Any]](list)
    return Choices(kept, policy, again=False), Choices(kept, policy, again=True)


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
