"""Measures blocks: runs each kind of block of a model once, forward and backward, on fake tensors.

Invariant: nothing here knows a block's insides. A model of few layers, one of each kind where that can be, is built by
the constructor that a run uses, with the run's kernel, adapters, checkpointing and ranks along tp, cp and ep, and is
called as training calls it. Bytes are those of storages from allocation to release; what they grow by with tokens comes
from micro-batches of two lengths (three, where a dense mask grows with their square).
"""

import contextlib
import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardbook.comm.torch_private import fake_group, fake_tensors
from shardbook.memory.activation import apply_checkpointing
from shardbook.model.attention import Kernel, kernel_of, kernel_on_gpu
from shardbook.model.causal_lm import build_model, materialize
from shardbook.model.comparisons import raise_if_ours
from shardbook.model.selfcheck import check_family, remember
from shardbook.model.shrink import keep_layers
from shardbook.parallel.context import CPGroup
from shardbook.parallel.experts import EPGroup
from shardbook.parallel.placement import build_local
from shardbook.parallel.tensor_linears import TPGroup
from shardbook.plan.memory_trace import MemoryTrace, full_rows, meta_tensors
from shardbook.recipe import Activation, Distill, Offload, Parallel, Precision, Recipe, RecipeError, Train, first_line

LENGTH = 128  # tokens of the shortest row, for each rank along tp and cp


class Unmeasured(RecipeError):
    """A block cannot run without memory, so neither the peak nor the time of a step can be planned."""


@dataclass(frozen=True)
class Growth:
    """A size that grows with a micro-batch: with this rank's tokens, and with the pairs of tokens of whole rows."""

    fixed: float = 0.0
    token: float = 0.0
    pair: float = 0.0

    def of(self, tokens: int, pairs: int) -> float:
        return self.fixed + self.token * tokens + self.pair * pairs


@dataclass(frozen=True)
class Block:
    """The bytes and seconds that one kind of block takes, beside its parameters. Its input and its output have the size
    `stream`."""

    kept: Growth  # from forward to backward, beside what all blocks share
    keeps_input: bool
    stream: Growth
    forward: tuple[Growth, ...]  # moments inside its forward, its input there; one of them is the fullest
    backward: tuple[Growth, ...]  # moments inside its backward, what it keeps there, and its parameters' gradients
    alone: tuple[Growth, ...]  # the same where each gradient leaves as soon as it is there
    products: tuple[Growth, Growth]  # FLOPs of matrix products in forward, and in backward, which may make some again
    attention: float  # numbers of a token's queries that the kernel takes


@dataclass(frozen=True)
class Measured:
    """The blocks of a model, by kind, and what is there beside them."""

    blocks: dict[int, Block]
    before: Growth  # before all blocks, until their backward is over: rotation, masks
    after: Growth  # of the last norm, when the head begins
    norm: Growth  # at the fullest moment of the last norm's backward


@dataclass(frozen=True)
class Kinds:
    """The kinds of a model's blocks, and a config of few layers that has them all."""

    of_blocks: tuple[int, ...]  # of each block the number of the first of its kind
    few: PreTrainedConfig
    layers: tuple[int, ...]  # which blocks of the model those of `few` are


def fullest(moments: Iterable[Growth], tokens: int, pairs: int) -> int:
    return int(max(moment.of(tokens, pairs) for moment in moments))


_measured: dict[Any, Measured] = {}
_kinds: dict[str, Kinds] = {}
KNOWN_BLOCKS: tuple[dict[Any, Any], ...] = _measured, _kinds  # what one process measured, others may add
_texts: dict[int, tuple[PreTrainedConfig, str]] = {}  # with the config, whose id then is no other's


def kinds_of(config: PreTrainedConfig) -> tuple[int, ...]:
    """Returns the kind of each block: the index of the first block with equal attributes, its own index left out."""
    return _look_at(config).of_blocks


def _look_at(config: PreTrainedConfig) -> Kinds:
    """Returns the kinds of blocks. The few layers are the first of each kind; where the constructor then makes others,
    since a layer's number says what it is, they are all up to the first of the last kind, or else all."""
    if (key := text_of(config)) not in _kinds:
        facts = facts_of(config)
        other = {name for number, each in enumerate(facts) for name, value in each.items() if value != number}

        def differing(facts: Sequence[Facts]) -> list[Facts]:
            """Leaves out what is a block's own number."""
            return [{name: value for name, value in each.items() if name in other} for each in facts]

        alike = differing(facts)
        of_blocks = tuple(map(alike.index, alike))
        firsts = tuple(sorted(set(of_blocks)))
        for layers in (firsts, tuple(range(firsts[-1] + 1)), tuple(range(len(facts)))):
            few = keep_layers(config, layers)
            few.tie_word_embeddings = False  # the gradient of a tied head waits for the embedding's, and is no block's
            with contextlib.suppress(ValueError):  # a family may take no such few: Gemma 3n's share keys and values
                if differing(facts_of(few)) == [alike[number] for number in layers]:
                    break
        remember(few, check_family(config))
        _kinds[key] = Kinds(of_blocks, few, layers)
    return _kinds[key]


def text_of(config: PreTrainedConfig) -> str:
    """Returns `config` as text. Plans ask thousands of times, and it takes a millisecond."""
    if id(config) not in _texts:
        _texts[id(config)] = config, config.to_json_string()
    return _texts[id(config)][1]


Facts = dict[tuple[str, str], Any]


def facts_of(config: PreTrainedConfig) -> list[Facts]:
    """Returns the plain attributes of the modules in each block of a model of `config`: their classes, parameters,
    numbers, switches and words."""

    def attributes(block: nn.Module) -> Facts:
        facts: Facts = {}
        for name, module in block.named_modules():
            facts[name, "class"] = type(module)
            for key, p in module.named_parameters(recurse=False):
                facts[name, key] = p.shape, p.dtype, p.requires_grad
            plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
            facts |= {(name, key): value for key, value in plain.items()}
        return facts

    return list(map(attributes, build_model(copy.deepcopy(config), "fp32").blocks))


def measure_blocks(
    config: PreTrainedConfig,
    recipe: Recipe,
    checkpointing: str,
    dtype: str,
    expert_load: float = 1.0,
    **block_sizes: int,
) -> Measured:
    """Returns what a block of each kind of `config` takes under `recipe`'s adapters, with `checkpointing` none, full or
    selective, computed in `dtype`, on one of the ranks that share it or its rows (Layout.block_sizes; without any it is
    alone), whose experts receive `expert_load` times the mean of rows. Raises RecipeError where a block cannot run on
    fake tensors."""

    def measured(rows: int, checkpointing: str = "none", **block_sizes: int) -> Measured:
        dtypes: Any = dict.fromkeys(("params", "master", "frozen"), dtype)
        sections: dict[str, Any] = {
            "lora": recipe.lora.model_copy(update={"modules_to_save": [], "adapter": ""}),
            "parallel": Parallel().model_copy(update=block_sizes),
            "precision": Precision(**dtypes),
            "activation": Activation(checkpointing=checkpointing),
            "train": Train(steps=1, loss_chunk_tokens=0, per_device_train_batch_size=rows),
        }
        key: tuple[Any, ...] = (
            text_of(config),
            kernel_of(config),
            base.load_in_4bit,
            base.bnb_4bit_use_double_quant,
            recipe.data.packing,
        )
        key += expert_load, *(section.model_dump_json() for section in sections.values())
        if key not in _measured:
            sections |= {"method": "sft", "offload": Offload(), "distill": Distill()}
            _measured[key] = measure(recipe.model_copy(update=sections), config, expert_load)
        return _measured[key]

    base = recipe.model
    # a tensor of one row may be a view where one of several is a copy: of most models nothing is
    rows = min(2, recipe.train.per_device_train_batch_size)
    rows -= rows == 2 and measured(1) == measured(2)
    return measured(rows, checkpointing, **block_sizes)


def measure(recipe: Recipe, config: PreTrainedConfig, expert_load: float) -> Measured:
    kinds, kernel = _look_at(config), kernel_on_gpu(kernel_of(config), check_family(config).demands)
    rows, shared = recipe.train.per_device_train_batch_size, recipe.parallel.tp_size * recipe.parallel.cp_size
    lengths = [times * LENGTH * shared for times in range(1, 4 if kernel.is_dense else 3)]
    lines = run(recipe, kinds, kernel, lengths, expert_load)
    sizes = [(rows * length // recipe.parallel.cp_size, rows * length**2) for length in lengths]
    fit = partial(solve, sizes)
    blocks = {
        kind: block_of(kinds.layers.index(kind), lines, fit, sizes[0][0]) for kind in sorted(set(kinds.of_blocks))
    }
    around = [(line.before_blocks, line.after_blocks, line.in_norm()) for line in lines]
    return Measured(blocks, *map(fit, zip(*around, strict=True)))


def lend_groups(model: nn.Module, expert_load: float) -> None:
    """Lets the ranks along tp, cp and ep exchange nothing, in groups of the right size that no other process is in. A
    rank along ep receives `expert_load` times as many choices of experts as it sends."""
    for module in model.modules():
        for name in ("tp", "cp", "ep"):
            group = getattr(module, f"{name}_group", None)
            if isinstance(group, TPGroup | CPGroup | EPGroup) and group.process_group is None:
                group.process_group = fake_group(getattr(group, f"{name}_rank", 0), group.size)
            if isinstance(group, EPGroup):
                group.load = expert_load


def run(recipe: Recipe, kinds: Kinds, kernel: Kernel, lengths: Sequence[int], expert_load: float) -> list[MemoryTrace]:
    """Calls a model of few layers forward and backward with micro-batches of full rows of `lengths`, as training does.
    Meta tensors are faster than fake ones, and have the same sizes; but sdpa looks at the device, and some families ask
    for a number. Raises Unmeasured where a block runs on neither."""
    for device, without_memory in ((torch.device("meta"), meta_tensors), (torch.device("cpu"), fake_tensors)):
        model = build_local(recipe, copy.deepcopy(kinds.few), kernel).model
        lend_groups(model, expert_load)
        apply_checkpointing(model.blocks, recipe.activation, recipe.lora.lora_dropout > 0)
        lines = dict[int, MemoryTrace]()
        with without_memory():
            materialize(model, device)
            buffers = list(model.buffers())
            try:
                for length in [*lengths, lengths[0]]:
                    if length in lines and all(map(operator.is_, model.buffers(), buffers)):
                        break  # else the first forward cast buffers, which no other one does: it is called again
                    rows = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": length})})
                    with device:
                        batch = full_rows(rows, recipe.parallel.cp_size)
                    tensors = [value for value in vars(batch).values() if isinstance(value, Tensor)]
                    line = lines[length] = MemoryTrace(model, model.blocks, [*model.buffers(), *tensors], model.head)
                    with line:
                        model(batch, summed=True).sum().backward()
                    for hook in line.hooks:
                        hook.remove()
                    model.zero_grad()
                return list(lines.values())
            except Exception as error:
                raise_if_ours(error)
                why = first_line(error)
    place = min(line.place[1], len(model.blocks) - 1)
    kind = type(model.blocks[place]).__name__
    raise Unmeasured(
        f"model.path = {recipe.model.path!r}: block {kinds.layers[place]}, a {kind}, cannot run without memory "
        f"({why}), so neither the peak nor the time of a step can be planned"
    )


def block_of(
    number: int, lines: Sequence[MemoryTrace], fit: Callable[[Sequence[float]], Growth], shortest: int
) -> Block:
    def inside(phase: str, with_grads: bool = True) -> tuple[Growth, ...]:
        series = [line.inside(phase, number, with_grads) for line in lines]
        if len({len(each) for each in series}) > 1:  # as many operations as there are tokens: fullest ones are alike
            series = [[max(each)] for each in series]
        return tuple(set(map(fit, zip(*series, strict=True))))

    forward, backward = (fit([line.flops.get((what, number), 0) for line in lines]) for what in ("forward", "backward"))
    return Block(
        kept=fit([line.kept(number) for line in lines]),
        keeps_input=lines[0].kept_inputs[number],
        stream=fit([line.streams[number][0] for line in lines]),
        forward=inside("forward"),
        backward=inside("backward"),
        alone=inside("backward", with_grads=False),
        products=(forward, backward),
        attention=lines[0].queries[number] / shortest if number in lines[0].queries else forward.pair / 4,
    )


def solve(sizes: Sequence[tuple[int, int]], values: Sequence[float]) -> Growth:
    """Returns the terms (of two sizes a pair's is 0) of what has `values` at evenly growing `sizes`."""
    (first, of_first), (second, of_second) = sizes[:2]
    pair = 0.0
    if len(sizes) > 2:
        bend = values[2] - 2 * values[1] + values[0]
        pair = bend / (sizes[2][1] - 2 * of_second + of_first)
    token = (values[1] - values[0] - pair * (of_second - of_first)) / (second - first)
    return Growth(values[0] - token * first - pair * of_first, token, pair)
