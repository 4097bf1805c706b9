"""The optimizers, what each keeps, the learning rate and the gradient norm.

Invariant: the learning rate is a pure function of the step, so a schedule has no state to save; the norm is that of
the full gradient, the same on every rank and in every layout.
"""

import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardbook.comm.torch_private import norms_of, scale_together
from shardbook.optim.adamw_bf16 import AdamWBf16
from shardbook.optim.elementwise import AdEMAMix, Lion, local_part
from shardbook.optim.muon import Muon
from shardbook.parallel.pipeline import StageParameters
from shardbook.parallel.units import WHOLE
from shardbook.recipe import Optim, RecipeError, first_line

STEP_BYTES = 4  # the step count of one parameter
BLOCK, LEAST = 256, 4096  # torchao quantises blocks of so many elements, in shards that have whole ones and this many
TINY_ROW, TINY_TOTAL = 1e-15, 1e-16  # a row's norm, and a sum of squares, below which fp32 loses digits of squares
TORCHAO = "0.18"  # the first that was tried here, on torch 2.13


def state_bytes(name: str, numel: int, itemsize: int, is_matrix: bool = False) -> int:
    """Bytes that the optimizer `name` (as optim.name) keeps for one parameter, of which a rank has `numel` elements of
    `itemsize` bytes, and which may be a block's matrix: moments and, but for that of muon, a step count."""
    match name:
        case "muon" if is_matrix:
            return numel * itemsize
        case "lion":
            return numel * itemsize + STEP_BYTES
        case "ademamix":
            return 3 * numel * itemsize + STEP_BYTES
        case "adamw_bf16":
            return 2 * numel * 2 + STEP_BYTES
        case "adamw_8bit" if numel >= LEAST and numel % BLOCK == 0:
            return 2 * (numel + numel // BLOCK * 4 + 256 * 4) + STEP_BYTES  # codes, a scale a block, what codes mean
        case _:
            return 2 * numel * itemsize + STEP_BYTES


def check_optimizer(optim: Optim, device_type: str) -> None:
    """Raise RecipeError where this machine lacks what optim.name needs on `device_type`. Fetches and builds nothing."""
    if optim.name != "adamw_8bit":
        return
    said = "optim.name = 'adamw_8bit':"
    way_out = f"pip install 'torchao>={TORCHAO}' (the extra `8bit`), or set optim.name=adamw_bf16"
    try:
        from torchao.optim import AdamW8bit  # noqa: F401

        version = importlib.metadata.version("torchao")
    except Exception as error:  # where it was built for another torch it may raise anything
        raise RecipeError(f"{said} torchao cannot be used ({first_line(error)}); {way_out}") from error
    if [int(part) for part in re.findall(r"\d+", version)[:2]] < [int(part) for part in TORCHAO.split(".")]:
        raise RecipeError(f"{said} torchao is {version}; {way_out}")
    if device_type == "cuda" and not importlib.util.find_spec("triton"):
        raise RecipeError(f"{said} compiles its step, and Triton is absent; set optim.name=adamw_bf16")


def parameter_groups(model: nn.Module, optim: Optim) -> list[dict[str, Any]]:
    """What is trained: matrices, which decay, and vectors, which do not (as the Hugging Face Trainer has it)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def numbers_in_whole(model: nn.Module) -> list[int] | None:
    """The place of each parameter of `parameter_groups` in those of the whole model; None where this is all of it."""
    whole: dict[str, torch.Size] | None = getattr(model, WHOLE, None)
    if whole is None:
        return None
    own = dict(model.named_parameters())
    order = sorted(whole, key=lambda name: len(whole[name]) < 2)
    return [number for number, name in enumerate(order) if name in own]


def adamw_settings(optim: Optim) -> dict[str, Any]:
    return {"lr": optim.learning_rate, "betas": tuple(optim.betas), "eps": optim.eps}


def build_optimizer(model: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """The optimizer optim.name over the sharded parameters: torch's fused AdamW, torchao's with 8-bit moments, or ours.
    Muon takes the matrices of the model's `blocks`."""
    groups, settings = parameter_groups(model, optim), adamw_settings(optim)
    match optim.name:
        case "adamw":
            return torch.optim.AdamW(groups, fused=True, **settings)
        case "adamw_bf16":
            return AdamWBf16(groups, settings, numbers_in_whole(model))
        case "adamw_8bit":
            from torchao.optim import AdamW8bit

            return AdamW8bit(groups, **settings)
        case "lion":
            return Lion(groups, optim)
        case "ademamix":
            return AdEMAMix(groups, optim)
        case "muon":
            blocks: Any = model.blocks
            return Muon(groups, (p for block in blocks for p in block.parameters() if p.ndim == 2), optim)


def state_kind(optimizer: torch.optim.Optimizer, shards: int) -> str:
    """What saved state must be of for `optimizer` to go on with it. 8-bit blocks cannot be cut anew, so it belongs to a
    number of shards."""
    name = getattr(optimizer, "kind", type(optimizer).__name__)
    return f"{name} over {shards} shards" if name == "AdamW8bit" else name


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """The rate of optimizer step `step` (1 to `steps`): linear warm-up, then constant, linear or cosine.

    No step runs at rate 0: warm-up ends at the peak, decay would reach 0 one step after the last.
    """
    warmup = round(optim.warmup_steps * steps) if optim.warmup_steps < 1 else int(optim.warmup_steps)
    if step <= warmup:
        return optim.learning_rate * step / warmup
    progress = (step - 1 - warmup) / max(1, steps - warmup)
    match optim.lr_scheduler_type:
        case "constant":
            return optim.learning_rate
        case "linear":
            return optim.learning_rate * (1 - progress)
        case "cosine":
            return optim.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's: a number would be compiled in, for each step anew
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Clips(Protocol):
    """What has the gradients itself, and scales them when it comes to them."""

    def clip(self, max_norm: float) -> Tensor: ...


@torch.no_grad()
def clip_gradients(parameters: "Iterable[nn.Parameter] | Clips", max_norm: float) -> Tensor:
    """Scale the gradients of `parameters` so that their norm is at most `max_norm` (0: leave them). Returns the norm
    before, an fp32 scalar where they are: no host sync. Collective."""
    if not isinstance(parameters, Iterable):
        return parameters.clip(max_norm)
    stage = parameters if isinstance(parameters, StageParameters) else None
    counted_elsewhere = set(stage.copies) if stage else ()
    parameters = [p for p in parameters if p.grad is not None]
    counted = [p.grad for p in parameters if p.grad is not None and p not in counted_elsewhere]
    norm = gradient_norm(counted, group=stage.group if stage else None)
    # on a CPU one may look, and what is not too large need not be multiplied by one
    if max_norm and not (norm.is_cpu and max_norm / (norm + 1e-6) >= 1):
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        scale_together([local_part(p.grad) for p in parameters if p.grad is not None], scale)
    return norm


def gradient_norm(
    gradients: list[Tensor], known: list[Tensor] | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """2-norm of all gradients together, sharded or not, as an fp32 scalar, the same on every rank. `known`: their
    squares_of, where they were taken already; `group`: ranks that have other layers. Collective.

    Rows are summed in fp64: in fp32 a tensor of 28M elements already gives another norm whole than in halves (1.4e-5
    on SmolLM2), so that clipping would tell the layouts apart.
    """
    pieces: dict[Any, list[Tensor]] = {}
    for number, gradient in enumerate(gradients):
        where, local = None, gradient
        if isinstance(gradient, DTensor):
            where, local = (gradient.device_mesh, gradient.placements), gradient.to_local()
        pieces.setdefault(where, []).append(known[number] if known else local)
    squares = {where: parts if known else squares_of(parts) for where, parts in pieces.items()}
    device = next((parts[0].device for parts in squares.values()), None)
    # by the ranks that share them, outermost axis first: along axes that replicate they are equal already. Not
    # is_shard: torch's placement of what is cut twice says no. Not by groups: torch takes meshes of the same ranks for
    # one, and gives the groups of either
    sums: dict[tuple[tuple[int, ...], ...], Tensor] = {(): torch.zeros((), dtype=torch.float64, device=device)}
    group_of: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for where, parts in squares.items():
        shared: tuple[tuple[int, ...], ...] = ()
        if where is not None:
            mesh, placements = where
            dims = [dim for dim, placed in enumerate(placements) if not placed.is_replicate() and mesh.size(dim) > 1]
            groups = [mesh.get_group(dim) for dim in dims]
            shared = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
            group_of |= dict(zip(shared, groups, strict=True))
        sums[shared] = sums.get(shared, 0) + torch.stack(parts).sum()
    while len(sums) > 1:
        inner = max(sums, key=len)
        part = sums.pop(inner)
        dist.all_reduce(part, group=group_of[inner[-1]])
        sums[inner[:-1]] = sums.get(inner[:-1], 0) + part
    if group is not None:
        dist.all_reduce(sums[()], group=group)
    return sums[()].sqrt().float()


def squares_of(parts: list[Tensor]) -> list[Tensor]:
    """The sum of the squares of each of `parts`, which lie on one device, in fp64."""
    if not parts[0].is_cpu:
        return list(torch.stack(norms_of(parts, torch.float64)).square().unbind())
    return [_square_on_cpu(part) for part in parts]


def _square_on_cpu(part: Tensor) -> Tensor:
    """A row in fp32, which has the same bits however rows are dealt out, and half the time of fp64; all rows in fp64. A
    row whose squares fp32 does not have, being too large or too small, in fp64 too."""
    if part.ndim < 2:
        return torch.dot(*2 * [part.flatten().double()])
    norms = torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32).flatten()
    rows = norms.double()
    total = torch.dot(rows, rows)
    if not TINY_TOTAL <= total.item() < math.inf and part.numel():
        # what is not replaced beside larger rows is too small to be seen
        outside = ((norms >= TINY_ROW) & (norms < math.inf)).logical_not_().nonzero().flatten()
        for some in outside.split(2**10):
            rows[some] = torch.linalg.vector_norm(part.flatten(0, -2)[some], dim=-1, dtype=torch.float64)
        total = torch.dot(rows, rows)
    return total
