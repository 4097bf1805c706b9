"""Muon: orthogonalized momentum (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) for the matrices of
blocks; AdamW for all other parameters. Steps have AdamW's size (Liu et al., Muon is scalable, arXiv 2502.16982, section
2.2), so that one learning rate serves both.

Invariant: an update is computed from the whole matrix, on one rank, so its bits do not depend on how rows are sharded.
Matrices of one shape are processed N at a time on N ranks: an all-to-all brings each rank the whole of one, in bf16,
the dtype of the iteration, and a second one returns the results to the ranks that have the rows.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardbook.arithmetic import ceil_div
from shardbook.local_tensors import local_values
from shardbook.model.experts import matrices_of
from shardbook.optim.elementwise import step_adamw
from shardbook.recipe import Optim

ITERATIONS, QUINTIC, TINY = 5, (3.4445, -4.7750, 2.0315), 1e-7  # Jordan's
WIRE_BYTES = 2  # of an element in the all-to-alls: bf16
RATIO = 0.2  # an update's factor, times the root of the longer side: it gives updates AdamW's usual size


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of `blocks`, AdamW for other parameters. State of a block's matrix: `momentum_buffer`; of
    others AdamW's; with the placement and dtype of the parameter."""

    def __init__(self, groups: list[dict[str, Any]], blocks: Iterable[nn.Module], optim: Optim):
        chosen, split = matrices_of(list(blocks)), []
        for group in groups:
            for is_matrix in (True, False):
                if chosen_params := [p for p in group["params"] if (p in chosen) == is_matrix]:
                    split.append(group | {"params": chosen_params, "is_matrix": is_matrix})
        super().__init__(split, {"lr": optim.learning_rate, "weight_decay": 0.0})
        self.optim = optim

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no gradient is made anew here
        """Steps the parameters that have gradients. Collective where parameters are sharded."""
        for group in self.param_groups:
            present = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["is_matrix"]:
                self._step_matrices(present, group["lr"], group["weight_decay"])
            elif present:
                self._step_others(present, group["lr"], group["weight_decay"])

    def _step_matrices(self, parameters: Sequence[nn.Parameter], rate: float, decay: float) -> None:
        same_shape: dict[tuple[torch.Size, Any], list[nn.Parameter]] = {}
        for parameter in parameters:
            same_shape.setdefault((parameter.shape, shard_group(parameter)), []).append(parameter)
        for (shape, group), matrices in same_shape.items():
            ranks = group.size() if group else 1
            for first in range(0, len(matrices), ranks):
                some = matrices[first : first + ranks]
                updates = orthogonal_rows([self._advance(parameter) for parameter in some], shape, group)
                for parameter, update in zip(some, updates, strict=True):
                    weight = local_values(parameter)
                    weight.mul_(1 - rate * decay).add_(update, alpha=-rate * RATIO * max(shape) ** 0.5)

    def _advance(self, parameter: nn.Parameter) -> Tensor:
        """Updates the momentum of this rank's rows and returns its Nesterov look-ahead, in bf16."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        momentum, gradient = local_values(state["momentum_buffer"]), local_values(parameter.grad)
        momentum.lerp_(gradient, 1 - self.optim.momentum)
        return gradient.lerp(momentum, self.optim.momentum).bfloat16()

    def _step_others(self, parameters: Sequence[nn.Parameter], rate: float, decay: float) -> None:
        for parameter in parameters:
            if not (state := self.state[parameter]):
                state["step"] = torch.zeros((), device=local_values(parameter).device)
                state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        states = [self.state[parameter] for parameter in parameters]
        moments = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        tensors: list[Any] = [parameters, *moments, [parameter.grad for parameter in parameters]]
        parts = [[local_values(each) for each in some] for some in tensors]
        rates: dict[str, Any] = {"lr": rate, "weight_decay": decay, "eps": self.optim.eps}
        step_adamw(parts, [state["step"] for state in states], self.optim.betas, **rates)


def shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Returns the group of ranks over which the rows of `parameter` are sharded; None where this rank has them all."""
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if placement == Shard(0) and parameter.device_mesh.size(axis) > 1:
                return parameter.device_mesh.get_group(axis)
    return None


def orthogonal_rows(rows: list[Tensor], shape: torch.Size, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Returns this rank's rows of the orthogonal form of each matrix of `shape`, given this rank's `rows` of each,
    bf16; at most as many matrices as the group has ranks. Two all-to-alls. Collective."""
    if group is None:
        return [orthogonal(matrix) for matrix in rows]
    ranks, each = group.size(), ceil_div(shape[0], group.size())
    sent = rows[0].new_zeros(ranks, each, shape[1])  # for each rank this rank's rows of its matrix
    for number, shard in enumerate(rows):
        sent[number, : len(shard)] = shard
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    if group.rank() < len(rows):
        received.view(-1, shape[1])[: shape[0]] = orthogonal(received.view(-1, shape[1])[: shape[0]])
    dist.all_to_all_single(sent, received, group=group)
    return [sent[number, : len(shard)] for number, shard in enumerate(rows)]


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns `matrix` [m, n], bf16, with its singular values brought near to one by five steps of a quintic."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    now = matrix.T if is_tall else matrix
    now = now / now.norm().clamp_min(TINY)
    linear, cubic, quintic = QUINTIC
    for _ in range(ITERATIONS):
        gram = now @ now.T
        now = torch.addmm(now, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), now, beta=linear)
    return now.T if is_tall else now


def orthogonal_flops(shape: Sequence[int]) -> int:
    """Returns the FLOPs of orthogonalizing one matrix: three products in each iteration."""
    short, long = min(shape), max(shape)
    return ITERATIONS * 2 * (2 * short * short * long + short**3)
