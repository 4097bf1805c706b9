"""The loss head: hidden states and targets become the loss of each target, never all logits at once."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class LossHead(nn.Linear):
    """The language-model head as a loss: hidden [n, hidden] and targets [n] -> negative log-likelihood [n], fp32.

    Logits exist for `chunk_tokens` rows at a time (0: all) and are recomputed in backward; with a vocabulary of 128k
    and 8k trained tokens the whole fp32 matrix and its gradient would be 8 GB.
    """

    chunk_tokens: int = 0

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        if not self.chunk_tokens or len(targets) <= self.chunk_tokens:
            return self._loss(hidden, targets)
        pairs = zip(hidden.split(self.chunk_tokens), targets.split(self.chunk_tokens), strict=True)
        return torch.cat([checkpoint(self._loss, h, t, use_reentrant=False) for h, t in pairs])

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, self.weight).float(), targets, reduction="none")
