"""The optimizers, a row each: how it is built, the state that it keeps, the requirements that it has of the machine.

Invariant: no other module knows an optimizer by its name. Facts that a recipe's rules need before torch is imported are
in recipe/learning.py, which the rows read.
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import nn

from shardbook.optim.adamw_bf16 import AdamWBf16, numbers_in_whole
from shardbook.optim.elementwise import Lion
from shardbook.optim.muon import Muon
from shardbook.recipe import Optim, RecipeError, first_line
from shardbook.recipe.learning import WHOLE_MATRICES

Groups = list[dict[str, Any]]
STEP_BYTES = 4  # the step count of one parameter
BLOCK, LEAST = 256, 4096  # torchao quantises blocks of BLOCK elements, in shards of whole blocks and >= LEAST elements
TORCHAO = "0.18"  # the first that was tried here, on torch 2.13


class NoiseSource(NamedTuple):
    """The seed and the shapes from which stochastic rounding draws its noise, with the step and the shard."""

    seed: int
    full_shapes: Mapping[str, torch.Size] | None  # of the whole model, by name, in order; None: nothing split it


def needs_torchao(device_type: str) -> None:
    """Raises RecipeError where the step of adamw_8bit cannot run on `device_type`."""
    at = "optim.name = 'adamw_8bit':"
    way_out = f"pip install 'torchao>={TORCHAO}' (the extra `8bit`), or set optim.name=adamw_bf16"
    try:
        from torchao.optim import AdamW8bit  # noqa: F401

        version = importlib.metadata.version("torchao")
    except Exception as error:  # any: a torchao that was built for another torch may raise anything
        raise RecipeError(f"{at} torchao cannot be used ({first_line(error)}); {way_out}") from error
    if [int(part) for part in re.findall(r"\d+", version)[:2]] < [int(part) for part in TORCHAO.split(".")]:
        raise RecipeError(f"{at} torchao is {version}; {way_out}")
    if device_type == "cuda" and not importlib.util.find_spec("triton"):
        raise RecipeError(f"{at} compiles its step, and Triton is absent; set optim.name=adamw_bf16")


def adamw_settings(optim: Optim) -> dict[str, Any]:
    return {"lr": optim.learning_rate, "betas": tuple(optim.betas), "eps": optim.eps}


def build_adamw_8bit(model: nn.Module, groups: Groups, optim: Optim, noise: Any) -> torch.optim.Optimizer:
    from torchao import optim as torchao

    return torchao.AdamW8bit(groups, **adamw_settings(optim))


def in_8_bits(numel: int, itemsize: int) -> int:
    """Returns torchao's bytes of a moment: codes, a scale for each block and the table of the codes' values; or, where
    it has fewer than LEAST elements or not whole blocks, the bytes of an unquantised one."""
    return numel + numel // BLOCK * 4 + 256 * 4 if numel >= LEAST and numel % BLOCK == 0 else numel * itemsize


@dataclass(frozen=True)
class Optimizer:
    """One optimizer, as a row of the table."""

    name: str  # its optim.name
    # takes a model, its parameter_groups, the recipe's section, and the source of noise of one that rounds
    build: Callable[[Any, Groups, Optim, NoiseSource], torch.optim.Optimizer]
    moments: int = 2  # of a parameter
    moment_bytes: Callable[[int, int], int] = mul  # of one moment: takes a shard's elements and the bytes of each
    needs: Callable[[str], None] | None = None  # takes a device type; raises RecipeError where the machine lacks it
    of_shards: str = ""  # the class, where its state belongs to one number of shards: its blocks cannot be resharded

    @property
    def whole_matrices(self) -> bool:
        """Returns whether it steps blocks' matrices as Muon does: whole, with a momentum and no step count."""
        return self.name in WHOLE_MATRICES

    def state_bytes(self, numel: int, itemsize: int, is_matrix: bool = False) -> int:
        """Returns the bytes kept for one parameter, of which a rank has `numel` elements of `itemsize` bytes: moments
        and a step count, which muon lacks for a block's matrix (`is_matrix`)."""
        if is_matrix and self.whole_matrices:
            return self.moment_bytes(numel, itemsize)
        return self.moments * self.moment_bytes(numel, itemsize) + STEP_BYTES


ROWS = (
    Optimizer("adamw", lambda _, groups, optim, noise: torch.optim.AdamW(groups, fused=True, **adamw_settings(optim))),
    Optimizer(
        "adamw_bf16",
        lambda model, groups, optim, noise: AdamWBf16(
            groups, adamw_settings(optim), noise.seed, numbers_in_whole(model, noise.full_shapes)
        ),
        moment_bytes=lambda numel, _: numel * 2,
    ),
    Optimizer("adamw_8bit", build_adamw_8bit, moment_bytes=in_8_bits, needs=needs_torchao, of_shards="AdamW8bit"),
    Optimizer("lion", lambda _, groups, optim, noise: Lion(groups, optim), moments=1),
    Optimizer("muon", lambda model, groups, optim, noise: Muon(groups, model.blocks, optim)),
)
OPTIMIZERS = {row.name: row for row in ROWS}
