"""Keys that recipes had once: each with the default that it had, and what to set instead.

Invariant: a recipe or a command line that names one is refused in one line. A run's resolved.toml has every key of its
day: one that it holds at the default is left out, since it changed nothing; and where only the run's weights are read,
one at any other value, with a line that says so.
"""

from typing import Any

GONE: dict[str, tuple[Any, str]] = {  # section.key -> its default, what to set instead
    "model.bnb_4bit_quant_type": ("nf4", "the format is nf4; leave it out"),
    "parallel.wrap": (
        "block",
        "blocks are the units; leave it out. parallel.reshard_min_params=N keeps smaller ones gathered",
    ),
    "parallel.reshard_root": (
        True,
        "embedding, norm and head are freed after each backward; leave it out, or set parallel.stage=zero2, "
        "which frees nothing within a step",
    ),
    "parallel.quantize_error_feedback": (
        False,
        "rounding errors of qgZ are not kept; leave it out. parallel.quantize_gradients=[8, 8] rounds less",
    ),
    "parallel.quantize_block": (128, "128 elements share a scale; leave it out"),
    "parallel.quantize_min_params": (0, "units of any size are quantised; leave it out"),
    "precision.output": ("fp32", "the loss of each token is fp32; leave it out"),
    "offload.threads": (0, "the host's AdamW takes the rank's share of the cores; leave it out"),
    "offload.bucket_mb": (48, "AdamW takes 48 MiB of state at once; leave it out"),
    "offload.ring": (4, "four buckets are in flight between disk and AdamW; leave it out"),
    "optim.alpha": (5.0, "only AdEMAMix had it, which went; leave it out"),
    "optim.alpha_warmup_steps": (0, "only AdEMAMix had it, which went; leave it out"),
    "train.max_bad_steps": (
        0,
        "the first step whose gradient norm is not finite ends the run; leave it out, and lower "
        "optim.learning_rate or optim.max_grad_norm, or start from the newest checkpoint",
    ),
}


def explain_gone(name: str) -> str | None:
    """Returns what to set instead of the key `name`, section.key, as an end of a line; None where it never was one."""
    return f"is not a key any more: {GONE[name][1]}" if name in GONE else None


def find_gone(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the gone keys that a recipe's tables hold, section.key, with their values."""
    tables = {section: table for section, table in given.items() if isinstance(table, dict)}
    named = ((f"{section}.{key}", value) for section, table in tables.items() for key, value in table.items())
    return {name: value for name, value in named if name in GONE}


def drop_gone(given: dict[str, Any], every: bool) -> None:
    """Removes the gone keys that a recipe's tables hold at the default, or, of `every` value, all of them."""
    for name, value in find_gone(given).items():
        section, _, key = name.partition(".")
        if every or value == GONE[name][0]:
            del given[section][key]


def describe_gone(given: dict[str, Any]) -> str:
    """Returns words on the gone keys that a recipe's tables hold at another value than the default; else none."""
    values = [f"{name} = {value!r}" for name, value in find_gone(given).items() if value != GONE[name][0]]
    return f"not heeded, as no key any more: {', '.join(values)}" if values else ""
