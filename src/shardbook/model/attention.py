"""Attention: which kernel computes it, and how that kernel learns where the documents in a row begin and end.

Invariant: a token attends to itself and to earlier tokens of its own document, whatever the kernel. Two kernels do only
that work, and hold nothing of the size of a row squared: `varlen` (FlashAttention between document boundaries) and
`flex` (the blocks of scores that lie inside documents). `sdpa` takes a dense mask and runs everywhere; `eager` is a
check of it. masks.py makes the mask or the boundaries that each kernel takes.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shardbook.model.masks import make_mask
from shardbook.recipe import RecipeError

DENSE = "a dense mask"
AMPERE = (8, 0)  # the compute capability that both kernels need

# transformers' interface: (module, query [B, heads, L, D], key and value [B, fewer heads, L, D], the result of
# attention_mask, scaling=, ...) -> ([B, L, heads, D], None)
Attention = Callable[..., tuple[Tensor, None]]
PREFIX = "shardbook_"  # of the names under which transformers knows the kernels
# arguments of an attention call that every kernel heeds, or that change nothing: the mask has the window
KNOWN = {"scaling", "dropout", "sliding_window", "is_causal", "position_ids", "use_cache", "output_attentions"}


@dataclass(frozen=True)
class Demands:
    """The demands that a family's attention makes on a kernel, beyond queries, keys, values and a window or a chunk."""

    arguments: tuple[str, ...] = ()  # arguments that change its result: sinks, a cap on scores, a bias, chosen keys
    computes_scores: bool = False  # it asks for no kernel, and adds the mask to its own scores
    needs_dense_mask: bool = False  # only a dense mask says what it hides, or its keys and values have other sizes

    def __str__(self) -> str:
        words = [*self.arguments, *["scores of its own"] * self.computes_scores, *[DENSE] * self.needs_dense_mask]
        return f" and {', '.join(words)}" if words else ""


PLAIN = Demands()


@dataclass(frozen=True)
class KernelContext:
    """The device, dtype, head size and demands that a kernel is chosen for."""

    device: torch.device
    dtype: torch.dtype  # of queries, keys and values
    head_dim: int
    demands: Demands = PLAIN

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} with heads of {self.head_dim}{self.demands} on {self.device.type}"

    @property
    def is_ampere(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= AMPERE


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention. `needs`: each requirement in words, and a test of it. `make`: makes the function
    that transformers' blocks call, where transformers itself has none of this name."""

    name: str
    metadata: str  # the form in which it takes documents, in words
    needs: tuple[tuple[str, Callable[[KernelContext], bool]], ...] = ()
    make: Callable[[], Attention] | None = None

    @property
    def is_dense(self) -> bool:
        """Returns whether it takes a mask of a row's length squared."""
        return self.metadata == DENSE

    def lacks(self, context: KernelContext) -> str:
        """Returns the first of its needs that `context` does not have; empty where it can run."""
        return next((words for words, has in self.needs if not has(context)), "")


def choose_attention(
    asked: str, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, demands: Demands = PLAIN
) -> Kernel:
    """Returns the kernel that `model.attention` names; for `auto` the first of KERNELS that can run with `dtype` and
    the heads of `config` on `device`, and meets the `demands` of its family. Raises RecipeError where the named one
    cannot run, or the GPU has no bf16."""
    context = KernelContext(device, dtype, head_size(config), demands)
    if dtype == torch.bfloat16 and device.type == "cuda" and not context.is_ampere:
        name = torch.cuda.get_device_name(device)
        raise RecipeError(f"precision.params = 'bf16': {name} computes no bf16; set precision.params=fp32")
    able = [kernel.name for kernel in KERNELS.values() if not kernel.lacks(context)]
    if asked == "auto":
        return KERNELS[able[0]]
    if lacking := KERNELS[asked].lacks(context):
        raise RecipeError(
            f"model.attention = {asked!r}: needs {lacking}, and this is {context}; set model.attention to auto, or to "
            f"{' or '.join(able)}"
        )
    return KERNELS[asked]


def kernel_on_gpu(asked: str, demands: Demands = PLAIN) -> Kernel:
    """Returns the kernel of `model.attention` on a plan's GPU: varlen, unless one with a dense mask is named, or the
    family's `demands` take one."""
    if demands.arguments or demands.computes_scores:
        return KERNELS["eager"]
    return KERNELS[asked if asked in ("sdpa", "eager") else "sdpa" if demands.needs_dense_mask else "varlen"]


class Attend:
    """The function that transformers' attention calls: `kernel`, one of our own; None: torch's sdpa, or the family's
    own eager attention.

    A call with an argument that no kernel knows (sinks, a cap on scores, a bias) goes to the family's own eager
    attention, which is exact; sdpa would drop sinks in silence.
    """

    def __init__(self, kernel: Attention | None, is_eager: bool):
        self.kernel, self.is_eager = kernel, is_eager

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **named: Any
    ) -> tuple[Tensor, None]:
        if (chosen := named.pop("indices", None)) is not None:
            attention_mask = causal_mask(query) if attention_mask is None else attention_mask
            attention_mask = only_chosen(added_mask(attention_mask, query), chosen)
        if self.kernel is not None:
            output, _ = self.kernel(module, query, key, value, attention_mask, **named)
        elif self.is_eager or unknown_arguments(named):
            attend, mask = sys.modules[type(module).__module__].eager_attention_forward, attention_mask
            if mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True):  # as transformers' sdpa
                mask = causal_mask(query)
            if mask is not None and not self.is_eager:
                mask = added_mask(mask, query)
            output, _ = attend(module, query, key, value, mask, **named)
        else:
            output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **named)
        return output, None


def use_attention(config: PreTrainedConfig, kernel: Kernel, attend: type[Attend] = Attend) -> None:
    """Has transformers' model of `config` make its masks for `kernel`, and call it through `attend`."""
    # with "sdpa" in its name, transformers would refuse what it does not run by sdpa
    name = f"{PREFIX}{kernel.name.upper()}_{attend.__name__}"
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, partial(make_mask, kernel.name))
    ALL_ATTENTION_FUNCTIONS.register(name, attend(kernel.make() if kernel.make else None, kernel.name == "eager"))
    config._attn_implementation = name


def kernel_of(config: PreTrainedConfig) -> str:
    """Returns the name of the kernel that `use_attention` set."""
    return str(config._attn_implementation).removeprefix(PREFIX).partition("_")[0].lower()


def unknown_arguments(named: dict[str, Any]) -> list[str]:
    """Returns the names of the arguments of an attention call that change its result, and that no kernel here knows."""
    return [name for name, value in named.items() if value is not None and name not in KNOWN]


def only_chosen(mask: Tensor, chosen: Tensor) -> Tensor:
    """Returns a mask to be added to scores that hides the keys that an indexer has not `chosen`, [B, L, n]."""
    others = torch.ones_like(mask[:, 0], dtype=torch.bool).expand(len(chosen), -1, -1).scatter(-1, chosen.long(), False)
    return mask.masked_fill(others[:, None], torch.finfo(mask.dtype).min)


def causal_mask(query: Tensor) -> Tensor:
    """Returns the mask [1, 1, L, L] of plain causal rows, to be added to scores."""
    length = query.shape[2]
    return added_mask(torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril(), query)


def added_mask(mask: Tensor, query: Tensor) -> Tensor:
    """Returns a mask [B, 1, L, L] to be added to scores, which may be of bools."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)


@contextmanager
def cached_attention(config: PreTrainedConfig) -> Iterator[None]:
    """Lets blocks of `config`, inside, compute whole rows, and take a cache: sdpa replaces kernels of our own, which
    support none."""
    name, kernel = config._attn_implementation, KERNELS[kernel_of(config)]
    use_attention(config, KERNELS["sdpa"] if kernel.make else kernel)
    try:
        yield
    finally:
        config._attn_implementation = name


def heads_of(config: PreTrainedConfig) -> tuple[int, int]:
    """Returns the numbers of query heads and of key heads of a layer; (1, 1) where a family has no attention."""
    heads = getattr(config, "num_attention_heads", None) or 1
    return heads, getattr(config, "num_key_value_heads", None) or heads


def head_size(config: PreTrainedConfig) -> int:
    """Returns the size of a head, the largest where layers differ."""
    words = config.to_dict()  # a config whose layers differ raises where it is asked for one size
    sizes = [words.get("head_dim"), *(each.get("head_dim") for each in (words.get("per_layer_config") or {}).values())]
    return max((size for size in sizes if size), default=0) or config.hidden_size // heads_of(config)[0]


def make_varlen(kernel: Any = None) -> Attention:
    """Returns attention by `kernel`, with the signature of torch's varlen_attn (the default); it takes the boundaries
    and the number of tokens in the longest document."""
    if kernel is None:  # imported here only: the import takes seconds, which a CPU would spend for nothing
        kernel = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    grouped = "enable_gqa" in signature(kernel).parameters  # not in torch 2.11

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, metadata: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        rows, heads, length, _dim = query.shape
        cu_seqlens, max_seqlen, *window = metadata
        shared = heads // key.shape[1]
        if shared > 1 and not grouped:
            key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        more = {"enable_gqa": True} if shared > 1 and grouped else {}
        flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
        # the kernel launches as many blocks for each document as for the longest one, and most of them do nothing
        limits = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        seen = (window[0] - 1 if window else -1, 0)  # earlier tokens, and later ones: causal, each in its own document
        out = kernel(*flat, *limits, scale=scaling, window_size=seen, **more)
        return out.unflatten(0, (rows, length)), None

    return attend


def make_flex() -> Attention:
    """Returns attention by torch's flex_attention, compiled: uncompiled it makes all scores. It takes a BlockMask."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        shares = query.shape[1] != key.shape[1]
        # a stance of the caller's, as the ledger's, is of the blocks around this
        with nullcontext() if torch.compiler.is_compiling() else torch.compiler.set_stance("default"):
            out = compiled(query, key, value, block_mask=mask, scale=scaling, enable_gqa=shares)
        return out.transpose(1, 2), None

    return attend


def _has(module: str) -> Callable[[KernelContext], bool]:
    return lambda _: importlib.util.find_spec(module) is not None


_AMPERE = ("a CUDA device of compute capability 8.0 or later", lambda context: context.is_ampere)
_BF16 = ("precision.params=bf16", lambda context: context.dtype == torch.bfloat16)
_HEADS_OF_8 = ("heads of a multiple of 8, at most 256", lambda at: at.head_dim % 8 == 0 and at.head_dim <= 256)
_HEADS_OF_16 = ("heads of 16 or more", lambda at: at.head_dim >= 16)
_VARLEN = ("a torch that has torch.nn.attention.varlen", _has("torch.nn.attention.varlen"))
_TRITON = ("the package triton", _has("triton"))
_MASKED = ("an attention of queries, keys, values, windows and chunks alone", lambda at: at.demands == PLAIN)
_CALLED = (
    "an attention of queries, keys, values and a mask alone",
    lambda at: not at.demands.arguments and not at.demands.computes_scores,
)
# In the order in which `auto` tries them. Source of head sizes: torch's flash_api.cpp, and _inductor/kernel/flex.
_ALL = (
    Kernel("varlen", "document boundaries", (_AMPERE, _BF16, _HEADS_OF_8, _VARLEN, _MASKED), make_varlen),
    Kernel("flex", "blocks inside documents", (_AMPERE, _HEADS_OF_16, _TRITON, _MASKED), make_flex),
    Kernel("sdpa", DENSE, (_CALLED,)),
    Kernel("eager", DENSE),
)
KERNELS = {kernel.name: kernel for kernel in _ALL}
