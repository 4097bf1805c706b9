"""The ledger: calls and payload bytes of the collectives of a step, by operation and mesh axis.

Invariant: it counts what is asked of torch.distributed's functions, whoever asks (fully_shard, the loop, a custom
collective), and once closed it costs nothing. It stands in for those functions while open: a TorchDispatchMode would
see the same calls (a test does), but under one torch.compile skips a frame and never compiles it again. Not counted:
DTensor's own collectives, which a step has none of, and the sum of the loss, which belongs to logging.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardbook.axes import CP, TP, WORLD

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p")
# function of torch.distributed -> operation, and the argument that is the full tensor
FUNCTIONS = {
    "all_gather_into_tensor": ("all_gather", "output_tensor"),
    "all_gather_single": ("all_gather", "output_tensor"),  # torch >= 2.13, where the former is deprecated
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_single": ("reduce_scatter", "input"),
    "all_reduce": ("all_reduce", "tensor"),
    "all_to_all_single": ("all_to_all", "input"),
    "isend": ("p2p", "tensor"),  # who receives has not sent
}


@dataclass(frozen=True)
class Volume:
    """Payload is the full tensor in the dtype on the wire: the output of an all-gather, the input of a reduce-scatter
    or all-to-all, the tensor of an all-reduce, or what one rank sends another."""

    calls: int = 0
    payload_bytes: int = 0

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(self.calls + other.calls, self.payload_bytes + other.payload_bytes)


Traffic = dict[tuple[str, str], Volume]  # (operation, mesh axis)


def add_traffic(*parts: Traffic) -> Traffic:
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: sum((part[key] for part in parts if key in part), Volume()) for key in keys}


def first_steps(compiles: bool, sizes: dict[str, int]) -> int:
    """Returns how many steps of a run compile or load something for the first time, with axes of these `sizes`: the
    first, and the second where the ledger kept the compiler off in the first."""
    return 1 + (compiles and holds_compiler(sizes))


def holds_compiler(sizes: dict[str, int]) -> bool:
    """Returns whether blocks hold collectives: a trace through the ledger's functions would break in each, for good."""
    return any(sizes.get(axis, 1) > 1 for axis in (CP, TP))


class Ledger:
    """Counts from `open` to `close`; as a context it is closed at the latest when that ends."""

    def __init__(self, groups: dict[str, list[int]]):
        """`groups`: for each axis the global ranks that this rank talks to along it; the first that fits names a
        collective."""
        self.groups = groups | {WORLD: list(range(dist.get_world_size()))}
        self.traffic: Traffic = {}
        self._replaced: dict[str, Any] = {}
        self._eager = holds_compiler({axis: len(ranks) for axis, ranks in groups.items()})

    def open(self) -> None:
        assert not self._replaced, "the ledger is open already"
        if self._eager:
            torch.compiler.set_stance("force_eager")
        for name, (op, argument) in FUNCTIONS.items():
            if hasattr(dist, name):
                self._replaced[name] = getattr(dist, name)
                setattr(dist, name, self._counting(self._replaced[name], op, argument))

    def close(self) -> bool:
        """Put torch.distributed back. Returns whether it was open."""
        was_open = bool(self._replaced)
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
        if op == "p2p":  # to one of two neighbours, who may be the same rank: the group says what it is for
            axis = group.group_desc
        else:
            self.groups[axis] = ranks
        volume = self.traffic.get((op, axis), Volume())
        self.traffic[op, axis] = volume + Volume(1, tensor.numel() * tensor.element_size())

    def take_metrics(
        self, ranks_per_node: int, predicted: Traffic, others: dict[str, float] | None = None
    ) -> dict[str, float]:
        """The metrics of what was counted, for `ranks_per_node` ranks a node, under `predicted/` what had been said of
        them, and `others` that are told once; the second time nothing."""
        if not (traffic := self.traffic):
            return {}
        self.traffic = {}
        metrics = dict(others or {})
        for source, of in (("", traffic), ("predicted/", predicted)):
            between = sent_between_nodes(of, self.groups, dist.get_rank(), ranks_per_node)
            found = traffic_metrics(of, between) | axis_metrics(of)
            # every rank taken for a node of its own
            found["comm/sent_bytes"] = sent_between_nodes(of, self.groups, dist.get_rank(), 1)
            metrics |= {source + name: value for name, value in found.items()}
        return metrics

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()


def sent_between_nodes(traffic: Traffic, groups: dict[str, list[int]], rank: int, ranks_per_node: int) -> int:
    """Bytes of `traffic` that `rank` sends to other nodes. `groups`: for each axis the global ranks that talk along it.

    By the ring, in rank order: an all-gather or reduce-scatter of M bytes over n ranks passes M (n - 1) / n to the next
    rank, an all-reduce twice that (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 2009, section 3).
    An all-to-all sends each rank its part; what is sent to a rank goes there.
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
    """`comm/<op>_calls` and `comm/<op>_bytes` of every operation, over all axes; and `comm/inter_node_bytes`."""
    metrics: dict[str, int] = {}
    for op in OPS:
        volume = sum((volume for (name, _), volume in traffic.items() if name == op), Volume())
        if op == "p2p" and not volume.calls:  # of pipelines alone
            continue
        metrics |= {f"comm/{op}_calls": volume.calls, f"comm/{op}_bytes": volume.payload_bytes}
    return metrics | {"comm/inter_node_bytes": inter_node_bytes}


def axis_metrics(traffic: Traffic) -> dict[str, int]:
    """`comm/<axis>/<op>_bytes` of every operation along every mesh axis that it ran on."""
    return {f"comm/{axis}/{op}_bytes": volume.payload_bytes for (op, axis), volume in sorted(traffic.items())}
