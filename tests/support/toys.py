"""Small models that are not language models of a hub, and a loop that trains them through the package's own stages."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import reference
import torch
import torch.nn.functional as F
from cases import whole
from torch import Tensor, nn

RATE, DECAY = 1e-2, 0.1


class Block(nn.Module):
    """A residual block with two rows in its first matrix, fewer than four ranks have shards, and a gate that is used
    only when it is asked for."""

    def __init__(self, width: int):
        super().__init__()
        self.down, self.up, self.gate = nn.Linear(width, 2), nn.Linear(2, width), nn.Linear(width, width)

    def forward(self, hidden: Tensor, gated: bool) -> Tensor:
        added = self.up(torch.tanh(self.down(hidden)))
        return hidden + (added * torch.sigmoid(self.gate(hidden)) if gated else added)


class Toy(nn.Module):
    """Embedding tied to the head, two blocks, each run `turns` times: a model with the package's parts and blocks."""

    is_adapted, frozen_identities = False, {}  # a checkpoint has all of it

    def __init__(self, vocab: int = 257, width: int = 8, turns: int = 1):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = (
            nn.Embedding(vocab, width),
            nn.LayerNorm(width),
            nn.Linear(width, vocab, False),
        )
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head.weight, self.turns = self.embed.weight, turns

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    @property
    def parts(self) -> list[list[nn.Module]]:
        return [[self.norm, self.embed, self.head], *[[block] for block in self.layers]]

    def forward(self, ids: Tensor, gated: bool) -> Tensor:
        """Summed loss of predicting each next id."""
        hidden = self.embed(ids)
        for block in self.layers:
            for _ in range(self.turns):
                hidden = block(hidden, gated)
        return F.cross_entropy(self.head(self.norm(hidden[:-1])), ids[1:], reduction="sum")


class Attention(nn.Module):
    """Two heads, no biases: 4 d^2 parameters."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, False) for _ in range(4))
        self.heads = heads

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (part(hidden).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2))


class Smallest(nn.Module):
    """The transformer of 260 parameters: d = 4, 2 heads, FFN 16, vocabulary 8, the output tied to the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.output = nn.Embedding(8, 4), nn.Linear(4, 8, False)
        self.output.weight = self.embed.weight
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(4), Attention(4, 2), nn.LayerNorm(4)
        self.ffn = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))

    @property
    def blocks(self) -> list[nn.Module]:
        return [self.norm1, self.attention, self.norm2, self.ffn]

    @property
    def parts(self) -> list[list[nn.Module]]:
        return [[self.embed, self.output], *[[block] for block in self.blocks]]

    def forward(self, ids: Tensor, gated: bool) -> Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.attention(self.norm1(hidden))
        hidden = hidden + self.ffn(self.norm2(hidden))
        return F.cross_entropy(self.output(hidden[:-1]).float(), ids[1:], reduction="sum")


@dataclass(frozen=True)
class Scenario:
    """What is unusual: everything else is a plain training run."""

    build: Callable[[], nn.Module] = Toy
    vocab: int = 257
    frozen: tuple[str, ...] = ()  # parts of the names of frozen parameters
    length: Callable[[int, int], int] = lambda step, rank: 9  # ids in a row; 1 is a row without a target
    gated: Callable[[int, int], bool] = lambda step, rank: True
    forwards: int = 1  # before each backward
    micros: int = 2
    parallel: dict = field(default_factory=dict)  # further keys of [parallel]
    precision: dict = field(default_factory=dict)
    optimizer: str = "adamw"

    def model(self) -> nn.Module:
        model = self.build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.frozen))
        return model

    def rows(self, step: int, rank: int, micro: int) -> list[Tensor]:
        dice = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
        return [torch.randint(0, self.vocab, (self.length(step, rank),), generator=dice) for _ in range(self.forwards)]

    def loss(self, model: nn.Module, step: int, rank: int, micro: int, device: str = "cpu") -> Tensor:
        return sum(model(row.to(device), self.gated(step, rank)) for row in self.rows(step, rank, micro))

    def tokens(self, step: int, ranks: int) -> int:
        return sum(self.length(step, rank) - 1 for rank in range(ranks)) * self.forwards * self.micros

    def layout(self, model: nn.Module, stage: str, replicas: int, shards: int):
        """The layout of `model` over replicas x shards ranks."""
        from shardbook.parallel.layout import build_layout
        from shardbook.recipe import Parallel, Precision

        sizes = {"dp_replicate_size": replicas} if stage in ("ddp", "hsdp") else {}
        sizes |= {"dp_shard_size": shards} if stage != "ddp" else {}
        parallel, precision = Parallel(stage=stage, **sizes, **self.parallel), {"params": "fp32"} | self.precision
        ranks = replicas * shards
        node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        return build_layout(parallel, Precision(**precision), model, model.parts, model.blocks, ranks, node)

    def reference(self, ranks: int, steps: int, max_norm: float) -> reference.Result:
        model = self.model()

        def loss_of(step: int) -> Tensor:
            parts = [self.loss(model, step, rank, micro) for rank in range(ranks) for micro in range(self.micros)]
            return sum(parts) / self.tokens(step, ranks)

        return reference.descend(model, loss_of, steps, RATE, DECAY, max_norm)


def train_toy(
    scenario: Scenario,
    stage: str,
    replicas: int,
    shards: int,
    steps: int,
    max_norm: float,
    watch=None,
    note=None,
    device="cpu",
):
    """Train on this rank as `train.train` would. Returns the result, the same on every rank, and what `watch(layout)`,
    a context around the second step's micro-batches, gave. `note(sharded, optimizer)` is called after the last step's
    update, before its gradients are freed."""
    import contextlib

    import torch.distributed as dist

    from shardbook.optim import build_optimizer
    from shardbook.optim.clip import clip_gradients
    from shardbook.parallel.mesh import build_mesh
    from shardbook.parallel.sharding import apply_stage
    from shardbook.recipe import Optim

    model = scenario.model().to(device)
    layout = scenario.layout(model, stage, replicas, shards)
    rank, ranks, *_ = layout.data_rank(dist.get_rank())
    sharded = apply_stage(model, layout, build_mesh(layout.sizes, device))
    settings = Optim(name=scenario.optimizer, learning_rate=RATE, weight_decay=DECAY, eps=reference.EPS)
    optimizer = build_optimizer(model, settings)
    result, seen = reference.Result([], [], [], {}), None
    for step in range(steps):
        context = watch(layout) if watch and step == 1 else contextlib.nullcontext()
        loss = torch.zeros((), device=device)
        with context as seen_now:
            for micro in range(scenario.micros):
                with sharded.micro_batch(is_last=micro == scenario.micros - 1):
                    part = scenario.loss(model, step, rank, micro, device) / scenario.tokens(step, ranks)
                    part.backward()
                loss += part.detach()
        seen = seen_now or seen
        dist.all_reduce(loss)
        gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        result.norms.append(clip_gradients(model.parameters(), max_norm).item())
        optimizer.step()
        if note and step == steps - 1:
            note(sharded, optimizer)
        optimizer.zero_grad()
        result.losses.append(loss.item())
        result.gradients.append(gradients)
    result.weights = {name: whole(p) for name, p in model.named_parameters()}
    return result, seen
