"""Supervised fine-tuning: the negative log-likelihood of the trained tokens."""

from torch import Tensor, nn

from shardbook.data.loader import MicroBatch


def sft_loss(model: nn.Module, micro: MicroBatch) -> Tensor:
    """Scalar fp32 SUM over the micro-batch's trained tokens; the loop divides by the whole step's count."""
    total: Tensor = model(
        micro.input_ids, micro.position_ids, micro.boundaries, micro.positions, micro.targets, micro.packed, summed=True
    )
    return total
