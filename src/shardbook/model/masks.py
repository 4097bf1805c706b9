"""Masks: make the attention mask of a micro-batch for each kernel, from its documents and a family's own rule.

Invariant: they have the same shape in every micro-batch of packed rows, so that torch.compile makes one graph, and one
more for each other number of tokens in the longest document. None is made with a host sync.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from shardbook.model.batch import Batch
from shardbook.recipe import RecipeError

BLOCK = 128  # rows, and columns, of scores that `flex` computes or skips together
# transformers' mask functions: (row, head, place of the query, place of the key) -> whether it attends
Rule = Callable[..., Any]
CAUSAL: Rule = causal_mask_function


# the batch whose documents a mask is of: transformers' forward hands a mask function nothing of its caller's
_BATCH: ContextVar[Batch | None] = ContextVar("batch", default=None)


@contextmanager
def documents_of(batch: Batch) -> Iterator[None]:
    """Has `make_mask`, inside, make masks of the documents of `batch`."""
    token = _BATCH.set(batch)
    try:
        yield
    finally:
        _BATCH.reset(token)


def make_mask(kernel: str, *, mask_function: Rule = CAUSAL, allow_is_causal_skip: bool = True, **named: Any) -> Any:
    """Returns what transformers' forward asks for, once for each pattern of its layers: `attention_mask` of the batch
    that runs now, under the family's own rule `mask_function`; while text is generated, transformers' own mask."""
    batch = _BATCH.get()
    if batch is None:
        make = ALL_MASK_ATTENTION_FUNCTIONS["eager" if kernel == "eager" else "sdpa"]
        return make(mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **named)
    facts = batch.cu_seqlens, batch.full_shape, batch.packed, named["dtype"], batch.max_seqlen
    return attention_mask(kernel, *facts, mask_function, named.get("local_size"), allow_is_causal_skip)


def attention_mask(
    kernel: str,
    cu_seqlens: Tensor,
    shape: torch.Size,
    packed: bool,
    dtype: torch.dtype,
    max_seqlen: int,
    rule: Rule = CAUSAL,
    local: int | None = None,
    may_skip: bool = True,
) -> Any:
    """Returns the mask, or its like, that `kernel` takes for a micro-batch of `shape` [B, L], whose documents lie
    between `cu_seqlens` [n], int32 offsets into the flat [B * L], and have at most `max_seqlen` tokens (see
    MicroBatch); padding counts as a document. `rule`: which tokens of its document a token attends to, by their
    places in it; `local`: the window, or chunk, that it has.

    varlen: `cu_seqlens` and `max_seqlen`, of chunks where there are any; and a window, where it has one. flex: a
    BlockMask. sdpa: bool [B, 1, L, L], or None where rows are not `packed`: plain causal rows have a kernel of their
    own. eager: [B, 1, L, L] of `dtype`, to be added to scores.
    """
    if local and local >= max_seqlen:  # it hides nothing
        rule, local = CAUSAL, None
    if kernel in ("varlen", "flex"):
        window, chunk = read_rule(rule)
        if chunk:
            cu_seqlens, max_seqlen = chunk_boundaries(cu_seqlens, shape, chunk), min(max_seqlen, chunk)
        if kernel == "varlen":
            return (cu_seqlens, max_seqlen, window) if window else (cu_seqlens, max_seqlen)
        return block_mask(number_documents(cu_seqlens, shape), window)
    if kernel == "sdpa" and not packed and rule is CAUSAL and may_skip:
        return None
    numbers = number_documents(cu_seqlens, shape)
    if rule is CAUSAL:
        allowed = torch.ones(shape[1], shape[1], dtype=torch.bool, device=numbers.device).tril()
    else:
        allowed = rule_on_positions(rule, cu_seqlens, numbers)
    allowed = (allowed & (numbers[:, :, None] == numbers[:, None, :]))[:, None]
    if kernel == "sdpa":
        return allowed
    # eager attention ADDS the mask to its scores: a boolean one would add 1 where it should forbid
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def rule_on_positions(rule: Rule, cu_seqlens: Tensor, numbers: Tensor) -> Tensor:
    """Returns which tokens `rule` lets a token attend to, [B, L, L]. The rule gets positions in documents, not in rows:
    a chunk begins with its document."""
    positions = positions_in_documents(cu_seqlens, numbers)
    rows = torch.arange(len(numbers), device=numbers.device)[:, None, None]
    return rule(rows, 0, positions[:, :, None], positions[:, None, :])


def positions_in_documents(cu_seqlens: Tensor, numbers: Tensor) -> Tensor:
    """Returns the position of each token in its document, int32 [B, L]; `numbers`: number_documents."""
    positions = torch.arange(numbers.numel(), dtype=cu_seqlens.dtype, device=numbers.device).view(numbers.shape)
    return positions - cu_seqlens[numbers]


def number_documents(cu_seqlens: Tensor, shape: torch.Size) -> Tensor:
    """Returns the number of each token's document, ascending along a row: int64 [B, L]. No host sync."""
    positions = torch.arange(shape.numel(), dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.bucketize(positions, cu_seqlens[1:], right=True).view(shape)


def read_rule(rule: Rule) -> tuple[int, int]:
    """Returns the window and the chunk of a rule that transformers made, 0 for none. Raises RecipeError for a rule that
    has more in it: it takes a dense mask."""
    window = chunk = 0
    for each in inspect.getclosurevars(rule).nonlocals.get("mask_functions", (rule,)):
        inside = inspect.getclosurevars(each).nonlocals
        if each.__qualname__.startswith("sliding_window_overlay."):
            window = inside["sliding_window"]
        elif each.__qualname__.startswith("chunked_overlay."):
            chunk = inside["chunk_size"]
        elif each is not CAUSAL:
            raise RecipeError(
                f"model.attention: a mask of {each.__qualname__} is a dense one; set model.attention=sdpa"
            )
    return window, chunk


def chunk_boundaries(cu_seqlens: Tensor, shape: torch.Size, chunk: int) -> Tensor:
    """Returns the boundaries of chunks of `chunk` tokens; a document's first chunk begins with it. The result has the
    greatest possible length, filled up with B * L. No host sync."""
    tokens = shape.numel()
    positions = positions_in_documents(cu_seqlens, number_documents(cu_seqlens, shape)).flatten()
    starts = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    starts = starts.where(positions % chunk == 0, tokens).sort().values
    most = min(tokens, len(cu_seqlens) + tokens // chunk)
    return torch.cat([starts[:most], starts.new_full((1,), tokens)])


def block_mask(numbers: Tensor, window: int = 0) -> Any:
    """Returns the BlockMask of documents `numbers` [B, L], L a multiple of BLOCK: the blocks of BLOCK x BLOCK scores
    that hold a pair of tokens of one document, and of one `window`. It is made from the first and last document of each
    block, in tensors of [B, L / BLOCK, L / BLOCK]; torch's create_block_mask would make [B, L, L] first."""
    from torch.nn.attention.flex_attention import BlockMask

    blocks = numbers.unflatten(1, (-1, BLOCK))
    first, last = blocks[..., 0], blocks[..., -1]
    meets = (last[:, None, :] >= first[:, :, None]).tril()  # [B, query block, key block]
    # blocks without a masked score: one document from the start of the key block to the end of the query block
    unmasked = (last[:, :, None] == first[:, None, :]).tril(-1)

    if window:
        order = torch.arange(blocks.shape[1], device=numbers.device)
        apart = (order[:, None] - order[None, :]) * BLOCK  # tokens between the first ones of a query and a key block
        meets &= apart - BLOCK + 1 < window
        unmasked &= apart + BLOCK - 1 < window

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Returns how many key blocks each query block takes, [B, 1, n], and a list of these first, [B, 1, n, n]."""
        order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]

    def within(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (numbers[row, query] == numbers[row, key])
        return seen & (query - key < window) if window else seen

    return BlockMask.from_kv_blocks(*listed(meets & ~unmasked), *listed(unmasked), BLOCK_SIZE=BLOCK, mask_mod=within)
