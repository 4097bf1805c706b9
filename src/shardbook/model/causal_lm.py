"""The model: a Hugging Face config becomes a meta-device causal LM around transformers' own base model.

The base model's forward runs as it is. Ours are the masks and the kernels that it asks for (attention.py), and the
head, which sees only trained positions and never holds all logits. Invariant: parameter names are transformers' own, so
weights are read and written unrenamed; and a model knows one device, whatever parallel/ makes of it. It does no IO:
weights.py fills the weights in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig

from shardbook.model.attention import KERNELS, Kernel, use_attention
from shardbook.model.batch import Batch
from shardbook.model.blocks import Absent, at, put
from shardbook.model.distillation import TeacherOutput
from shardbook.model.dtypes import DTYPES
from shardbook.model.file_names import FileNames
from shardbook.model.hf_model import find_logit_transform, split_model
from shardbook.model.loss_head import LossHead, ScoreHead
from shardbook.model.masks import documents_of
from shardbook.recipe import Distill

# transformers' names of the argument by which a forward takes a cache, the newest first
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


class CausalLM(nn.Module):
    """A decoder-only transformer that returns the loss of chosen positions or, given a cache, the next token's logits.

    Some of its blocks, its embedding or its head may lie elsewhere (blocks.py): then a forward takes and returns the
    hidden states between blocks.
    """

    scores = False  # its head is a ScoreHead, not a LossHead
    is_adapted = False  # adapters.py, teacher.py: checkpoints hold only trained parameters
    # adapters.weights_identity of the frozen weights, and of a teacher's; set when they are loaded
    identity = teacher_identity = ""

    teacher: "CausalLM | None"  # teacher.py

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, scores: bool = False):
        super().__init__()
        parts = split_model(config, dtype)
        self.config = config
        self.scores = scores
        self.names = replace(parts.names, head="score") if scores else parts.names
        self.is_tied = parts.is_tied and not scores
        self.scale_hidden, logit_transform = find_logit_transform(parts)
        self.vectors = parts.vectors
        self.add_module(self.names.base, parts.base)
        # After the body: a tied weight then has the embedding's name, as in Hugging Face files.
        if scores:
            self.score = ScoreHead(config.hidden_size, 1, bias=False, device="meta", dtype=dtype)
        else:
            head: Any = parts.head
            head.__class__ = LossHead
            head.logit_transform = logit_transform
            self.add_module(self.names.head, head)
        self.register_module("teacher", None)
        buffers = dict(self.named_buffers())
        kept = {name: buffers[name].to("meta") for name in self.state_dict() if name in buffers}
        names = parts.names
        outer = f"{names.base}.{names.embedding}.weight", f"{names.head}.weight"
        self.files = FileNames(parts.hf_model, kept, *outer, self.is_tied, parts.stacked)
        # Asked of the forward: one that lacks the name swallows the cache in its **kwargs, and goes on without a state.
        taken = signature(parts.base.forward).parameters
        self.cache_argument = next((name for name in CACHE_ARGUMENTS if name in taken), "")  # empty: it takes no cache

    def tie(self) -> None:
        """Makes head and embedding one parameter, where the config says so."""
        if self.is_tied and self.has_embedding and self.has_head:
            self.head.weight = self.embedding.weight

    @property
    def base(self) -> Any:
        """Transformers' base model."""
        return getattr(self, self.names.base)

    @property
    def head(self) -> Any:
        """The head; None where it lies elsewhere. (Not by getattr: a family may name it as this property is.)"""
        return dict(self.named_children()).get(self.names.head)

    @property
    def has_head(self) -> bool:
        return self.head is not None

    def drop_head(self) -> None:
        """Takes the head away, with the last norm before it, and a teacher, of whom the loss learns."""
        put(self.base, self.names.norm, nn.Identity())
        setattr(self, self.names.head, None)
        self.teacher = None

    @property
    def has_embedding(self) -> bool:
        return self.embedding is not None and self.embedding is not self.head

    @property
    def frozen_identities(self) -> dict[str, str]:
        """The identities of frozen weights that are in no checkpoint, by what they are to it; those that there are."""
        identities = {"base": self.identity, "teacher": self.teacher_identity}
        return {what: identity for what, identity in identities.items() if identity}

    @property
    def embedding(self) -> Any:
        return at(self.base, self.names.embedding)

    @property
    def norm(self) -> Any:
        """The last norm; None where none is found, an identity where it lies elsewhere."""
        return at(self.base, self.names.norm) if self.names.norm else None

    @property
    def all_blocks(self) -> list[nn.Module | None]:
        """The blocks by their numbers; None for those that lie elsewhere."""
        return [None if isinstance(block, Absent) else block for block in at(self.base, self.names.blocks)]

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for block in self.all_blocks if block is not None]

    @property
    def parts(self) -> list[list[nn.Module]]:
        """The groups of modules to shard and gather together, in forward order; tied weights share one group."""
        blocks, norm = [[block] for block in self.blocks], [self.norm] if self.norm is not None else []
        first = self.teacher.parts if self.teacher else []
        if self.is_tied and self.has_embedding and self.has_head:
            return [*first, [*norm, self.embedding, self.head], *blocks]
        embedding, head = [[self.embedding]] * self.has_embedding, [[*norm, self.head]] * self.has_head
        return [*first, *embedding, *blocks, *head]

    def forward(self, *inputs: Any, cache: Cache | None = None, **named: Any) -> Any:
        """Returns `losses` of a Batch or, with a `cache`, `next_logits`. Both go through forward: only a forward of the
        root module gathers the root's parameters."""
        return self.losses(*inputs, **named) if cache is None else self.next_logits(*inputs, cache=cache)

    def losses(
        self,
        batch: Batch,
        summed: bool = False,
        distill: Distill | None = None,
        hidden: Tensor | None = None,
        with_routers: bool = False,
    ) -> Any:
        """Returns the negative log-likelihood [n], fp32, of the batch's targets at its positions; `summed`: its sum,
        which takes one matrix product of the head less. A token attends to itself and earlier tokens of its own
        document. `distill`: returns the three sums of a LossHead beside a teacher. `with_routers`: returns the sum, and
        the router logits [tokens, experts] of each layer.

        `hidden`: the input of the first block that is here, where others run before it; without a head the output of
        the last one is returned. It is no part of the batch: torch 2.11 looks for gradients in no dataclass.
        """
        if with_routers:
            output = self._run_base(batch, hidden, output_router_logits=True)
            loss = self.head(self._select(output.last_hidden_state, batch), batch.targets, True)
            # copies: fully_shard's hook on what the root returns would run in the midst of a block's backward
            return loss, tuple(logits.clone() for logits in output.router_logits)
        if distill is None:
            head_input = self.hidden_states(batch, hidden)
            return self.head(head_input, batch.targets, summed) if self.has_head else head_input
        assert self.teacher is not None, "nobody teaches"
        with torch.no_grad():
            teacher_hidden = self.teacher.head(self.teacher.hidden_states(batch))
        teacher = TeacherOutput(teacher_hidden, self.teacher.head.logits, distill.temperature, distill.kd_ratio)
        return self.head(self.hidden_states(batch, hidden), batch.targets, loss=teacher)

    def hidden_states(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """Returns the head's input at the batch's positions, [n, hidden]; without a head the output of the last block.
        `hidden`: see `losses`."""
        states = self._run_base(batch, hidden).last_hidden_state
        return self._select(states, batch) if self.has_head else states

    def _run_base(self, batch: Batch, hidden: Tensor | None = None, **asked: bool) -> Any:
        if getattr(self.config, "output_router_logits", False):  # else the base model would go by its config
            asked = {"output_router_logits": False, **asked}
        # The base model is told that nothing is padding: with no mask it would read positions, to find documents.
        arguments = {"attention_mask": torch.ones_like(batch.input_ids, dtype=torch.bool), "use_cache": False, **asked}
        arguments |= {"input_ids": batch.input_ids} if hidden is None else {"inputs_embeds": hidden}
        with documents_of(batch), self._received(hidden):
            return self.base(position_ids=batch.position_ids, **arguments)

    def _select(self, states: Tensor, batch: Batch) -> Tensor:
        states = states.flatten(0, 1)[batch.positions]  # one name: else unselected positions stay in memory
        return self.scale_hidden(states) if self.scale_hidden and not self.scores else states

    @contextmanager
    def _received(self, hidden: Tensor | None) -> Iterator[None]:
        """Has the first block that is here take `hidden`, inside: not what the base model makes of it before, since a
        family may scale its embeddings."""
        if hidden is None:
            yield
            return
        before: Any = at(self.base, self.names.blocks)[next(n for n, block in enumerate(self.all_blocks) if block) - 1]
        before.received = hidden
        try:
            yield
        finally:
            before.received = None

    def next_logits(self, input_ids: Tensor, position_ids: Tensor, attended: Tensor, cache: Cache) -> Tensor:
        """Returns the logits [B, vocabulary] of the token that follows input_ids [B, l], the last l of the L tokens
        that `cache` then holds. `attended` [B, L]: 0 for padding, which is on the left. Runs transformers' forward."""
        given: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attended, "position_ids": position_ids}
        assert self.cache_argument, "its forward takes no cache"
        given[self.cache_argument] = cache
        hidden = self.base(**given, use_cache=True).last_hidden_state[:, -1]
        return self.head(self.scale_hidden(hidden) if self.scale_hidden else hidden)


def build_model(
    config: PreTrainedConfig,
    master: str,
    loss_chunk_tokens: int = 0,
    attention: Kernel = KERNELS["sdpa"],
    scores: bool = False,
) -> CausalLM:
    """Returns the model on the meta device (rotary buffers on the host), its parameters in the master dtype (`fp32`,
    `bf16`); with `scores` it returns one score a token in place of losses."""
    use_attention(config, attention)
    model = CausalLM(config, DTYPES[master], scores)
    if not scores:
        model.head.chunk_tokens = loss_chunk_tokens
    return model


def materialize(model: CausalLM, device: torch.device) -> None:
    """Gives every meta parameter uninitialized memory on `device`; moves the buffers there as they are."""
    every = [module for module in model.modules() if isinstance(module, CausalLM)]
    before = [[buffer.clone() for buffer in each.base.buffers()] for each in every]
    model.to_empty(device=device)  # it empties real buffers too, and makes two parameters of a tied one: mended below
    for each, numbers in zip(every, before, strict=True):
        each.tie()
        for buffer, number in zip(each.base.buffers(), numbers, strict=True):
            buffer.copy_(number)


def apply_compile(model: CausalLM) -> None:
    """Compiles each block in place. `torch.compile(block)` would return a wrapper whose FSDP hooks never fire."""
    for block in [*(model.teacher.blocks if model.teacher else []), *model.blocks]:
        block.compile()
