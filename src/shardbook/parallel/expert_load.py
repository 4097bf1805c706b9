"""Expert load: how many tokens chose each expert of each block, in a step or an evaluation of all ranks.

Invariant: what is counted are the choices that experts are given, by their numbers in the whole block, before ranks
along ep share them; each token once, padding not. No gradient and no random state is touched, and nothing is kept but
one number of each expert. Experts that are not behind transformers' interface are not counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardbook.model.causal_lm import CausalLM
from shardbook.model.experts import has_interface
from shardbook.model.marks import STACKED
from shardbook.parallel.layout import Layout

LOAD = "expert_load_max"  # the metric, behind train/ and eval/


@dataclass(eq=False)
class ExpertLoad:
    """The counter of one rank. `modules`: this rank's modules of experts, which hold it and, as `chosen`, their part of
    its counts: with numbers in place of tensors compiled blocks would not share a graph."""

    experts: list[int]  # of each block of the whole model that has some, in order
    modules: dict[int, Any] = field(default_factory=dict)  # by their number among these
    counts: Tensor | None = None  # int64 [sum(experts)]: the tokens of this rank that chose each
    # int64 [tokens] of the micro-batch that is in its forward: 0 where it is padding; None: nothing is counted
    is_token: Tensor | None = None

    def clear(self) -> None:
        """Begins a step, or an evaluation."""
        self.counts = None  # a new tensor for each: the host reads the last one later

    def open(self, micro: Any) -> None:
        """Has the next forward of a root module counted, which is that of `micro` (data/loader.py's); not where nothing
        says which of its tokens are padding, as of samples."""
        if (is_token := getattr(micro, "is_token", None)) is None:
            return
        self.is_token = is_token.flatten().long()
        if self.counts is None:
            self.counts = self.is_token.new_zeros(sum(self.experts))
            parts = self.counts.split(self.experts)
            for number, module in self.modules.items():
                module.chosen = parts[number]

    def close(self, *_: Any) -> None:
        """Ends it. What runs later counts nothing: a block that is recomputed, a reference of the same rows."""
        self.is_token = None

    def sum(self) -> Tensor:
        """Returns the counts of all ranks since `clear`. Collective of all ranks."""
        assert self.counts is not None, "no forward was counted"
        dist.all_reduce(self.counts)  # looked up at each call: the ledger replaces it while it is open
        return self.counts

    def metrics(self, what: str, counts: Tensor) -> dict[str, float]:
        """Returns the metric of `counts` on the host: the tokens of the fullest expert of a block, as a multiple of
        what each has where all have as many. `what`: train or eval."""
        blocks = [each.tolist() for each in counts.split(self.experts)]
        return {f"{what}/{LOAD}": max(max(each) * len(each) / max(1, sum(each)) for each in blocks)}


def count_chosen(module: Any, inputs: Any) -> None:
    """Counts, before the forward of experts, the tokens that chose each of them."""
    is_token = module.expert_load.is_token
    if is_token is not None:
        ids = inputs[1]
        module.chosen.scatter_add_(0, ids.flatten(), is_token[:, None].expand_as(ids).flatten())


def experts_in(block: nn.Module | None) -> Any:
    """Returns the module of experts in `block`, if it is one whose choices can be counted."""
    stacks = [module for module in block.modules() if getattr(module, STACKED, None)] if block else []
    counted = [module for module in stacks if has_interface(module)]
    return counted[0] if len(counted) == 1 else None


def count_experts(model: CausalLM) -> tuple[int, ...]:
    """Returns how many experts each block of `model` has whose choices are counted."""
    return tuple(getattr(experts_in(block), "num_experts", 0) for block in model.blocks)


def build_expert_load(model: Any, roots: Iterable[nn.Module], layout: Layout) -> ExpertLoad | None:
    """Returns the counter of `model`, in which this rank's blocks are, and whose chunks of layers have these `roots`;
    None where it has no experts that are counted."""
    numbers = [number for number, experts in enumerate(layout.counted) if experts]
    if not numbers:
        return None
    load = ExpertLoad([layout.counted[number] for number in numbers])
    for place, number in enumerate(numbers):
        if (module := experts_in(model.all_blocks[number])) is not None:
            load.modules[place], module.expert_load = module, load
            module.register_forward_pre_hook(count_chosen)
    for root in roots:
        root.register_forward_hook(load.close)
    return load
