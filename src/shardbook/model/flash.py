"""FlashAttention 3 and 4: which implementation torch's own switch puts behind its flash attention, and so behind the
kernel `varlen`.

Invariant: recipe, model and machine alone decide it, before the first call, so a run's bits do not depend on what ran
earlier in its process. FA2 is torch's own; the others need a package. Their bits differ: a run's facts and its
checkpoints hold the name.
"""

import importlib.util
from dataclasses import dataclass

import torch
import torch.nn.attention as switch

from shardbook.recipe import first_line

DEFAULT = "FA2"
SINCE = "2.13"  # before it, FA4's backward refuses the window that varlen_attn always gives (2.11)


@dataclass(frozen=True)
class Flash:
    """An implementation that torch knows by its `name`; `module` is what it imports."""

    name: str
    module: str
    largest_head: int


# By the major compute capability that torch lets each run on.
# Sources: torch/nn/attention/_fa3.py and _fa4.py; head sizes of compute capability 10: flash_attn/cute/interface.py.
FLASH = {
    9: Flash("FA3", "flash_attn_interface", 256),
    10: Flash("FA4", "flash_attn.cute.interface", 128),
}


def choose_flash(kernel: str, head_size: int, device: torch.device, deterministic: bool) -> str:
    """Returns the implementation for a run by `kernel` on `device`: FA3 or FA4 where the kernel is varlen and the GPU,
    the largest head and an installed package allow it.

    A deterministic run keeps FA2: torch hands its setting to the others' backward, but builds of FA3 up to the
    summer of 2025 ignore it, and nothing tells such a build from a later one.
    """
    if kernel != "varlen" or device.type != "cuda" or deterministic or not _has_switch() or torch.__version__ < SINCE:
        return DEFAULT
    flash = FLASH.get(torch.cuda.get_device_capability(device)[0])
    fits = flash is not None and head_size <= flash.largest_head and _is_installed(flash.module)
    return flash.name if flash is not None and fits else DEFAULT


def use_flash(name: str) -> str:
    """Has torch compute flash attention by the implementation `name` from now on in this process. Returns why it
    cannot, in words; empty where it does. Then it computes by FA2."""
    if name == current_flash():
        return ""
    if name == DEFAULT:
        switch.restore_flash_attention_impl()
        return ""
    try:
        switch.activate_flash_attention_impl(name)
    except Exception as error:  # what a package for another torch, CUDA or compiler raises where it is imported
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def current_flash() -> str:
    """Returns the name of the implementation by which torch computes flash attention in this process."""
    active = switch.current_flash_attention_impl() if _has_switch() else None
    return active or DEFAULT


def _has_switch() -> bool:
    return hasattr(switch, "activate_flash_attention_impl")


def _is_installed(module: str) -> bool:
    """Returns whether Python finds `module`, for which it imports the packages around it."""
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # the package around it is not there, or cannot be imported for whatever reason
        return False
