"""What is minimised: an objective takes the model and a micro-batch and returns a SUM over trained tokens.
Never a mean: the loop divides by what the whole step counts."""

from collections.abc import Callable

from torch import Tensor, nn

from shardbook.data.loader import MicroBatch
from shardbook.objectives.sft import sft_loss

Objective = Callable[[nn.Module, MicroBatch], Tensor]
OBJECTIVES: dict[str, Objective] = {"sft": sft_loss}
