"""The names of the mesh axes, outermost first: the innermost communicate most, and so hold neighboring ranks.

Only names; parallel/ says what the axes are for."""

PP, DP_REPLICATE, DP_SHARD, CP, TP = "pp", "dp_replicate", "dp_shard", "cp", "tp"
DATA_AXES = (DP_REPLICATE, DP_SHARD)  # ranks along these see different rows
# dp_shard in two: the ranks of a node, and the nodes. Only ZeRO++ communicates along these.
INSIDE, ACROSS = "dp_shard_inside", "dp_shard_across"
# Links along pp: activations go to the next pipeline stage, gradients to the previous one; the gradient of a tied
# weight is exchanged between the two ends.
PP_FORWARD, PP_BACKWARD, PP_ENDS = "pp_forward", "pp_backward", "pp_ends"
WORLD = "world"  # of a collective over all ranks, where no single mesh axis spans them
