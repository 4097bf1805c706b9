"""The rules of `expert_parallel`, the section of DeepSpeed's JSON for AutoEP: experts that ranks share.

Sources: DeepSpeed's page of AutoEP, and the fields of AutoEPConfig in 0.19.8. Keys that name layers and weights, or
choose how products and exchanges are done, are in keys.toml.
"""

from typing import Any

from shardbook.translate.rules import (
    EP_SIZE,
    KEYS,
    File,
    Refused,
    Result,
    Rule,
    axis,
    choice,
    ignored,
    off,
    only,
    words,
)

SECTION = "expert_parallel"
ROUTING = words("""top_k score_func route_norm routed_scaling_factor num_expert_groups num_limited_groups
expert_activation""")


def switch_of(value: Any) -> Result:
    if value not in (True, False):
        raise Refused(f"must be true or false, not {value!r}")
    return {}, ""


def routing_of(value: Any) -> Result:
    if value is None or value == "auto":
        return {}, ""
    raise Refused("routers and experts are those of the model's config.json: set it there")


RULES: dict[str, Rule] = {
    f"{SECTION}.{name}": rule
    for name, rule in {
        **dict.fromkeys(ROUTING, routing_of),
        "enabled": switch_of,
        "autoep_size": axis(EP_SIZE),
        "expert_tensor_parallel_size": choice("", {"1": None}, "experts stay whole"),
        "score_apply": only("auto", "post", why="a result is weighted, not a token"),
        "route_scale": only(1, why="routers are those of the model's config.json: set it there"),
        "load_balance_coeff": off("AutoEP refuses it too; train.router_bias_update_rate moves biases of routers"),
    }.items()
}


def rules_of(file: File) -> dict[str, Rule]:
    """Returns the section's rules. A section that is not enabled sets nothing."""
    if file.section(SECTION).get("enabled", False) is not False:
        return RULES
    names = [*RULES, *(key for key in KEYS["deepspeed"]["ignored"].split() if key.startswith(f"{SECTION}."))]
    return dict.fromkeys(names, ignored)
