"""Self-check: finds the properties of a config's family by running a small model of it, on the host, in a second.

Invariant: it compares our forward and backward of packed rows with transformers' own forward of each document alone, so
it names no family; files, eager attention and cached steps are compared in comparisons.py. It needs no weights, no GPU
and no process group.
"""

import json
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from shardbook.model import attention
from shardbook.model.batch import Batch
from shardbook.model.causal_lm import CausalLM, materialize
from shardbook.model.comparisons import (
    STEPS,
    TOLERANCE,
    compare_eager,
    compare_files,
    decode_by_steps,
    describe_error,
    differences,
    gradients_of,
    heeds_positions,
    raise_if_ours,
    run_in_stages,
)
from shardbook.model.families import blame
from shardbook.model.hf_model import Unfit
from shardbook.model.masks import make_mask, read_rule
from shardbook.model.shrink import VOCABULARY, shrink_config
from shardbook.recipe import RecipeError

MOST = 4_000_000  # parameters of a small model: a text tower has some 100,000
LENGTH = 16  # of a row
DOCUMENTS = ((5, 2, 9), (11, 3))  # lengths in each row; windows and chunks of the small model have 4


@dataclass(frozen=True)
class Verdict:
    """The answer of the self-check for a config's family."""

    refused: str = ""  # the reason why it cannot be trained
    no_packing_reason: str = ""  # the reason why documents must not share rows
    demands: attention.Demands = attention.PLAIN
    can_split_heads: bool = True  # ranks can share its heads and rows: each layer has as many, and positions are heeded
    no_parts_reason: str = ""  # the reason why its layers must lie on one rank
    no_generation_reason: str = ""  # the reason why it continues no prompts
    without_gradient: tuple[str, ...] = ()  # parameters that get no gradient, `*` for any number in a name

    @property
    def kind(self) -> str:
        return "refused" if self.refused else "rows" if self.no_packing_reason else "packed"


def check_family(config: PreTrainedConfig) -> Verdict:
    """Returns the verdict on the family of `config`."""
    words = _words(config)
    if words not in _KNOWN:
        _KNOWN[words] = _check(config)
    return _KNOWN[words]


_KNOWN: dict[str, Verdict] = {}  # by all that a config says, but for its folder


def _words(config: PreTrainedConfig) -> str:
    settings: dict[str, Any] = config.to_dict() | {"_name_or_path": ""}
    for each in (settings, *(inner for inner in settings.values() if isinstance(inner, dict))):
        each.pop("dtype", None)  # which transformers notes when it builds a model; the check runs in fp32
    return json.dumps(settings, sort_keys=True, default=str)


def _check(config: PreTrainedConfig) -> Verdict:
    shown, threads = logging.get_verbosity(), torch.get_num_threads()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)  # of several, small products wait for each other on a busy machine
        logging.set_verbosity_error()  # what transformers remarks of small widths is not of the user's config
        torch.manual_seed(0)
        try:
            try:
                small = shrink_config(config)
            except Exception as error:
                raise Unfit(f"its config cannot be made small ({describe_error(error)})") from None
            return compare_with_transformers(small)
        except Unfit as reason:
            return Verdict(refused=_blame(config) + str(reason))
        finally:
            logging.set_verbosity(shown)
            torch.set_num_threads(threads)


def _blame(config: PreTrainedConfig) -> str:
    """Returns the key of `config` with which transformers' own small model does not run, in the words of `blame`."""

    def build(words: dict[str, Any]) -> PreTrainedConfig:
        run_theirs(shrink_config(built := type(config).from_dict(dict(words))), [torch.arange(3, 3 + LENGTH)])
        return built

    with suppress(Exception):  # of whatever kind, as in compare_with_transformers
        build(config.to_diff_dict())
        return ""
    return blame(config.to_diff_dict(), build)


def remember(config: PreTrainedConfig, verdict: Verdict) -> None:
    """Stores the verdict of another process on the family of `config`, so that this one need not run the check."""
    _KNOWN[_words(config)] = verdict


def freeze(model: nn.Module, kinds: Sequence[str]) -> None:
    """Freezes the parameters of these `kinds` of names. Plain training leaves them as they are, for they have no
    gradient; under a stage they would have zeros, and an optimizer would decay them."""
    for name, parameter in model.named_parameters():
        if kind_of(name) in kinds:
            parameter.requires_grad_(False)


def compare_with_transformers(small: PreTrainedConfig) -> Verdict:
    """Returns the verdict on a small config of a family. Raises Unfit."""
    rows = [[torch.randint(3, VOCABULARY, (length,)) for length in row] for row in DOCUMENTS]
    documents = [document for row in rows for document in row]
    try:
        theirs, losses = run_theirs(small, documents)
        wanted = gradients_of(theirs, torch.stack(losses).sum())
        with torch.no_grad():
            longest = max(documents, key=len)
            both = [theirs(input_ids=each[None], use_cache=False).logits[0] for each in (longest, longest[:-2])]
        if (both[0][:-2] - both[1]).abs().max() > 1e-3 * both[1].abs().max():
            raise Unfit("its tokens see later ones, so it is no causal language model")
    except Exception as error:
        raise_if_ours(error)
        raise Unfit(f"transformers runs no small model of it ({describe_error(error)})") from None
    has_kernels = "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(theirs).__module__])
    config = type(small).from_dict(small.to_dict())
    attention.use_attention(config, attention.KERNELS["sdpa" if has_kernels else "eager"])
    try:
        ours = CausalLM(config, torch.float32)
        materialize(ours, torch.device("cpu"))
        ours.eval().load_state_dict(theirs.state_dict())
    except (KeyError, RuntimeError) as error:
        raise Unfit(f"its parts have other names ({describe_error(error)})") from None
    listening = Listening(None, not has_kernels)
    ALL_ATTENTION_FUNCTIONS.register(config._attn_implementation, listening)
    ALL_MASK_ATTENTION_FUNCTIONS.register(config._attn_implementation, listening.make_mask)
    order = list[nn.Module]()
    for block in ours.blocks:
        block.register_forward_pre_hook(lambda block, inputs: order.append(block))
    reasons, alone = list[str](), batch_of([[each] for each in documents], packed=False)
    for batch in (batch_of(rows, packed=True), alone):
        order.clear()
        try:
            computed = gradients_of(ours, ours(batch, summed=True))
        except Exception as error:
            raise_if_ours(error)
            reasons.append(describe_error(error))
            continue
        if order != ours.blocks:
            raise Unfit("its blocks do not run once each, in their order")
        loss, gradient = differences(computed, wanted)
        if max(loss, gradient) < TOLERANCE:
            reasons.append("")
            break
        reasons.append(f"loss off by {loss:.0e}, gradients by {gradient:.0e}")
    if reasons[-1]:
        raise Unfit(f"a document alone is not what transformers computes ({reasons[-1]})")
    compare_files(ours, theirs)
    apart = f"documents of a packed row see each other ({reasons[0]})" if reasons[0] else ""
    demands = attention.Demands(tuple(sorted(listening.arguments)), not has_kernels, listening.is_dense)
    if demands.arguments and (reason := compare_eager(ours, alone, wanted)):
        raise Unfit(f"a document alone is not what transformers computes by eager attention ({reason})")
    text = config.get_text_config()
    splits = demands == attention.PLAIN and not apart and listening.heads == {attention.heads_of(text)}
    splits = splits and heeds_positions(ours, alone)
    together = run_in_stages(ours, alone, wanted)
    uncached = decode_by_steps(ours, theirs, [each for each in documents if len(each) > STEPS])
    return Verdict("", apart, demands, splits, together, uncached, unreached(wanted[1]))


def run_theirs(small: PreTrainedConfig, documents: list[Tensor]) -> tuple[PreTrainedModel, list[Tensor]]:
    """Returns transformers' own model of a small config, and its loss of each document. Raises Unfit."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(small).parameters())
    if size > MOST:
        raise Unfit(f"its small model has {size:,} parameters, for it has parts beside the text")
    theirs = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        theirs.eval()
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    before = [parameter.detach().clone() for parameter in theirs.parameters()]
    logits = (theirs(input_ids=each[None], use_cache=False).logits[0, :-1].float() for each in documents)
    losses = [
        F.cross_entropy(row_logits, each[1:], reduction="sum")
        for row_logits, each in zip(logits, documents, strict=True)
    ]
    if not torch.stack(losses).isfinite().all():
        raise Unfit("the loss of its small model is not finite")
    if not all(map(torch.equal, before, theirs.parameters())):  # a checkpoint would hold the change
        raise Unfit("its forward in evaluation changes its weights")
    return theirs, losses


class Listening(attention.Attend):
    """An Attend that records the arguments and masks of its calls."""

    def __init__(self, kernel: Any, is_eager: bool):
        super().__init__(kernel, is_eager)
        self.arguments, self.heads, self.masks = set[str](), set[tuple[int, int]](), list[Any]()
        self.is_dense = False

    def make_mask(self, **named: Any) -> Any:
        """Makes a mask as attention.py does, and notes it."""
        try:
            read_rule(named["mask_function"])
        except RecipeError:
            self.is_dense = True
        self.masks.append(make_mask("eager" if self.is_eager else "sdpa", **named))
        return self.masks[-1]

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **named: Any
    ) -> tuple[Tensor, None]:
        self.arguments.update(attention.unknown_arguments(named))
        self.heads.add((query.shape[1], key.shape[1]))
        is_handed_on = any(attention_mask is mask for mask in self.masks)
        self.is_dense |= not is_handed_on or not query.shape[-1] == key.shape[-1] == value.shape[-1]
        return super().__call__(module, query, key, value, attention_mask, **named)


def kind_of(name: str) -> str:
    """Returns a parameter's name with `*` for each number in it."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def unreached(gradients: dict[str, Tensor | None]) -> tuple[str, ...]:
    """Returns the names of parameters without a gradient, `*` for any number in them: where one of that name has a
    gradient, all count as reached."""
    reached = {kind_of(name) for name, gradient in gradients.items() if gradient is not None}
    return tuple(kind for kind in dict.fromkeys(map(kind_of, gradients)) if kind not in reached)


def batch_of(rows: Sequence[Sequence[Tensor]], packed: bool) -> Batch:
    """Returns a micro-batch of documents in rows of LENGTH; padding counts as a document."""

    def padded(part: Callable[[Tensor], Tensor]) -> Tensor:
        filled = [torch.cat([part(document) for document in row]) for row in rows]
        return torch.stack([F.pad(row, (0, LENGTH - len(row))) for row in filled])

    ids, places = padded(lambda document: document), padded(lambda document: torch.arange(len(document)))
    targets = padded(lambda document: F.pad(document[1:], (0, 1)))
    lengths = [[*map(len, row), LENGTH - sum(map(len, row))] for row in rows]
    ends = accumulate(length for row in lengths for length in row if length)
    cu_seqlens = torch.tensor([0, *ends], dtype=torch.int32)
    positions = targets.flatten().nonzero().flatten()
    return Batch(ids, places, cu_seqlens, positions, targets.flatten()[positions], packed, LENGTH)
