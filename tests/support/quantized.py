"""ZeRO++ written out in one process, without the code under test: what every rank must compute, bit for bit.

Quantisation is a loop over blocks, a collective is a loop over ranks. Sharding along dim 0 as fully_shard does it: a
unit's parameters in order, each padded to equal shards, rank r's piece the concatenation of its shards.
"""

from dataclasses import dataclass

import reference
import torch
from torch import Tensor


def round_trip(row: Tensor, bits: int, block: int) -> Tensor:
    """A 1-D tensor as it is after quantisation and back, in fp32."""
    largest = 127 if bits == 8 else 7
    out = []
    for start in range(0, len(row), block):
        part = row[start : start + block].float()
        most = part.abs().max()
        step = most * (1 / largest) if most >= 127 * 2.0**-126 else torch.zeros(())
        steps = torch.round(part / step).clamp(-largest, largest) if step > 0 else torch.zeros_like(part)
        out.append(steps * step)
    return torch.cat(out)


def steps_in(buffer: Tensor, numel: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """What a buffer [..., bytes] holds: whole steps [..., numel], int64, and the scale of each element, fp32."""
    blocks = -(-numel // block)
    payload, scales = buffer.split([blocks * block * bits // 8, 4 * blocks], -1)
    steps = payload.contiguous().view(torch.int8).long()
    if bits == 4:
        halves = payload.unflatten(-1, (blocks, block // 2)).long()
        steps = torch.cat([halves & 15, halves >> 4], -1).flatten(-2) - 8
    scale = scales.contiguous().view(torch.float32).repeat_interleave(block, -1)
    return steps[..., :numel], scale[..., :numel]


def assert_alike_but_for_ties(one: Tensor, other: Tensor, rows: Tensor, bits: int, block: int) -> None:
    """Buffers of the same `rows` [..., n] by two devices: scales equal to the bit, and steps too, but that one device
    may divide to the last bit but one. A quotient that lies so near the middle between two steps may go to either."""
    (steps, scale), (others, other_scale) = (steps_in(buffer, rows.shape[-1], bits, block) for buffer in (one, other))
    assert torch.equal(scale, other_scale), "scales differ"
    apart = steps != others
    assert ((steps - others).abs() <= 1).all()
    quotient = (rows.double() / scale.double()).abs()[apart]
    # a quotient off by two units in its last place (CUDA's fast division), and rounded: 2.5 * 2**-23, relative
    assert ((quotient - quotient.floor() - 0.5).abs() <= 2.5 * 2.0**-23 * quotient).all(), "steps differ beside ties"


def shards_of(tensors: list[Tensor], ranks: int) -> list[Tensor]:
    """Rank r's flat piece of a unit, padding included, for each r."""
    pieces: list[list[Tensor]] = [[] for _ in range(ranks)]
    for tensor in tensors:
        rows = -(-len(tensor) // ranks)
        padded = torch.zeros(rows * ranks, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        for rank in range(ranks):
            pieces[rank].append(padded[rank * rows : (rank + 1) * rows].flatten())
    return [torch.cat(parts) for parts in pieces]


def tensors_of(pieces: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """The inverse of shards_of."""
    ranks, out, at = len(pieces), [], 0
    for tensor in like:
        rows = -(-len(tensor) // ranks)
        width = rows * tensor[0].numel()
        parts = [piece[at : at + width].view(rows, *tensor.shape[1:]) for piece in pieces]
        out.append(torch.cat(parts)[: len(tensor)])
        at += width
    return out


def rows_of(tensor: Tensor, ranks: int) -> list[Tensor]:
    """The rows that each rank owns; none for the last ones, where there are too few."""
    return list(tensor.split(-(-len(tensor) // ranks)))


def gathered(tensors: list[Tensor], ranks: int, bits: int, block: int) -> list[Tensor]:
    """qwZ: every rank's piece quantised, its own too."""
    return tensors_of([round_trip(piece, bits, block) for piece in shards_of(tensors, ranks)], tensors)


def added(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def reduced(gradients: list[list[Tensor]], nodes: int, bits: tuple[int, int], block: int) -> list[Tensor]:
    """qgZ: `gradients` of each rank -> the sum, through two hops; one where there is one node."""
    ranks = len(gradients)
    inside = ranks // nodes
    cut = [shards_of(tensors, ranks) for tensors in gradients]  # [source][destination]
    pieces = []
    for destination in range(ranks):
        partial = []
        for node in range(nodes):  # in each node, the rank at this place adds up what its neighbours send it
            sources = [node * inside + neighbour for neighbour in range(inside)]
            partial.append(added([round_trip(cut[source][destination], bits[0], block) for source in sources]))
        if nodes > 1:  # and sends it to its namesake in the destination's node
            partial = [added([round_trip(part, bits[1], block) for part in partial])]
        pieces.append(partial[0])
    return tensors_of(pieces, gradients[0])


@dataclass(frozen=True)
class Wire:
    """Switches of the reference: None leaves a collective exact."""

    ranks: int
    nodes: int
    weights_bits: int = 0
    gradients_bits: tuple[int, int] | None = None
    block: int = 128


def train(scenario, wire: Wire, steps: int, max_norm: float, rate: float, decay: float) -> reference.Result:
    """A toy of toys.py trained on `wire.ranks` ranks played one after the other: master weights stay exact, forward and
    backward see the gathered ones, gradients of every micro-batch are reduced and then added up. AdamW is torch's."""
    model = scenario.model()
    named = dict(model.named_parameters())
    units = [list(dict.fromkeys(p for module in part for p in module.parameters())) for part in model.parts]
    # a master in the pieces that ranks own: the fused AdamW rounds the tail of a vector otherwise than its middle
    masters = {
        p: [torch.nn.Parameter(rows.clone()) for rows in rows_of(p.detach(), wire.ranks)] for p in named.values()
    }
    groups = [[m for p, parts in masters.items() for m in parts if (p.ndim >= 2) == matrix] for matrix in (True, False)]
    decays = [{"params": group, "weight_decay": decay * (number == 0)} for number, group in enumerate(groups)]
    optimizer = torch.optim.AdamW(decays, lr=rate, eps=reference.EPS, fused=True)
    result = reference.Result([], [], [], {})
    for step in range(steps):
        with torch.no_grad():
            for unit in units:
                exact = [torch.cat(masters[p]).detach() for p in unit]
                values = exact
                if wire.weights_bits:
                    values = gathered(exact, wire.ranks, wire.weights_bits, wire.block)
                for p, value in zip(unit, values, strict=True):
                    p.copy_(value)
        total, losses = {}, torch.zeros(wire.ranks)
        for micro in range(scenario.micros):
            found = []
            for rank in range(wire.ranks):
                loss = scenario.loss(model, step, rank, micro) / scenario.tokens(step, wire.ranks)
                gradients = torch.autograd.grad(loss, list(named.values()))
                found.append(dict(zip(named.values(), gradients, strict=True)))
                losses[rank] += loss.detach()
            for unit in units:
                each = [[gradients[p] for p in unit] for gradients in found]
                if wire.gradients_bits:
                    sums = reduced(each, wire.nodes, wire.gradients_bits, wire.block)
                else:
                    sums = [torch.stack(parts).sum(0) for parts in zip(*each, strict=True)]
                for p, value in zip(unit, sums, strict=True):
                    total[p] = total[p] + value if p in total else value
        # in fp64, as every device has it: clipping by a norm of another last bit gives other weights
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in total.values())).float()
        for p, parts in masters.items():
            for master, rows in zip(parts, rows_of(total[p], wire.ranks), strict=True):
                master.grad = rows.clone()
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_([m for parts in masters.values() for m in parts], max_norm, norm)
        optimizer.step()
        result.losses.append(losses.sum().item())
        result.norms.append(norm.item())
        result.gradients.append({name: total[p] for name, p in named.items()})
    result.weights = {name: torch.cat(masters[p]).detach() for name, p in named.items()}
    return result
