"""ZeRO++'s switches, as ranks along dp_shard and nodes make of them what `[parallel]` asks for."""

from shardbook.comm.zeropp_collectives import ZeroppSwitches
from shardbook.recipe import Parallel, RecipeError


def read_switches(parallel: Parallel, shards: int, ranks_per_node: int) -> ZeroppSwitches:
    """ZeRO++'s switches for `shards` ranks along dp_shard. Raises RecipeError where secondary shards, or nodes, do not
    fit into them."""
    named = parallel.secondary_shard
    secondary = min(ranks_per_node, shards) if named == "node" else int(named)
    if secondary and (secondary > shards or shards % secondary or secondary == 1 < shards):
        raise RecipeError(
            f"parallel.secondary_shard = {named!r}: {secondary} ranks; must be more than 1 and divide the {shards} "
            "ranks of dp_shard" + ("; for one rank set parallel.stage=zero2" if secondary == 1 else "")
        )
    bits, inside = parallel.quantize_gradients, secondary or min(ranks_per_node, shards)
    by_node = named == "node" or (bits and not secondary)
    if by_node and (shards % inside or ranks_per_node % inside):
        raise RecipeError(
            f"parallel.quantize_gradients = {bits}, parallel.secondary_shard = {named!r}: nodes of {ranks_per_node} "
            f"ranks and dp_shard's {shards} do not fit into each other; set parallel.secondary_shard to a number"
        )
    return ZeroppSwitches(
        weights_bits=parallel.quantize_weights,
        gradients_bits=(bits[0], bits[1]) if bits else None,
        secondary=secondary if secondary < shards else 0,  # one node: every gather is inside it already
        inside=inside if shards % inside == 0 else shards,
    )
