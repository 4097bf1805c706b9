"""Routers add biases to scores for the choice of experts alone; each step moves these towards balance.

Loss-free balancing (Wang et al., arXiv 2408.15664, section 2; DeepSeek-V3, arXiv 2412.19437, section 2.1.2): after an
optimizer step a bias rises by the rate where fewer tokens chose its expert than the mean of its block, and falls by it
where more did. Invariant: the counts are whole numbers, of all ranks and micro-batches of the step (expert_load.py), so
every rank moves its copy to the same bits, in every layout. No family is named, and nothing is read by the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardbook.model.causal_lm import CausalLM
from shardbook.model.file_buffers import stored_buffers
from shardbook.parallel.expert_load import experts_in
from shardbook.parallel.layout import Layout
from shardbook.recipe import RecipeError

ITEMSIZE = 4  # of a bias: fp32


@dataclass(eq=False)
class RouterBiases:
    """The biases of one rank's routers. A checkpoint holds them where they `are_state`: the run moves them, or goes on
    from a checkpoint that holds some; else they are those of the weights files."""

    rate: float
    are_state: bool
    # by the number of their block among those with counted experts: the module that has a bias, and its name there. Not
    # the tensor: a model gets its memory later
    places: dict[int, tuple[nn.Module, str]]

    def move(self, counts: Mapping[int, Tensor]) -> None:
        """Moves each bias by `counts` of its block, int64 [experts]: the tokens that chose each in the whole step."""
        for number, (module, name) in self.places.items():
            chosen, bias = counts[number], getattr(module, name)
            # whole numbers: a mean would be rounded, and an expert that has it would move
            bias.add_((chosen.sum() - chosen * len(chosen)).sign(), alpha=self.rate)


def balance_routers(sharded: Any) -> None:
    """Ends a step's choices of experts, after the optimizer's step: sums them over all ranks, if they are counted, and
    moves the biases of routers, if the recipe asks for that. Collective of all ranks."""
    load, biases = sharded.expert_load, sharded.router_biases
    if load:
        counts = load.sum().split(load.experts)
        if biases and biases.rate:
            biases.move(dict(enumerate(counts)))


def find_biases(model: CausalLM) -> dict[str, int]:
    """Returns the names of the biases in `model`, each with the number of its block. A bias is the one floating buffer
    that files hold, with one number an expert, in the module that has the block's experts."""
    names, biases = {buffer: name for name, buffer in stored_buffers(model).items()}, dict[str, int]()
    for number, beside, experts in _beside_experts(model):
        stored = [buffer for buffer in beside.buffers() if buffer in names and buffer.is_floating_point()]
        fitting = [names[buffer] for buffer in stored if buffer.shape == (experts,)]
        biases |= dict.fromkeys(fitting, number) if len(fitting) == 1 else {}
    return biases


def _beside_experts(model: CausalLM) -> list[tuple[int, nn.Module, int]]:
    """Returns, of each block that is here whose choices are counted, its number, the module that has its experts and
    router, and how many experts there are."""
    result = []
    for number, block in enumerate(model.all_blocks):
        if block is not None and (experts := experts_in(block)) is not None:
            path = next(name for name, module in block.named_modules() if module is experts)
            result.append((number, block.get_submodule(path.rpartition(".")[0]), experts.num_experts))
    return result


def check_biases(model: CausalLM, config: PreTrainedConfig, rate: float) -> None:
    """Raises RecipeError where `model`, which is whole, has no biases that steps can move by this `rate`."""
    if not rate:
        return
    what, biases = f"train.router_bias_update_rate = {rate}: family {config.model_type!r}", find_biases(model)
    frozen = [
        name
        for _, beside, experts in _beside_experts(model)
        for name, parameter in beside.named_parameters()
        if parameter.numel() == experts and not parameter.requires_grad
    ]
    if frozen and not biases:
        raise RecipeError(
            f"{what} holds the biases of its routers as parameters ({frozen[0]}), which a stage shards; set it to 0"
        )
    if not biases:
        raise RecipeError(
            f"{what} has no router whose choices are counted and that adds a bias to them, one number an expert; set "
            "it to 0"
        )
    if (dtype := model.get_buffer(next(iter(biases))).dtype) != torch.float32:
        raise RecipeError(
            f"{what} has the biases of its routers in the dtype of weights on the device, which is {dtype} here and "
            "rounds small steps away; set precision.master=fp32 and offload.optimizer=none, or set it to 0"
        )


def build_router_biases(model: Any, layout: Layout) -> RouterBiases | None:
    """Returns the biases of `model`, in which this rank's blocks are; None where it has none. A library's model has
    none."""
    if not layout.biases:
        return None
    counted = [number for number, experts in enumerate(layout.counted) if experts]
    places = {}
    for name, number in find_biases(model).items():
        stem, _, last = name.rpartition(".")
        places[counted.index(number)] = model.get_submodule(stem), last
    return RouterBiases(layout.bias_update_rate, layout.bias_update_rate > 0, places)


def saved_biases(sharded: Any) -> dict[str, list[int]]:
    """Returns the shapes of the biases of the whole model that a checkpoint of `sharded` holds, by name."""
    return sharded.layout.biases if sharded.router_biases and sharded.router_biases.are_state else {}
