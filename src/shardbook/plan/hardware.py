"""Hardware that a plan is made for: nodes of GPUs (gpus.py has their data sheets), the links inside and between them.

Invariant: the share of a data sheet's figure that a step attains is assumed until a run calibrates it.
"""

from dataclasses import dataclass, replace

from shardbook.gpus import Gpu, find_gpu
from shardbook.recipe import RecipeError

GBIT = 1e9 / 8
PRODUCTS, ATTENTION, MEMORY = 640 / 989, 250 / 989, 3.0 / 3.35  # shares attained in a step, as seen on an H100
INSIDE, ACROSS = 0.8, 0.9  # shares of a link's rate that long collectives attain, in and between nodes
INSIDE_SECONDS, ACROSS_SECONDS = 3e-6, 10e-6  # latency of a ring's hop
ROOM = 0.92  # share of a GPU's memory that torch can fill: CUDA's and NCCL's contexts and fragments take the rest
# Shares: torch's fused AdamW of the rate of a copy in memory, long copies of PCIe's, writing to drives of reading (11
# of 27 GB/s, as DeepNVMe measured them).
ADAMW_SHARE, PCIE_SHARE, WRITE_SHARE = 0.65, 0.8, 11 / 27
HOST_ROOM = 0.95  # share of a node's memory that its ranks can use


@dataclass(frozen=True)
class Cluster:
    """`gpus` GPUs of one kind in nodes of `a_node`; the innermost axis of a mesh fills a node first."""

    gpu: Gpu
    gpus: int
    a_node: int
    nics: float  # Gbit/s of a node
    host_gb: float = 0  # of a node's memory; 0: as usual
    slowness: float = 1.0  # factor on the seconds of computing that the shares above give
    across: float = ACROSS  # share of the cards' rate that collectives attain between nodes

    @property
    def host_bytes(self) -> float:
        """The bytes of a node's memory that its ranks can use."""
        return HOST_ROOM * self.node_gb * 1e9

    @property
    def node_gb(self) -> float:
        """The GB of a node's memory."""
        return self.host_gb or self.gpu.host_gb * self.a_node

    def step_seconds(self, elements: float, read: float, written: float) -> float:
        """Returns the seconds of one rank's AdamW on the host, while all ranks of its node do theirs: 28 bytes an
        element of masters, moments and gradients, and the bytes `read` from and `written` to disk."""
        disk = self.gpu.disk
        return self.a_node * max(
            28 * elements / (ADAMW_SHARE * self.gpu.dram), read / disk, written / (WRITE_SHARE * disk)
        )

    @property
    def nodes(self) -> int:
        return self.gpus // self.a_node

    @property
    def room_bytes(self) -> float:
        return ROOM * self.gpu.gb * 1e9

    def words(self) -> str:
        return f"{self.nodes} node{'s' * (self.nodes > 1)} of {self.a_node}, {self.nics:g} Gbit/s a node"

    def node_words(self) -> str:
        """Returns what a node is taken to have, for people, and the options that say otherwise."""
        gpu, without = self.gpu, "" if self.gpu.has_p2p else ", through the node's memory: no P2P"
        return (
            f"a node has {self.node_gb:,.0f} GB of memory (--host-gb), drives that read {gpu.disk / 1e9:g} GB/s "
            f"(--disk-gbps), and {gpu.link / 1e9:g} GB/s from a GPU to the others (--link-gbps{without})"
        )

    def resized(self, gpus: int) -> "Cluster":
        """Returns a cluster of `gpus` such GPUs, in nodes of the same size; a single node may grow to the usual."""
        a_full_node = self.a_node if self.nodes > 1 else max(self.a_node, self.gpu.a_node)
        return replace(self, gpus=gpus, a_node=min(a_full_node, gpus))

    def ring_seconds(self, payload_bytes: float, ranks: list[int]) -> float:
        """Returns the seconds of an all-gather or a reduce-scatter, the full tensor `payload_bytes`, in a ring over
        `ranks`; an all-reduce takes two of them.

        A rank sends payload x (n - 1) / n, over its link inside the node, and over the node's cards, which all groups
        share that cross between the same nodes. A hop adds its latency (the alpha of alpha-beta).
        """
        count, nodes = len(ranks), len({rank // self.a_node for rank in ranks})
        sent = payload_bytes * (count - 1) / count
        inside = sent / (INSIDE * self.gpu.link) if count > nodes else 0.0
        groups = self.a_node * nodes / count  # groups that cross between the same nodes at once
        across = sent * groups / (self.across * self.nics * GBIT) if nodes > 1 else 0.0
        return max(inside, across) + (nodes - 1) * ACROSS_SECONDS + (count - nodes) * INSIDE_SECONDS


def build_cluster(
    gpu_name: str, gpus: int, nics: float = 0, a_node: int = 0, host_gb: float = 0, disk: float = 0, link: float = 0
) -> Cluster:
    """Returns a cluster of `gpus` of that kind. Of each node, where they are not the usual ones (0): `nics` Gbit/s to
    others, `a_node` GPUs, `host_gb` of memory, GB/s that its drives read, GB/s of the link from a GPU to the others.
    Raises RecipeError for an unknown kind, or where the GPUs make no whole nodes."""
    gpu = find_gpu(gpu_name)
    if gpus < 1:
        raise RecipeError(f"--gpus {gpus}: must be at least 1")
    a_node = a_node or min(gpu.a_node, gpus)
    if gpus % a_node:
        raise RecipeError(f"--gpus {gpus}: must be whole nodes of {a_node}; a multiple of {a_node}, or set --per-node")
    gpu = replace(gpu, disk=disk * 1e9 or gpu.disk, link=link * 1e9 or gpu.link, has_p2p=bool(link) or gpu.has_p2p)
    return Cluster(gpu, gpus, a_node, nics or gpu.nics, host_gb)
