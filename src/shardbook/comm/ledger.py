"""The ledger: calls and payload bytes of the collectives of a step, by operation and mesh axis.

Invariant: it counts every call of torch.distributed's functions, whoever makes it (fully_shard, the loop, a custom
collective), and once closed it costs nothing. While open it replaces these functions: a TorchDispatchMode would
see the same calls (a test does), but under one torch.compile skips a frame and never compiles it again. Not counted:
DTensor's own collectives, of which a step has none, and the sum of the loss, which belongs to logging.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.axes import IN_BLOCKS, WORLD

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p")
# function of torch.distributed -> operation, and the argument that is the full tensor
FUNCTIONS = {
    "all_gather_into_tensor": ("all_gather", "output_tensor"),
    "all_gather_single": ("all_gather", "output_tensor"),  # torch >= 2.13, where the former is deprecated
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_single": ("reduce_scatter", "input"),
    "all_reduce": ("all_reduce", "tensor"),
    "all_to_all_single": ("all_to_all", "input"),
    "isend": ("p2p", "tensor"),  # not irecv: the receiver's bytes are counted by the sender
}


@dataclass(frozen=True)
class Volume:
    """Calls and payload. Payload is the full tensor in the dtype that is sent: the output of an all-gather, the input
    of a reduce-scatter or all-to-all, the tensor of an all-reduce, or the tensor that one rank sends another."""

    calls: int = 0
    payload_bytes: int = 0

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(self.calls + other.calls, self.payload_bytes + other.payload_bytes)


Traffic = dict[tuple[str, str], Volume]  # (operation, mesh axis)


def warmup_steps(compiles: bool, sizes: dict[str, int]) -> int:
    """Returns how many first steps of a run compile or load something, with axes of these `sizes`. It is one, or two
    where the ledger keeps the compiler off during the first."""
    return 1 + (compiles and holds_compiler(sizes))


def holds_compiler(sizes: dict[str, int]) -> bool:
    """Returns whether blocks hold collectives: the ledger's functions would break the graph of each, for good."""
    return any(sizes.get(axis, 1) > 1 for axis in IN_BLOCKS)


class Ledger:
    """A counter of collectives from `open` to `close`. As a context manager it is closed when that ends."""

    def __init__(self, groups: dict[str, list[int]]):
        """Takes `groups`: for each axis the global ranks that this rank talks to along it. A collective is counted
        under the first axis that has exactly its ranks."""
        self.groups = groups | {WORLD: list(range(dist.get_world_size()))}
        self.traffic: Traffic = {}
        self._replaced: dict[str, Any] = {}
        self._eager = holds_compiler({axis: len(ranks) for axis, ranks in groups.items()})

    @property
    def is_open(self) -> bool:
        return bool(self._replaced)

    def open(self) -> None:
        assert not self.is_open, "the ledger is open already"
        if self._eager:
            torch.compiler.set_stance("force_eager")
        for name, (op, argument) in FUNCTIONS.items():
            if hasattr(dist, name):
                self._replaced[name] = getattr(dist, name)
                setattr(dist, name, self._counting(self._replaced[name], op, argument))

    def close(self) -> bool:
        """Restores torch.distributed's functions. Returns whether the ledger was open."""
        was_open = self.is_open
        if was_open and self._eager:
            torch.compiler.set_stance("default")
        while self._replaced:
            setattr(dist, *self._replaced.popitem())
        return was_open

    def _counting(self, function: Callable[..., Any], op: str, argument: str) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @wraps(function)
        def counting(*positional: Any, **named: Any) -> Any:
            given = signature.bind(*positional, **named).arguments
            self._count(op, given[argument], given.get("group") or dist.group.WORLD)
            return function(*positional, **named)

        return counting

    def _count(self, op: str, tensor: Tensor, group: Any) -> None:
        ranks = dist.get_process_group_ranks(group)
        axis = next((axis for axis, known in self.groups.items() if known == ranks), f"ranks {ranks}")
        if op == "p2p":  # by the group's name: with two ranks both neighbours are the same rank
            axis = group.group_desc
        else:
            self.groups[axis] = ranks
        volume = self.traffic.get((op, axis), Volume())
        self.traffic[op, axis] = volume + Volume(1, tensor.numel() * tensor.element_size())

    def take_metrics(
        self, ranks_per_node: int, predicted: Traffic, others: dict[str, float] | None = None
    ) -> dict[str, float]:
        """Returns the metrics of the counted traffic, for `ranks_per_node` ranks a node; under `predicted/` those of
        the `predicted` traffic; and `others`, which are logged once. The second call returns nothing."""
        if not (traffic := self.traffic):
            return {}
        self.traffic = {}
        metrics = dict(others or {})
        for source, of in (("", traffic), ("predicted/", predicted)):
            between = sent_between_nodes(of, self.groups, dist.get_rank(), ranks_per_node)
            counted = traffic_metrics(of, between)
            # all bytes that this rank sends: every rank counts as a node of its own
            counted["comm/sent_bytes"] = sent_between_nodes(of, self.groups, dist.get_rank(), 1)
            metrics |= {source + name: value for name, value in counted.items()}
        return metrics

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()


def sent_between_nodes(traffic: Traffic, groups: dict[str, list[int]], rank: int, ranks_per_node: int) -> int:
    """Returns the bytes of `traffic` that `rank` sends to other nodes. `groups`: for each axis the global ranks that
    talk along it.

    Rings in rank order: an all-gather or reduce-scatter of M bytes over n ranks passes M (n - 1) / n to the next rank,
    an all-reduce twice that (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009, section 3). An
    all-to-all sends each rank its part; a point-to-point message goes to its rank.
    """
    total, node = 0, rank // ranks_per_node
    for (op, axis), volume in traffic.items():
        ranks, sent = groups[axis], volume.payload_bytes
        following = ranks[(ranks.index(rank) + 1) % len(ranks)]
        if op == "all_to_all":
            total += sent * sum(other // ranks_per_node != node for other in ranks) // len(ranks)
        elif op == "p2p":
            total += sent * (following // ranks_per_node != node)
        elif following // ranks_per_node != node:
            total += sent * (len(ranks) - 1) * (2 if op == "all_reduce" else 1) // len(ranks)
    return total


def traffic_metrics(traffic: Traffic, inter_node_bytes: int) -> dict[str, int]:
    """Returns `comm/<op>_calls` and `comm/<op>_bytes` of each operation, over all axes; `comm/inter_node_bytes`; and
    `comm/<axis>/<op>_bytes` of every operation along every mesh axis that it ran on."""
    metrics: dict[str, int] = {}
    for op in OPS:
        volume = sum((volume for (name, _), volume in traffic.items() if name == op), Volume())
        if op == "p2p" and not volume.calls:  # only pipelines have them
            continue
        metrics |= {f"comm/{op}_calls": volume.calls, f"comm/{op}_bytes": volume.payload_bytes}
    metrics["comm/inter_node_bytes"] = inter_node_bytes
    return metrics | {f"comm/{axis}/{op}_bytes": volume.payload_bytes for (op, axis), volume in sorted(traffic.items())}
