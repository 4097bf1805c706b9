"""The independent reference: plain PyTorch and transformers, one process, nothing of Shardbook.

Loss and AdamW are written out. A step is a list of documents, each (token ids, mask of trained tokens), run one by
one without padding or packing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

# Not AdamW's usual 1e-8: there the first step is the SIGN of each gradient, and the rounding of one near 0 moves a
# whole step. With 1e-3 a rounding error stays one, and comparisons can be tight.
EPS = 1e-3
Document = tuple[list[int], list[bool]]
Row = list[Document]


@dataclass
class Result:
    """A run: of each step the loss, the gradient norm and the whole gradient by name; at the end the weights."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    rows: list[Row] = field(default_factory=list)  # of the first step, where a test wants them


def document_loss(model, document: Document) -> tuple[Tensor, int]:
    """Summed negative log-likelihood of the trained tokens, and their number."""
    ids, mask = torch.tensor(document[0]), torch.tensor(document[1])
    logits = model(input_ids=ids[None]).logits[0]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    nll = -torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[1:, None])[:, 0]
    return nll[mask[1:]].sum(), int(mask[1:].sum())


def train(
    folder: Path,
    steps: list[list[Document]],
    rate: float,
    decay: float,
    max_norm: float = 0.0,
    dtype: torch.dtype = torch.float32,
    **how: str,
) -> Result:
    """Train the Hugging Face model in `folder`, loaded as `how` says, on the documents of each step, in `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **how)

    def loss_of(step: int) -> Tensor:
        parts = [document_loss(model, document) for document in steps[step]]
        return sum(part for part, _ in parts) / sum(count for _, count in parts)

    return descend(model, loss_of, len(steps), rate, decay, max_norm)


def descend(
    model: torch.nn.Module, loss_of: Callable[[int], Tensor], steps: int, rate: float, decay: float, max_norm: float
) -> Result:
    """AdamW on `loss_of(step)`. A trained parameter that a loss does not touch has gradient zero."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    first = {name: torch.zeros_like(p) for name, p in named.items()}
    second = {name: torch.zeros_like(p) for name, p in named.items()}
    result = Result([], [], [], {})
    for step in range(steps):
        loss = loss_of(step)
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        pairs = zip(named.items(), found, strict=True)
        gradients = {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in gradients.values())).item()
        scale = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
        with torch.no_grad():
            for name, p in named.items():
                g, m, v = gradients[name] * scale, first[name], second[name]
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                p.mul_(1 - rate * (decay if p.ndim > 1 else 0.0))
                p.sub_(rate * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + EPS))
        result.losses.append(loss.item())
        result.norms.append(norm)
        result.gradients.append({name: g.detach() for name, g in gradients.items()})
    result.weights = {name: p.detach() for name, p in model.named_parameters()}
    return result


def nf4(full: Tensor) -> Tensor:
    """What NF4 makes of a matrix, by appendix E of QLoRA (arXiv 2305.14314), number by number, in fp32."""

    def quantiles(count: int) -> Tensor:
        return torch.special.ndtri(torch.linspace(0.9677083, 0.5, count, dtype=torch.float64)[:-1])

    codes = torch.cat([quantiles(9), torch.zeros(1, dtype=torch.float64), -quantiles(8)])
    codes /= codes.max()
    blocks = full.double().view(-1, 64)
    absmax = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / absmax[..., None] - codes).abs().nan_to_num(0.0).argmin(-1)
    return torch.where(absmax > 0, codes[nearest] * absmax, 0.0).view_as(full).float()


def train_taught(
    model,
    teacher,
    steps: list[list[Document]],
    temperature: float,
    ratio: float,
    rate: float,
    decay: float,
    max_norm: float = 0.0,
) -> Result:
    """Train `model` on the documents of each step beside `teacher`, of whole logits: (1 - ratio) * NLL + ratio * T^2 *
    KL(teacher || model) (arXiv 1503.02531, section 2), of what both vocabularies have, over the trained tokens."""

    def loss_of(step: int) -> Tensor:
        total, tokens = 0.0, 0
        for document in steps[step]:
            ids, mask = torch.tensor(document[0]), torch.tensor(document[1])
            logits = model(input_ids=ids[None]).logits[0, :-1][mask[1:]]
            with torch.no_grad():
                told = teacher(input_ids=ids[None]).logits[0, :-1][mask[1:]]
            both = min(logits.shape[1], told.shape[1])
            wanted = torch.softmax(told[:, :both] / temperature, -1)
            got = torch.log_softmax(logits[:, :both] / temperature, -1)
            nll, count = document_loss(model, document)
            total = total + (1 - ratio) * nll + ratio * temperature**2 * (wanted * (wanted.log() - got)).sum()
            tokens += count
        return total / tokens

    return descend(model, loss_of, len(steps), rate, decay, max_norm)


Pair = tuple[Document, Document]


def pair_losses(method: str, loss_type: str, beta: float = 0.1, gamma: float = 0.5) -> Callable[..., Tensor]:
    """The loss of a pair by its papers, of log-probabilities of chosen and rejected, those of the reference, and
    trained tokens: DPO (arXiv 2305.18290, equation 7), IPO (2310.12036, 17, for each token), APO-zero (2408.06266, 7),
    the odds of ORPO (2403.07691, 6) and SimPO (2405.14734, 6)."""

    def log_sigmoid(value: Tensor) -> Tensor:
        return -torch.log1p(torch.exp(-value))

    def odds(average: Tensor) -> Tensor:
        return average - torch.log(1 - torch.exp(average))

    known = {
        "sigmoid": lambda c, r, c0, r0, n, m: -log_sigmoid(beta * ((c - c0) - (r - r0))),
        "ipo": lambda c, r, c0, r0, n, m: ((c - c0) / n - (r - r0) / m - 1 / (2 * beta)) ** 2,
        "apo_zero": lambda c, r, c0, r0, n, m: 1 - torch.sigmoid(beta * (c - c0)) + torch.sigmoid(beta * (r - r0)),
        "orpo": lambda c, r, c0, r0, n, m: -beta * log_sigmoid(odds(c / n) - odds(r / m)),
        "simpo": lambda c, r, c0, r0, n, m: -log_sigmoid(beta * (c / n - r / m) - gamma),
    }
    return known[loss_type if method == "dpo" else method]


def train_pairs(
    model, steps: list[list[Pair]], method: str, loss_type: str, rate: float, decay: float, max_norm: float = 0.0
) -> Result:
    """Train `model` on the pairs of each step, in fp32; its first weights are the reference."""
    loss = pair_losses(method, loss_type)

    def likelihoods(pair: Pair) -> list[tuple[Tensor, int]]:
        return [(-nll, count) for nll, count in (document_loss(model, side) for side in pair)]

    with torch.no_grad():
        before = [[[value for value, _ in likelihoods(pair)] for pair in pairs] for pairs in steps]

    def loss_of(step: int) -> Tensor:
        values, chosen, tokens = [], [], 0
        for pair, (c0, r0) in zip(steps[step], before[step], strict=True):
            (c, n), (r, m) = likelihoods(pair)
            values.append(loss(c, r, c0, r0, n, m))
            chosen.append(c)
            tokens += n
        found = sum(values) / len(values)
        return found - sum(chosen) / tokens if method == "orpo" else found

    return descend(model, loss_of, len(steps), rate, decay, max_norm)


def train_scores(
    model, steps: list[list[tuple[list[int], list[int]]]], rate: float, decay: float, max_norm: float = 0.0
) -> Result:
    """Train transformers' classifier on the pairs of ids of each step, by Bradley and Terry: chosen before rejected."""

    def score(ids: list[int]) -> Tensor:
        return model(input_ids=torch.tensor(ids)[None]).logits[0, 0]

    def loss_of(step: int) -> Tensor:
        margins = [score(chosen) - score(rejected) for chosen, rejected in steps[step]]
        return sum(torch.log1p(torch.exp(-margin)) for margin in margins) / len(margins)

    return descend(model, loss_of, len(steps), rate, decay, max_norm)
