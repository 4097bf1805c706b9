"""The model: a Hugging Face config becomes a meta-device causal LM around transformers' own base model.

The base model's forward runs as it is. Ours are the masks and the kernels that it asks for (attention.py), what is done
around its blocks (blocks.py), and the head, which sees only trained positions and never holds all logits. Invariant:
parameter names are transformers' own, so weights are read and written unrenamed. It does no IO: weights.py fills the
weights in.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig

from shardbook.model.attention import KERNELS, Kernel, head_size, heads_of, use_attention
from shardbook.model.blocks import AroundBlock, ForwardPass, LastBlockDone, passing
from shardbook.model.file_names import FileNames
from shardbook.model.hf_model import at, find_logit_transform, split_model
from shardbook.model.loss_head import LossHead, ScoreHead, TeacherOutput
from shardbook.parallel.batch import Batch
from shardbook.parallel.context import CPGroup
from shardbook.parallel.layout import DTYPES
from shardbook.parallel.schedule import Pipeline
from shardbook.parallel.units import count_parameters, matrices_of, stacked_parameters
from shardbook.recipe import Distill

# transformers' names of the argument by which a forward takes a cache, the newest first
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


class CausalLM(nn.Module):
    """A decoder-only transformer that returns the loss of chosen positions or, given a cache, the next token's logits.

    `around_block`: takes a block's number and input, and returns the context that its forward runs in.
    """

    scores = False  # its head is a ScoreHead, not a LossHead
    is_adapted = False  # adapters.py, teacher.py: checkpoints hold only trained parameters
    identity = ""  # adapters.weights_identity of the frozen weights, or of a teacher's; set when they are loaded

    teacher: "CausalLM | None"  # teacher.py
    cp_group: CPGroup | None = None  # context.py: it takes slices of rows
    # pipeline.py: it may be one pipeline stage, or several
    pipeline = Pipeline()
    chunks: "list[CausalLM]"  # the chunks of layers, each of which runs by itself
    has_first_pp_stage = has_last_pp_stage = True  # it has the embedding; it has the head
    flops: "Flops | None" = None  # of the whole model

    around_block: AroundBlock = staticmethod(lambda *_: nullcontext())

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, scores: bool = False):
        super().__init__()
        parts = split_model(config, dtype)
        self.config = config
        self.chunks = [self]
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
        kept = tuple(name for name in self.state_dict() if name in buffers)
        names = parts.names
        outer = f"{names.base}.{names.embedding}.weight", f"{names.head}.weight"
        self.files = FileNames(parts.hf_model, kept, *outer, self.is_tied, parts.stacked)
        # Asked of the forward: one that lacks the name swallows the cache in its **kwargs, and goes on without a state.
        taken = signature(parts.base.forward).parameters
        self.cache_argument = next((name for name in CACHE_ARGUMENTS if name in taken), "")  # empty: it takes no cache

    def tie(self) -> None:
        """Makes head and embedding one parameter, where the config says so."""
        if self.is_tied and self.has_first_pp_stage and self.has_last_pp_stage:
            self.head.weight = self.embedding.weight

    @property
    def base(self) -> Any:
        """Transformers' base model."""
        return getattr(self, self.names.base)

    @property
    def head(self) -> Any:
        """The head; None where another rank has it. (Not by getattr: a family may name it as this property is.)"""
        return dict(self.named_children()).get(self.names.head)

    @property
    def embedding(self) -> Any:
        return at(self.base, self.names.embedding)

    @property
    def norm(self) -> Any:
        """The last norm; None where the family does not say which it is, or another rank has it."""
        return at(self.base, self.names.norm) if self.names.norm else None

    @property
    def all_blocks(self) -> list[nn.Module | None]:
        """The blocks by their numbers; None for those of other ranks."""
        return at(self.base, self.names.blocks).all

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for block in self.all_blocks if block is not None]

    @property
    def parts(self) -> list[list[nn.Module]]:
        """The groups of modules to shard and gather together, in forward order; tied weights share one group."""
        blocks, norm = [[block] for block in self.blocks], [self.norm] if self.norm is not None else []
        first = self.teacher.parts if self.teacher else []
        if self.is_tied and self.has_first_pp_stage and self.has_last_pp_stage:
            return [*first, [*norm, self.embedding, self.head], *blocks]
        embedding, head = [[self.embedding]] * self.has_first_pp_stage, [[*norm, self.head]] * self.has_last_pp_stage
        return [*first, *embedding, *blocks, *head]

    def forward(self, *inputs: Any, cache: Cache | None = None, **named: Any) -> Tensor:
        """Returns `losses` of a Batch or, with a `cache`, `next_logits`. Both go through forward: only a forward of the
        root module gathers the root's parameters."""
        return self.losses(*inputs, **named) if cache is None else self.next_logits(*inputs, cache=cache)

    def losses(
        self, batch: Batch, summed: bool = False, distill: Distill | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        """Returns the negative log-likelihood [n], fp32, of the batch's targets at its positions; `summed`: its sum,
        which takes one matrix product of the head less. A token attends to itself and earlier tokens of its own
        document. `distill`: returns the three sums of a LossHead with a teacher.

        With a pipeline, `hidden` is the output of the stage before, where there is one; all stages but the last return
        their hidden states. It is no part of the batch: torch 2.11 looks for gradients in no dataclass.
        """
        if distill is None:
            head_input = self.hidden_states(batch, hidden)
            return self.head(head_input, batch.targets, summed) if self.has_last_pp_stage else head_input
        assert self.teacher is not None, "nobody teaches"
        with torch.no_grad():
            teacher_hidden, weight, bias = self.teacher.head(self.teacher.hidden_states(batch))
        asked = distill.temperature, distill.kd_ratio
        teacher = TeacherOutput(teacher_hidden, weight, *asked, bias, self.teacher.head.logit_transform)
        return self.head(self.hidden_states(batch), batch.targets, teacher=teacher)

    def hidden_states(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """Returns the head's input at the batch's positions, [n, hidden]; of a pipeline stage before the last, its
        hidden states."""
        ids, slices = batch.input_ids, self.cp_group.size if self.cp_group else 1
        numbers = [number for number, block in enumerate(self.all_blocks) if block is not None]
        last = -1 if self.has_last_pp_stage else numbers[-1]
        shape = torch.Size((len(ids), ids.shape[1] * slices))
        now = ForwardPass(batch.cu_seqlens, shape, batch.packed, batch.max_seqlen, self.around_block, hidden, last)
        # The base model is told that nothing is padding: with no mask it would read positions, to find documents.
        arguments = {"attention_mask": torch.ones_like(ids, dtype=torch.bool), "use_cache": False}
        arguments |= {"input_ids": ids} if hidden is None else {"inputs_embeds": hidden}
        with passing(now):
            try:
                states = self.base(position_ids=batch.position_ids, **arguments).last_hidden_state
            except LastBlockDone as done:
                return done.hidden
        states = states.flatten(0, 1)[batch.positions]  # one name: else unselected positions stay in memory
        return self.scale_hidden(states) if self.scale_hidden and not self.scores else states

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


@dataclass(frozen=True)
class Flops:
    """Model FLOPs of training: for each token, and for each pair of tokens of one document (its length squared)."""

    per_token: int
    per_pair: int
    block: int = 0  # elements of the blocks' matrices
    block_trained: int = 0  # of these, the elements that get a gradient
    teacher: "Flops | None" = None  # count_flops of the teacher, as a frozen model; not part of the model FLOPs

    def of(self, tokens: float, pairs: float) -> float:
        return self.per_token * tokens + self.per_pair * pairs


def experts_per_token(config: PreTrainedConfig) -> int:
    """Returns to how many experts a router sends a token, at most; 0 where there is no router."""
    names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")
    places = [config, *(getattr(config, part, None) for part in config.sub_configs)]
    count = next((value for place in places for name in names if (value := getattr(place, name, None))), 0)
    return max(count) if isinstance(count, list) else int(count)


def count_flops(model: CausalLM) -> Flops:
    """Returns the FLOPs of training `model`: 6 for each token and matrix parameter, 4 for a frozen one (it has no
    gradient), and causal attention within documents.

    Attention by the count of PaLM, arXiv 2204.02311, appendix B (12 * layers * heads * head_dim * length for a token),
    halved since half of the scores are masked. The embedding lookup is no matmul; a tied head counts once;
    recomputation and padding's own attention do not count.
    """
    if model.flops:
        return model.flops
    config = model.config
    matrices = matrices_of(model.blocks)
    stacked = {p: experts for block in model.blocks for p, experts in stacked_parameters(block).items()}
    chosen = experts_per_token(config) or max(stacked.values(), default=0)  # without a router a token meets all
    share = {p: min(chosen, of) / of for p, of in stacked.items()}
    met = {p: int(share.get(p, 1) * count_parameters([p])) for p in [*matrices, *stacked]}
    block, trained = sum(met.values()), sum(count for p, count in met.items() if p.requires_grad)
    head = count_parameters(model.head.parameters())
    per_token = 4 * (block + head) + 2 * (trained + head * model.head.weight.requires_grad)
    per_pair = 6 * config.num_hidden_layers * heads_of(config)[0] * head_size(config)
    return Flops(per_token, per_pair, block, trained, count_flops(model.teacher) if model.teacher else None)
