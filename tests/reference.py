"""The independent reference: plain PyTorch and transformers, one process, nothing of Shardbook.

Loss and AdamW are written out. A step is a list of documents, each (token ids, mask of trained tokens), run one by
one without padding or packing.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

# Not AdamW's usual 1e-8: there the first step is the SIGN of each gradient, and the rounding of one near 0 moves a
# whole step. With 1e-4 a rounding error stays one, and comparisons can be tight.
EPS = 1e-4
Document = tuple[list[int], list[bool]]


def document_loss(model, document: Document) -> tuple[torch.Tensor, int]:
    """Summed negative log-likelihood of the trained tokens, and their number."""
    ids, mask = torch.tensor(document[0]), torch.tensor(document[1])
    logits = model(input_ids=ids[None]).logits[0].float()
    nll = -torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[1:, None])[:, 0]
    return nll[mask[1:]].sum(), int(mask[1:].sum())


def train(folder: Path, steps: list[list[Document]], rate: float, decay: float, max_norm: float = 0.0):
    """Losses, gradient norms and the trained model after `steps`, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    parameters = list(model.parameters())
    first, second = [torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters]
    losses, norms = [], []
    for number, documents in enumerate(steps, start=1):
        parts = [document_loss(model, document) for document in documents]
        loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in gradients)).item()
        scale = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                g = g * scale
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                p.mul_(1 - rate * (decay if p.ndim > 1 else 0.0))
                p.sub_(rate * (m / (1 - 0.9**number)) / ((v / (1 - 0.999**number)).sqrt() + EPS))
        losses.append(loss.item())
        norms.append(norm)
    return losses, norms, model
