"""The names of the mesh axes, outermost first, so that the innermost, which talk most, hold neighbouring ranks.

Only names, for all who read them; what the axes are for is said in parallel/."""

DP_REPLICATE, DP_SHARD, CP, TP = "dp_replicate", "dp_shard", "cp", "tp"
DATA_AXES = (DP_REPLICATE, DP_SHARD)  # ranks along these see different rows
# dp_shard in two: the ranks of a node, and the nodes. Only ZeRO++ talks along these.
INSIDE, ACROSS = "dp_shard_inside", "dp_shard_across"
WORLD = "world"  # of a collective over all ranks, where no mesh axis has them all
