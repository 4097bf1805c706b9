"""Tensor parallel of anyone's module, by a plan in the words of transformers' `tp_plan`: what `shard_model` applies.

Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3) without sequence parallel: outside of sharded layers each rank
has all tokens and all features. Invariant: a parameter that is not sharded has its
whole gradient on each rank, or, where the plan says replicated_with_grad_allreduce, a part of it: the first are
averaged and the second summed once a step (`sum_replicated_gradients`), so ranks keep the same bits of both.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardbook.arithmetic import ceil_div
from shardbook.comm.collectives import SumGradients, SumOverRanks
from shardbook.model.blocks import put
from shardbook.parallel.tensor import ShardedEmbedding, make_vocabulary_parallel
from shardbook.parallel.tensor_linears import (
    TPGroup,
    gather_features,
    hold_local_weights,
    make_column_parallel,
    make_row_parallel,
)
from shardbook.recipe import RecipeError


class WrongWidth(RecipeError):
    """A plan that gives a layer another number of features than it takes."""


class AllTokens(TPGroup):
    """A TPGroup whose ranks have all tokens everywhere.

    A "colwise" linear and, after it, a "rowwise" one, on four ranks:

                  before     colwise             between them      rowwise                     after
        rank 0    all of x   a quarter W0        x W0, a quarter   columns 0, a partial sum    all_reduce: all
        rank 1    all of x   of its rows, W1     x W1              columns 1, a partial sum    the same
        rank 2    all of x   W2                  x W2              columns 2, a partial sum    the same
        rank 3    all of x   W3                  x W3              columns 3, a partial sum    the same

    Backward all-reduces the gradient of what a "colwise" linear takes.
    """

    def sum_parts(self, part: Tensor) -> Tensor:
        """Sums what each rank has a part of; backward passes the gradient on."""
        return SumOverRanks.apply(part, self.group)


class GatherFeatures(torch.autograd.Function):
    """The features [..., n] of all ranks, [..., features], on each. Its backward takes the rank's own."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, tp_group: TPGroup, features: int) -> Tensor:
        ctx.share = tp_group.share(features)
        # not a view: fully_shard's hooks would not follow what is done to one in place
        return gather_features(part, tp_group, features).contiguous()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output[..., ctx.share], None, None


class SplitFeatures(torch.autograd.Function):
    """A rank's share of features [..., n] that every rank has. Its backward gathers the gradients of all shares."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, tp_group: TPGroup) -> Tensor:
        ctx.tp_group, ctx.features = tp_group, full.shape[-1]
        return full[..., tp_group.share(ctx.features)].contiguous()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return gather_features(grad_output, ctx.tp_group, ctx.features), None


def on_input(linear: nn.Linear, features: int, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Has `change` take what `linear`, of this `name`, is called with. Its call raises RecipeError where that has not
    so many `features`."""

    def before(linear: nn.Module, inputs: Any, named: Any) -> Any:
        features_in: Tensor = [*inputs, *named.values()][0]
        if (width := features_in.shape[-1]) != features:
            raise WrongWidth(
                f"shard_model: {name} takes {features:,} features by tp_plan and was given {width:,}: what is before "
                "it has a share of the features where it should have all, or all in place of a share"
            )
        return (change(features_in),), {}

    linear.register_forward_pre_hook(before, with_kwargs=True)


def shard_columns(linear: nn.Linear, tp_group: TPGroup, name: str) -> None:
    """Keeps a rank's share of the rows: its output has its share of the features."""
    make_column_parallel(linear, tp_group)
    on_input(linear, linear.in_features, name, lambda full: SumGradients.apply(full, tp_group.group))


def shard_columns_and_gather(linear: nn.Linear, tp_group: TPGroup, name: str) -> None:
    """Keeps a rank's share of the rows: its output is gathered from all ranks."""

    def after(linear: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return GatherFeatures.apply(output, tp_group, features)

    shard_columns(linear, tp_group, name)
    features = linear.out_features
    linear.register_forward_hook(after, prepend=True)  # hooks that are there already take all features


def shard_rows(linear: nn.Linear, tp_group: TPGroup, name: str) -> None:
    """Keeps a rank's share of the columns: it takes a share of the features, and outputs are summed over ranks."""
    make_row_parallel(linear, tp_group)
    on_input(linear, linear.in_features // tp_group.size, name, lambda part: part)


def split_and_shard_rows(linear: nn.Linear, tp_group: TPGroup, name: str) -> None:
    """Keeps a rank's share of the columns: it takes all features, and computes with its share of them."""
    make_row_parallel(linear, tp_group)
    on_input(linear, linear.in_features, name, lambda full: SplitFeatures.apply(full, tp_group))


def shard_vocabulary(embedding: nn.Embedding, tp_group: TPGroup, name: str) -> None:
    """Keeps a rank's share of the rows of an embedding."""
    make_vocabulary_parallel(embedding, ShardedEmbedding, tp_group)


@dataclass(frozen=True)
class Style:
    """A word of a plan: the modules that it is said of, and what it makes of them."""

    kind: type[nn.Module]
    apply: Callable[[Any, TPGroup, str], None] | None = None  # None: the module stays as it is
    dim: int | None = None  # of the weight, that ranks share
    is_even: bool = True  # every rank must have as many features


PARTIAL = "replicated_with_grad_allreduce"
STYLES = {
    "colwise": Style(nn.Linear, shard_columns, 0),
    "rowwise": Style(nn.Linear, shard_rows, 1),
    "colwise_gather_output": Style(nn.Linear, shard_columns_and_gather, 0, is_even=False),
    "rowwise_split_input": Style(nn.Linear, split_and_shard_rows, 1),
    "embedding_rowwise": Style(nn.Embedding, shard_vocabulary, 0, is_even=False),
    PARTIAL: Style(nn.Module),
}
# the names that two of them had in transformers before 5
STYLES |= {"colwise_rep": STYLES["colwise_gather_output"], "rowwise_rep": STYLES["rowwise_split_input"]}
LEFT_OUT = "or pass a tp_plan without it: what a plan leaves out stays whole on each rank"
EXAMPLE = '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}'


def read_tp_plan(model: nn.Module, plan: Mapping[str, str] | None, size: int) -> dict[str, str]:
    """Returns the word for each module of `model`, by name, that `plan` names, or, without one, the model's own
    `tp_plan`; none for one rank. A `*` in a name stands for a number. Raises RecipeError where the plan does not fit
    the model or `size` ranks, or where there is none."""
    setting = f"shard_model: parallel.tp_size = {size}"
    if size == 1 and plan is None:
        return {}
    styles = plan if plan is not None else getattr(model, "tp_plan", None)
    way_out = f"say how each linear is sharded, as in tp_plan={EXAMPLE}"
    if not isinstance(styles, Mapping) or not styles:
        what = "the model states no plan of its own" if plan is None else f"tp_plan = {plan!r}: no words by names"
        raise RecipeError(f"{setting}: {what}; {way_out}")
    words: dict[str, str] = {}
    every = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern, word in styles.items():
        if not isinstance(pattern, str) or not isinstance(word, str):
            raise RecipeError(f"{setting}: tp_plan[{pattern!r}] = {word!r}: a name and a word must be text")
        if word not in STYLES:
            raise RecipeError(
                f"{setting}: tp_plan[{pattern!r}] = {word!r}: must be one of {', '.join(STYLES)}; {LEFT_OUT}"
            )
        matched = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        names = [name for name in every + parameters * (word == PARTIAL) if matched.fullmatch(name)]
        if not names and plan is not None:
            raise RecipeError(f"{setting}: tp_plan[{pattern!r}]: no module of the model has such a name")
        for name in names:
            if words.setdefault(name, word) != word:
                raise RecipeError(f"{setting}: tp_plan says {words[name]!r} and {word!r} of {name}; say one")
            _check_module(setting, model, name, word, size)
    if not words:
        which = f"{next(iter(styles))} and {len(styles) - 1} more"
        raise RecipeError(f"{setting}: the model's own plan names none of its modules ({which}); {way_out}")
    _check_tied(setting, model, words)
    return words if size > 1 else {}


def _check_module(setting: str, model: nn.Module, name: str, word: str, size: int) -> None:
    """Raises RecipeError where a module cannot be sharded over `size` ranks as `word` says."""
    style, statement = STYLES[word], f"{setting}: tp_plan says {word!r} of {name}"
    if style.apply is None:
        return
    module: Any = model.get_submodule(name)
    if type(module).forward is not style.kind.forward or "forward" in vars(module):
        kinds = f"a {type(module).__name__}; it is a word for {style.kind.__name__} alone"
        raise RecipeError(f"{statement}, {kinds}; {LEFT_OUT}")
    if isinstance(module, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise RecipeError(f"{statement}, whose {option} needs all rows on one rank; leave one of the two out")
    if "weight" not in dict(module.named_parameters(recurse=False)):
        raise RecipeError(f"{statement}, whose weight is computed from other parameters; {LEFT_OUT}")
    if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
        raise RecipeError(f"{statement}, whose weight an nn.MultiheadAttention multiplies with itself; {LEFT_OUT}")
    count, what = module.weight.shape[style.dim], ("rows", "columns")[style.dim or 0]
    if style.is_even and count % size:
        raise RecipeError(f"{statement}, whose weight has {count} {what}: tp_size must divide them")
    if ceil_div(count, size) * (size - 1) >= count:
        raise RecipeError(f"{statement}, whose weight has {count} {what}: too few for {size} ranks")
    width = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    if style.is_even and isinstance(width, int) and (share := count // size) % width:
        raise RecipeError(
            f"{statement}: a rank's share of {share} {what} would split a head of {width}; set tp_size lower"
        )


def _check_tied(setting: str, model: nn.Module, words: Mapping[str, str]) -> None:
    """Raises RecipeError where the modules of a tied weight are not sharded alike."""
    dims: dict[nn.Parameter, tuple[str, int | None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        dim = STYLES[words[owner]].dim if owner in words else None
        other, other_dim = dims.setdefault(parameter, (owner, dim))
        if dim != other_dim:
            pair = [f"{each} ({words.get(each, 'not in tp_plan')})" for each in (other, owner)]
            raise RecipeError(f"{setting}: {' and '.join(pair)} have one weight; shard both of them, or none")


def apply_tp_plan(
    model: nn.Module, words: Mapping[str, str], blocks: Sequence[nn.Module], size: int, tp_rank: int
) -> None:
    """Keeps of each module of `model` that `words` (of `read_tp_plan`) name the part of rank `tp_rank` along tp."""
    tp_group, names_of = AllTokens(size, tp_rank), dict[nn.Parameter, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    sharded: list[nn.Module] = []
    for name, word in words.items():
        if not (apply := STYLES[word].apply):
            continue
        if (module := model.get_submodule(name)) not in sharded:  # it may have two names
            sharded.append(module)
            apply(module, tp_group, name)
    for first, *others in names_of.values():  # of a tied weight each module made a part of its own
        for name in others:
            put(model, name, model.get_parameter(first))
    in_blocks = {module: block for block in blocks for module in block.modules()}
    for module in dict.fromkeys(in_blocks.get(module, module) for module in sharded):
        hold_local_weights(module)


def has_whole_gradient(name: str, words: Mapping[str, str]) -> bool:
    """Returns whether the gradient of a parameter that is not sharded is whole on each rank, by its module's word."""
    owners = (owner for owner, word in words.items() if word == PARTIAL)
    return not any(f"{name}.".startswith(f"{owner}.") for owner in owners)
