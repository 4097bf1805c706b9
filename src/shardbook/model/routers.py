"""Routers: the modules of a mixture of experts that choose experts for each token, as a family names them.

Invariant: no family is listed. transformers says of each base model which module's output are `router_logits`, and
records them in a forward that is asked for them.
"""

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from shardbook.model.marks import STACKED
from shardbook.recipe import RecipeError

RECORDED = "_can_record_outputs"  # transformers' table of what a base model's forward can be asked to return beside
LOGITS = "router_logits"  # and its name of these
# beside the tokens of each expert of each layer: tokens that are no padding, and trained tokens
BALANCE_NUMBERS = 2


def find_routers(base: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of transformers' `base` model whose logits it records, by name, in order."""
    recorded = (getattr(base, RECORDED, None) or {}).get(LOGITS, ())
    recorders = recorded if isinstance(recorded, list) else [recorded] * bool(recorded)
    kinds = [(each.target_class, each.layer_name or "") for each in recorders]
    return {
        name: module
        for name, module in base.named_modules()
        if any(isinstance(module, kind) and name.endswith(ending) for kind, ending in kinds)
    }


def count_choices(base: nn.Module, config: PreTrainedConfig) -> tuple[int, ...]:
    """Returns the number of experts that each router of `base` chooses from, in order."""
    matrices = ([p for p in router.parameters() if p.ndim == 2] for router in find_routers(base).values())
    width: Any = config.hidden_size
    rows = (next((len(p) for p in each if p.shape[1] == width), 0) for each in matrices)
    return tuple(count for count in rows if count)


def freeze_routers(base: nn.Module, config: PreTrainedConfig) -> None:
    """Freezes the parameters of the routers of `base`. Raises RecipeError where its family has none, or where a router
    is no module by itself."""
    routers, family, width = find_routers(base), config.model_type, config.hidden_size
    if not routers:
        raise RecipeError(f"train.freeze_router = true: family {family!r} has no router; leave it out")
    for name, router in routers.items():
        matrices = [p for p in router.parameters() if p.ndim > 1 and width in p.shape]
        if len(matrices) > 1 or any(getattr(module, STACKED, None) for module in router.modules()):
            raise RecipeError(
                f"train.freeze_router = true: family {family!r} has router and experts in one module ({name}); leave "
                "it out"
            )
        router.requires_grad_(False)


def check_routers(base: nn.Module, config: PreTrainedConfig, coefficient: float) -> None:
    """Raises RecipeError where an auxiliary loss with this `coefficient` has no router to balance."""
    has_loss = hasattr(sys.modules[type(base).__module__], "load_balancing_loss_func")
    if coefficient and not (has_loss and hasattr(config, "router_aux_loss_coef") and count_choices(base, config)):
        raise RecipeError(
            f"train.router_aux_loss_coef = {coefficient}: transformers has no auxiliary loss of the family "
            f"{config.model_type!r}; set it to 0"
        )
