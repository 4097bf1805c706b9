"""Supervised fine-tuning: the negative log-likelihood of the trained tokens."""

from torch import Tensor, nn

from shardbook.data.loader import MicroBatch
from shardbook.data.tokenized import Totals


def sft_loss(model: nn.Module, micro: MicroBatch) -> Tensor:
    """Returns the loss as a SUM over the micro-batch's trained tokens, an fp32 scalar."""
    return model(micro, summed=True)


def sft_terms(model: nn.Module, micro: MicroBatch, totals: Totals) -> Tensor:
    return (sft_loss(model, micro) / totals.tokens)[None]
