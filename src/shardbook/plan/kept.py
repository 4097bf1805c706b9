"""The bytes that a block, and the loss, keep from forward to backward, as autograd saves them in transformers' blocks.

Invariant: bytes of one token, exact for every family under a kernel that takes no dense mask; a test counts the same.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from shardbook.memory.activation import is_low_rank
from shardbook.model.attention import head_size, heads_of
from shardbook.model.context import partition_heads
from shardbook.model.loss_head import PRODUCT_ROWS
from shardbook.model.tensor import heads_of_rank
from shardbook.parallel.tensor import TensorAxis
from shardbook.recipe import Lora

FP32 = 4


@dataclass(frozen=True)
class Family:
    """The facts of a transformers architecture that its config does not have: how queries and keys are normalised, and
    which matrices are fused."""

    head_norms: bool = False  # queries and keys are normalised, each head by itself
    wide_norms: bool = False  # queries and keys are normalised over all heads; a block's norms come after, not before
    fused: bool = False  # one matrix makes queries, keys and values, another gate and up


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(head_norms=True),
    "olmo2": Family(wide_norms=True),
    "smollm3": Family(),
    "granite": Family(),
    "phi3": Family(fused=True),
}


@dataclass(frozen=True)
class Widths:
    """The widths of a block's tensors: numbers for each token."""

    hidden: int
    queries: int  # all heads together
    keys: int  # keys of all heads; values are as many
    inner: int
    heads: int
    key_heads: int
    family: Family
    tp_size: int  # ranks that share its tokens around norms
    attended: tuple[int, int]  # heads of queries and of keys that attention itself sees, times their rows' length


def read_widths(config: PreTrainedConfig, tp_size: int = 1, context: int = 1) -> Widths:
    """Returns the widths on the rank with most heads; `tp_size` ranks share a block, `context` ranks its rows."""
    (heads, key_heads), size = heads_of(config), head_size(config)
    family, inner = FAMILIES.get(config.model_type, Family()), _inner_size(config) // tp_size
    if tp_size > 1:
        shares = [heads_of_rank(heads, key_heads, TensorAxis(tp_size, place)) for place in range(tp_size)]
        heads, key_heads = (max(map(len, each)) for each in zip(*shares, strict=True))
    attended = heads, key_heads
    if context > 1:  # all tokens of its rows, so many times its own
        dealt = partition_heads(heads, key_heads, context)
        attended = context * max(own for own, _ in dealt), context * max(len(keys) for _, keys in dealt)
    return Widths(
        config.hidden_size, heads * size, key_heads * size, inner, heads, key_heads, family, tp_size, attended
    )


def _inner_size(config: PreTrainedConfig) -> int:
    found = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    return max(found) if isinstance(found, list) else int(found)


@dataclass(frozen=True)
class Adapted:
    """The matrices of a block that LoRA adapts, by name with the width of the output, at rank `r`. r = 0: the whole
    block is trained."""

    r: int = 0
    widths: tuple[tuple[str, int], ...] = ()
    decomposed: bool = False  # DoRA

    def trains(self, *names: str) -> bool:
        """Returns whether the input of one of these matrices is kept for a gradient."""
        return not self.r or any(name in names for name, _ in self.widths)


def read_adapted(lora: Lora, of: Widths) -> Adapted:
    widths = {"q_proj": of.queries, "k_proj": of.keys, "v_proj": of.keys}
    widths |= {"gate_proj": of.inner, "up_proj": of.inner}
    if of.family.fused:
        widths = {"qkv_proj": of.queries + 2 * of.keys, "gate_up_proj": 2 * of.inner}
    widths |= {"o_proj": of.hidden, "down_proj": of.hidden}
    asked = widths if lora.target_modules == "all-linear" else lora.target_modules
    return Adapted(
        lora.r, tuple((name, widths[name]) for name in asked if name in widths) if lora.r else (), lora.use_dora
    )


def kept_by_a_block(kind: str, of: Widths, itemsize: int, adapted: Adapted = Adapted()) -> float:
    """Returns the bytes that a block holds from forward to backward for one token, not compiled, under a kernel that
    takes document boundaries or plain causal rows. `kind`: none, full or selective; `itemsize`: of the compute dtype.

    none: a norm keeps its input in fp32, its scale, and its result twice (before and after its weight); attention its
    queries, keys, values, result, and one fp32 a head (torch 2.11 has keys and values repeated, and holds as many as
    queries); the MLP four tensors of its inner width. full: the block's input. selective: that and the results of
    SAVED_OPS. The inputs of frozen matrices are not kept; an adapter keeps r numbers.

    Along tp, block inputs and norms have a share of the tokens, and inputs and outputs of matrix products all of them.
    Along cp, attention has other heads, and the exchange returns its result as another tensor.
    """
    size, (heads, key_heads) = of.queries // of.heads, of.attended
    attention = (2 * heads + 2 * key_heads) * size * itemsize + heads * FP32
    low = adapted.r * len(adapted.widths) * itemsize
    if kind == "full":
        return of.hidden * itemsize / of.tp_size
    if kind == "selective":
        again = sum(width for _, width in adapted.widths if not is_low_rank(adapted.r, width))
        made = sum(not is_low_rank(width, of.hidden) for width in (of.queries, of.inner)) + 1 / of.tp_size
        attention -= (heads - of.heads + 2 * (key_heads - of.key_heads)) * size * itemsize  # what was made of all heads
        return made * of.hidden * itemsize + attention + 2 * of.inner * itemsize + low + again * itemsize

    def norm(width: int, count: int, is_read: bool, shares: int = 1) -> float:
        return (width * (FP32 + itemsize * (not adapted.r)) + count * FP32) / shares + width * itemsize * is_read

    # a head's norm keeps its result once: what its weight made goes through the rotation, which keeps nothing
    by_head = norm(of.queries, of.heads, False) + norm(of.keys, of.key_heads, False)
    reads = adapted.trains("q_proj", "k_proj", "v_proj", "qkv_proj")
    reads_too = adapted.trains("gate_proj", "up_proj", "gate_up_proj")
    norms = (
        norm(of.hidden, 1, reads, of.tp_size)
        + norm(of.hidden, 1, reads_too, of.tp_size)
        + by_head * of.family.head_norms
    )
    if of.family.wide_norms:  # of four results, all in fp32; products take what was not normalised
        norms = (of.queries + of.keys + 2 * of.hidden) * FP32 * (1 + (not adapted.r)) + 4 * FP32
        norms += of.hidden * itemsize * (reads + reads_too)
    if of.family.fused:  # values are a part of a matrix' result, which stays whole
        attention += (of.queries + of.keys) * itemsize
    mlp = (3 + adapted.trains("down_proj")) * of.inner * itemsize
    decomposed = 2 * adapted.decomposed * sum(width for _, width in adapted.widths) * itemsize
    return norms + attention + mlp + low + decomposed


def loss_bytes(
    tokens: int,
    chunk: int,
    vocabulary: int,
    hidden: int,
    itemsize: int,
    is_trained: bool = True,
    taught: tuple[int, int] = (0, 0),
    is_part: bool = False,
) -> tuple[int, int]:
    """Returns the bytes that the loss needs for a chunk, and those for its gradients, all `tokens` trained, and the
    head too where it `is_trained`.

    A chunk takes the larger of two moments: its logits, their softmax in fp32, which becomes their gradient, and that
    in the compute dtype (all one tensor, where that is fp32); or the last of these and the product that is added to the
    head's gradient, which is in fp32. Hidden states of trained positions count with their gradient. `taught`: the
    vocabulary and width of a teacher, whose logits are beside, with three more tensors of their size in fp32 (one is
    the logits, where all is fp32). `is_part`: the vocabulary is one tp rank's; its softmax does not overwrite logits.
    """
    is_cast = itemsize != FP32
    theirs, width = min(taught[0], vocabulary), taught[1]
    logits = chunk * vocabulary * (FP32 + (1 if theirs else 2) * itemsize * is_cast)
    logits += chunk * vocabulary * FP32 * (is_part and not is_cast)
    logits += chunk * theirs * (3 * FP32 + itemsize * is_cast)
    product = chunk * vocabulary * itemsize + min(vocabulary, PRODUCT_ROWS) * hidden * itemsize * is_cast
    hidden_states = tokens * (2 * hidden + width) * itemsize
    return max(logits, product * is_trained), vocabulary * hidden * FP32 * is_trained + hidden_states
