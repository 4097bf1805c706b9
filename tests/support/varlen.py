"""A stand-in for torch.nn.attention.varlen.varlen_attn on a CPU: its very signature, each document by itself."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def plain_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux=None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """query [T, heads, D], key and value [T, fewer heads, D], cu_seqlens int32 [N + 1] from 0 to T."""
    assert cu_seq_q.dtype == torch.int32 and cu_seq_q is cu_seq_k and cu_seq_q.is_contiguous()
    assert query.is_contiguous() or query.stride(-1) == 1
    assert window_size[1] == 0 and (return_aux, seqused_k, block_table, num_splits) == (None, None, None, None)
    ends = cu_seq_q.tolist()
    assert ends[0] == 0 and ends == sorted(ends) and ends[-1] == len(query), ends
    found = torch.full_like(query, torch.nan)  # what no document covers stays unwritten, as in the kernel
    for start, end in pairwise(ends):
        assert end - start <= min(max_q, max_k)
        if end > start:
            q, k, v = (t[start:end].transpose(0, 1)[None] for t in (query, key, value))
            how, before = {"scale": scale, "enable_gqa": enable_gqa}, window_size[0]  # earlier tokens, -1: all
            if 0 <= before < end - start - 1:
                seen = torch.ones(end - start, end - start, dtype=torch.bool).tril().triu(-before)
                out = scaled_dot_product_attention(q, k, v, seen, **how)
            else:
                out = scaled_dot_product_attention(q, k, v, is_causal=True, **how)
            found = found.index_copy(0, torch.arange(start, end), out[0].transpose(0, 1))
    return found
