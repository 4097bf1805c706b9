"""Expert parallel: the experts of each block split over neighbouring data ranks, and tokens sent to where theirs lie.

GShard's exchange (Lepikhin et al., arXiv 2006.16668, section 3.2) without its capacity: no token is dropped. Invariant:
an expert sums the gradients of all tokens of its ep group, so nothing is divided. What an expert computes is said by
transformers' interface of experts (model/expert_products.py): no family is named. Applied on the meta device, before
checkpointing, compile and stage. What is sent: dispatch.py.
"""

from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardbook.axes import EP
from shardbook.comm.collectives import AllToAll
from shardbook.comm.torch_private import in_backward, slots_of
from shardbook.model.causal_lm import CausalLM
from shardbook.model.expert_products import Permute, compute_rows, sort_by_expert
from shardbook.model.experts import has_interface
from shardbook.model.marks import STACKED
from shardbook.parallel.dispatch import CopyRows, ExchangeChoices, Routing, Splits, SumRows, make_segments, route
from shardbook.recipe import RecipeError


@dataclass(eq=False)
class EPGroup:
    """The expert-parallel ranks. The modules of experts hold it; `process_group` is set once there is a mesh, whose
    axis ep says which experts a rank has: numbers of experts are in the order of its ranks.

    Four ranks with ep 2 and eight experts e in a block; each rank has eight tokens, which choose two experts each:

                  experts at rest    in forward    sends its tokens       of ep group    same experts, summed with
        rank 0    half of e0-e3      e0 to e3      of e4-e7 to rank 1     0 1            rank 2
        rank 1    half of e4-e7      e4 to e7      of e0-e3 to rank 0     0 1            rank 3
        rank 2    half of e0-e3      e0 to e3      of e4-e7 to rank 3     2 3            rank 0
        rank 3    half of e4-e7      e4 to e7      of e0-e3 to rank 2     2 3            rank 1

    Under zero3 rank 0 gathers e0 to e3 with rank 2, and reduces their gradients with it. A token whose two experts are
    of one rank goes there once. Tokens go out (dispatch), through the experts, and their weighted sums come back
    (combine); in backward their gradients do.
    """

    size: int
    process_group: dist.ProcessGroup | None = None
    # while it is a list: what this rank sent and received in each forward of a block, in order
    noted: list[Splits] | None = None
    load: float = 1.0  # of a plan: the choices that this rank receives, as a multiple of those that it sends

    def route(self, ids: Tensor, experts: int) -> Routing:
        """Returns where tokens go that chose the experts `ids` [tokens, chosen], of so many in a block. Collective
        along ep; it waits for the device once."""
        routing = route(ids, experts, self, self.load)
        if self.noted is not None and not in_backward():
            self.noted.append(routing.splits)
        return routing


class RankExperts:
    """A view of a module of experts that products read: it has this rank's experts, as plain tensors."""

    def __init__(self, module: nn.Module, num_experts: int):
        self.module, self.num_experts = module, num_experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        if not isinstance(value, DTensor):
            return value
        stack = getattr(self.module, STACKED).get(name)
        return value.to_local().view(-1, *stack[1:]) if stack else value.to_local()


def run_experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Returns what the experts of all ranks make of `hidden` [n, D], whose tokens chose the experts `ids` [n, chosen]
    with `weights` [n, chosen]. Collective along ep."""
    group: EPGroup = module.ep_group
    routing = group.route(ids, module.num_experts)
    splits = routing.splits
    of_choices = Permute.apply(weights.flatten(), routing.order, routing.inverse).float()
    received, places = ExchangeChoices.apply(of_choices, routing.places, splits, group)
    order, inverse = sort_by_expert(routing.local_ids)  # received choices are by rank, and then by expert
    of_tokens = make_segments((places + routing.starts)[order], sum(splits.tokens_received))
    of_rows = Permute.apply(received.to(weights.dtype), order, inverse)[:, None]
    rows = CopyRows.apply(hidden, *routing.copies)  # each replaces the one before, which is then free
    rows = AllToAll.apply(rows, splits.tokens_sent, splits.tokens_received, group)
    rows = CopyRows.apply(rows, *of_tokens)
    local = RankExperts(module, module.num_experts // group.size)
    rows = compute_rows(local, rows, routing.local_ids[order]) * of_rows
    rows = SumRows.apply(rows, *of_tokens).to(hidden.dtype)
    rows = AllToAll.apply(rows, splits.tokens_received, splits.tokens_sent, group)
    return SumRows.apply(rows, *routing.copies)


@cache
def _dispatching(family: Any) -> Any:
    """Returns the class `family` with `run_experts` as its forward. Compiled blocks break there: the number of rows is
    the host's."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return run_experts(module, hidden_states, top_k_index, top_k_weights)

    return type(family.__name__, (family,), {"forward": forward, "__module__": family.__module__})


def apply_expert_parallel(model: CausalLM, size: int) -> None:
    """Leaves `model`, on the meta device, as many experts as each of `size` ranks has that share those of a block.
    Raises RecipeError where the model cannot be split so."""
    if size == 1:
        return
    config, group = model.config, EPGroup(size)
    setting = f"parallel.ep_size = {size}: family {config.model_type!r}"
    names = {module: name for name, module in model.named_modules()}
    stacks = [module for block in model.blocks for module in block.modules() if getattr(module, STACKED, None)]
    if not stacks:
        raise RecipeError(f"{setting} has no stacked experts; set parallel.ep_size=1")
    before = takewhile(lambda named: not named[0].startswith(f"{names[stacks[0]]}."), model.named_parameters())
    if not any(parameter.requires_grad for _, parameter in before):
        raise RecipeError(
            f"parallel.ep_size = {size}: nothing before the first experts is trained, so no gradient goes back through "
            "their exchange; put adapters on attention too (lora.target_modules), or set parallel.ep_size=1"
        )
    module: Any
    for module in stacks:
        parameters = dict(module.named_parameters())
        if not has_interface(module) or any(
            "." in name or len(parameter) % module.num_experts for name, parameter in parameters.items()
        ):
            raise RecipeError(
                f"{setting}: {type(module).__name__} does more than transformers' experts interface has; set "
                "parallel.ep_size=1"
            )
        if module.num_experts % size:
            fits = ", ".join(str(n) for n in range(1, module.num_experts + 1) if module.num_experts % n == 0)
            raise RecipeError(
                f"parallel.ep_size = {size}: does not divide the {module.num_experts} experts of a block; it may be "
                f"{fits}"
            )
        for name, parameter in parameters.items():
            local = parameter.detach()[: len(parameter) // size].contiguous()
            slots_of(module)[name] = nn.Parameter(local, parameter.requires_grad)
        family: Any = type(module)
        module.__class__, module.ep_group = _dispatching(family), group


def find_experts(model: nn.Module) -> list[Any]:
    """Returns the modules of `model` whose experts ranks along ep share."""
    return [module for module in model.modules() if isinstance(getattr(module, "ep_group", None), EPGroup)]


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters of `find_experts`."""
    return {parameter for module in find_experts(model) for parameter in module.parameters(recurse=False)}


def place_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes DTensors, with their whole shapes, of the experts of `model`, on `mesh`'s axis ep, and sets the process
    group of their EPGroup."""
    along = mesh[EP]
    for module in find_experts(model):
        module.ep_group.process_group = along.get_group()
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = DTensor.from_local(parameter.detach(), along, [Shard(0)], run_check=False)
            slots_of(module)[name] = nn.Parameter(placed, parameter.requires_grad)
