"""What the headers of recipes say of speed."""

from shardbook.gpus import GPUS
from shardbook.plan.hardware import Cluster
from shardbook.plan.speed import inside_seconds, model_flops, predict_step

H100 = GPUS["h100-80gb"]


def predict_mfu(layout, config, recipe, flops, document_tokens: float) -> float:
    """Model FLOPs over an H100's peak, for a step whose collectives hide, all but tp's and cp's."""
    cluster = Cluster(H100, layout.world_size, layout.ranks_per_node, H100.nics)
    step = predict_step(layout, config, recipe, flops, document_tokens, cluster)
    seconds = step.seconds - step.exposed - step.offload + inside_seconds(layout, config, recipe, cluster)
    return model_flops(recipe, flops, document_tokens) / seconds / H100.flops
