"""The names of the mesh axes, outermost first: the innermost communicate most, and so hold neighboring ranks.

Names, and which ranks an axis joins; parallel/ says what the axes are for."""

from math import prod

PP, DP_REPLICATE, DP_SHARD, CP, TP = "pp", "dp_replicate", "dp_shard", "cp", "tp"
EP = "ep"  # ranks that share the experts of each block: a part of dp_shard or dp_replicate
DATA_AXES = (DP_REPLICATE, DP_SHARD)  # ranks along these see different rows
IN_BLOCKS = (CP, TP)  # ranks along these talk inside every block
MODEL_AXES = (PP, *IN_BLOCKS)
# dp_shard in two: the ranks of a node, and the nodes. Only ZeRO++ communicates along these.
INSIDE, ACROSS = "dp_shard_inside", "dp_shard_across"
# Under ep: dp_replicate and dp_shard of the mesh on which experts lie, by the names under which traffic is counted.
OF_EXPERTS = {DP_REPLICATE: "edp_replicate", DP_SHARD: "edp_shard", EP: EP}
# Links along pp: activations go to the next pipeline stage, gradients to the previous one; the gradient of a tied
# weight is exchanged between the two ends.
PP_FORWARD, PP_BACKWARD, PP_ENDS = "pp_forward", "pp_backward", "pp_ends"
WORLD = "world"  # of a collective over all ranks, where no single mesh axis spans them


def rank_along(sizes: dict[str, int], axis: str, rank: int) -> int:
    """Returns the place of the global `rank` along `axis`. The last axis counts fastest."""
    return rank // _stride(sizes, axis) % sizes[axis]


def ranks_along(sizes: dict[str, int], axis: str, rank: int) -> list[int]:
    """Returns the global ranks of the group along `axis` that `rank` is in, in order."""
    stride = _stride(sizes, axis)
    first = rank - rank_along(sizes, axis, rank) * stride
    return [first + number * stride for number in range(sizes[axis])]


def _stride(sizes: dict[str, int], axis: str) -> int:
    names = list(sizes)
    return prod(sizes[name] for name in names[names.index(axis) + 1 :])
