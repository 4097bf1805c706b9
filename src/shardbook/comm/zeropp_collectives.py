"""ZeRO++'s collectives on fully_shard: quantised all-gather (qwZ), quantised reduce-scatter in two hops (qgZ).

arXiv 2306.10209, sections 3.1 and 3.3. Invariants: every rank computes with the same weights, because a rank quantises
its own shard too; the reduce-scatter is a sum, as everywhere here, added up in fp32. Payload and scales of a
collective are sent in one buffer.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.axes import ACROSS, DP_SHARD, INSIDE
from shardbook.comm.collectives import all_gather
from shardbook.comm.quantize import dequantize, quantize
from shardbook.comm.torch_private import AllGather, ReduceScatter, secondary_meshes_through


@dataclass(frozen=True)
class ZeroppSwitches:
    """The switches of ZeRO++ in numbers. `inside` ranks along dp_shard share a node; all of them: there is one node.

    A unit w on two nodes of two ranks, with hpZ (`secondary` 2):

                  at rest    forward     between     backward
        rank 0    w0         w0 to w3    w0 and w1   w0 to w3
        rank 1    w1         w0 to w3    w2 and w3   w0 to w3    from each other: nothing passes between nodes
        rank 2    w2         w0 to w3    w0 and w1   w0 to w3
        rank 3    w3         w0 to w3    w2 and w3   w0 to w3    from each other
    """

    weights_bits: int = 0  # qwZ: bits of the forward all-gather; 0: off
    gradients_bits: tuple[int, int] | None = None  # qgZ: bits inside a node, bits across nodes
    secondary: int = 0  # hpZ: ranks that together keep a copy between forward and backward; 0: off
    inside: int = 1

    def hops(self, shards: int) -> list[tuple[str, int, int]]:
        """Returns qgZ's exchanges over `shards` ranks, in order: mesh axis, ranks along it, bits. There is one exchange
        where there is one node, or one rank in each node."""
        if not self.gradients_bits or shards == 1:
            return []
        inside_bits, across_bits = self.gradients_bits
        if self.inside in (1, shards):
            return [(DP_SHARD, shards, across_bits if self.inside == 1 else inside_bits)]
        return [(INSIDE, self.inside, inside_bits), (ACROSS, shards // self.inside, across_bits)]


class _Allocates:
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class QuantizedAllGather(_Allocates, AllGather):
    """All-gather of block-quantised shards over a group of `ranks`. Over a group of another size (hpZ's, inside a node)
    it is a plain all-gather of the weights that were dequantised once: so forward and backward see the same weights."""

    def __init__(self, ranks: int, bits: int):
        self.ranks, self.bits = ranks, bits

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gathers `input_tensor` [n], a view into `output_tensor` [ranks * n]; both bf16 or fp32."""
        assert not async_op, "fully_shard gathers asynchronously only when asked to"
        assert input_tensor.is_floating_point(), f"{input_tensor.dtype}: bytes are not numbers that can be rounded"
        if group.size() != self.ranks:
            all_gather(output_tensor, input_tensor, group)
            return
        sent = quantize(input_tensor[None], self.bits)
        received = sent.new_empty(self.ranks, sent.shape[1])
        all_gather(received, sent, group)
        dequantize(received[None], output_tensor.view(self.ranks, -1), self.bits)


class QuantizedReduceScatter(_Allocates, ReduceScatter):
    """Reduce-scatter as all-to-alls of block-quantised slices: inside the node, then across nodes.

    Each hop quantises, exchanges, dequantises and adds in fp32, so an element is rounded twice and no more, however
    many ranks there are. `hops`: the group of each exchange and its bits.

    Two nodes of two ranks; slice s0 of each rank's input is for rank 0:

                          has         sends inside the node    has the node's sums of    sends across    has all sums of
        node 0, rank 0    s0 to s3    s1 s3 to rank 1          s0 s2                     s2 to rank 2    s0
        node 0, rank 1    s0 to s3    s0 s2 to rank 0          s1 s3                     s3 to rank 3    s1
        node 1, rank 2    s0 to s3    s1 s3 to rank 3          s0 s2                     s0 to rank 0    s2
        node 1, rank 3    s0 to s3    s0 s2 to rank 2          s1 s3                     s1 to rank 1    s3
    """

    def __init__(self, hops: list[tuple[dist.ProcessGroup, int]]):
        self.hops = hops

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Writes into `output_tensor` [n] the sum over ranks of this rank's slice. `input_tensor` [ranks * n] holds
        slice r for rank r of `group`."""
        assert op == dist.ReduceOp.SUM, f"a quantised reduce-scatter sums; asked for {op}"
        # Rank r is at (node, place in the node). The first hop sends to each place in this node the slices of the
        # ranks that have this place in any node.
        slices = input_tensor.view(-1, self.hops[0][0].size(), len(output_tensor)).transpose(0, 1)
        for number, (exchange, bits) in enumerate(self.hops, start=1):
            is_last = number == len(self.hops)
            sent = quantize(slices, bits)
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=exchange)
            summed = output_tensor[None] if is_last else slices.new_empty(slices.shape[1:], dtype=torch.float32)
            dequantize(received, summed, bits)
            slices = summed[:, None]


def share_secondary_mesh() -> contextlib.AbstractContextManager[None]:
    """While open, units that fully_shard reshards to the same number of ranks share one mesh.

    Else each unit makes two process groups of its own, which are two NCCL communicators with buffers of their own: 164
    for a model of 82 units, in memory outside of torch's allocator (pytorch #147179).
    """
    buffers: dict[Any, Any] = {}

    def get(real: Callable[..., Any], reshard_after_forward: bool | int, mesh_info: Any) -> Any:
        key = reshard_after_forward, type(reshard_after_forward), mesh_info.mesh
        if key not in buffers:
            buffers[key] = real(reshard_after_forward, mesh_info)
        return buffers[key]

    return secondary_meshes_through(get)
