"""What the headers of recipes say of speed."""

from shardbook.plan.speed import H100, model_flops, predict_step


def predict_mfu(layout, config, recipe, flops, document_tokens: float) -> float:
    """Model FLOPs over an H100's peak, for a step whose collectives hide, all but tp's."""
    step = predict_step(layout, config, recipe, flops, document_tokens)
    return model_flops(recipe, flops, document_tokens) / step.seconds / H100.flops
