"""The names of the mesh axes, outermost first, so that the innermost, which talk most, hold neighbouring ranks.

Only names, for all who read them; what the axes are for is said in parallel/."""

PP, DP_REPLICATE, DP_SHARD, CP, TP = "pp", "dp_replicate", "dp_shard", "cp", "tp"
DATA_AXES = (DP_REPLICATE, DP_SHARD)  # ranks along these see different rows
# dp_shard in two: the ranks of a node, and the nodes. Only ZeRO++ talks along these.
INSIDE, ACROSS = "dp_shard_inside", "dp_shard_across"
# Of pp the neighbours: activations go to the next stage of a model, gradients to the one before; and its two ends,
# which have a tied weight each.
PP_FORWARD, PP_BACKWARD, PP_ENDS = "pp_forward", "pp_backward", "pp_ends"
WORLD = "world"  # of a collective over all ranks, where no mesh axis has them all
