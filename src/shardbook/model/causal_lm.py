"""The model: a Hugging Face config becomes a meta-device causal LM built from transformers' own blocks.

`CausalLM` runs the blocks itself (instead of calling transformers' forward) for three reasons: the packed mask is
made once and without a host sync, the head sees only trained positions and never holds all logits, and pipeline and
context parallel split the model exactly here. Invariant: parameter names are transformers' own, so weights are read and
written unrenamed. It does no IO: weights.py fills the weights in.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, PreTrainedConfig

from shardbook.model.attention import KERNELS, Kernel, attention_mask, head_size, use_attention
from shardbook.model.families import FAMILIES
from shardbook.model.loss_head import LossHead, ScoreHead, TeacherOutput
from shardbook.parallel.batch import Batch
from shardbook.parallel.context import ContextAxis
from shardbook.parallel.layout import DTYPES
from shardbook.parallel.schedule import Pipeline
from shardbook.parallel.units import count_parameters
from shardbook.recipe import Distill


class CausalLM(nn.Module):
    """A decoder-only transformer that returns the loss of chosen positions or, given a cache, the next token's logits.

    `around_block`: takes a block's number and input, and returns the context that its forward runs in.
    """

    scores = False  # its head is a ScoreHead, not a LossHead
    is_adapted = False  # adapters.py, teacher.py: checkpoints hold only trained parameters
    identity = ""  # adapters.weights_identity of the frozen weights, or of a teacher's; set when they are loaded

    teacher: "CausalLM | None"  # teacher.py
    context: ContextAxis | None = None  # context.py: it takes slices of rows
    # pipeline.py: it may be one pipeline stage, or several
    pipeline = Pipeline()
    chunks: "list[CausalLM]"  # the chunks of layers, each of which runs by itself
    has_first_stage = has_last_stage = True  # it has the embedding; it has the head
    flops: "Flops | None" = None  # of the whole model

    around_block: Callable[[int, Tensor], AbstractContextManager[Any]] = staticmethod(lambda *_: nullcontext())

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, scores: bool = False):
        super().__init__()
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.config = config
        self.chunks = [self]
        self.model = hf.model
        self.scores = scores
        # After the body: a tied weight then has the embedding's name, as in Hugging Face files.
        if scores:
            self.score = ScoreHead(config.hidden_size, 1, bias=False, device="meta", dtype=dtype)
        else:
            self.lm_head = LossHead(config.hidden_size, config.vocab_size, bias=False, device="meta", dtype=dtype)
        # Meta buffers hold no numbers and no file has them: rotary frequencies are computed here, on the host, in fp32.
        self.model.rotary_emb = type(self.model.rotary_emb)(config)
        # They hold for every row that load_config lets in. Without this, transformers would read the longest row of
        # "dynamic" and "longrope" from the device (a host sync) in every forward.
        self.model.rotary_emb.rope_type = "default"
        self.tie()
        self.register_module("teacher", None)

    def tie(self) -> None:
        """Makes head and embedding one parameter, where the config says so."""
        if self.is_tied and self.has_first_stage and self.has_last_stage:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def is_tied(self) -> bool:
        return bool(self.config.tie_word_embeddings) and not self.scores

    @property
    def head(self) -> nn.Linear:
        return self.score if self.scores else self.lm_head

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for block in self.model.layers if block is not None]

    @property
    def parts(self) -> list[list[nn.Module]]:
        """The groups of modules to shard and gather together, in forward order; tied weights share one group."""
        body, blocks = self.model, [[block] for block in self.blocks]
        first = self.teacher.parts if self.teacher else []
        if self.is_tied and self.has_first_stage and self.has_last_stage:
            return [*first, [body.norm, body.embed_tokens, self.head], *blocks]
        return [
            *first,
            *[[body.embed_tokens]] * self.has_first_stage,
            *blocks,
            *[[body.norm, self.head]] * self.has_last_stage,
        ]

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
            made = self.hidden_states(batch, hidden)
            found: Tensor = self.head(made, batch.targets, summed) if self.has_last_stage else made
            return found
        assert self.teacher is not None, "nobody teaches"
        with torch.no_grad():
            teacher_hidden, weight = self.teacher.lm_head(self.teacher.hidden_states(batch))
        teacher = TeacherOutput(teacher_hidden, weight, distill.temperature, distill.kd_ratio)
        return self.lm_head(self.hidden_states(batch), batch.targets, teacher=teacher)

    def hidden_states(self, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        """Returns the head's input at the batch's positions, [n, hidden]; of a pipeline stage before the last, its
        hidden states."""
        family = FAMILIES[self.config.model_type]
        if hidden is None:
            hidden = self.model.embed_tokens(batch.input_ids)
            if family.embedding_scale:
                hidden = hidden * getattr(self.config, family.embedding_scale)
        rotary = self.model.rotary_emb(hidden, position_ids=batch.position_ids)
        kernel = self.config._attn_implementation
        rows, length = batch.input_ids.shape
        whole = torch.Size((rows, length * (self.context.size if self.context else 1)))
        mask = attention_mask(kernel, batch.boundaries, whole, batch.packed, hidden.dtype, batch.longest)
        for number, block in enumerate(self.blocks):
            with self.around_block(number, hidden):
                hidden = block(hidden, attention_mask=mask, position_embeddings=rotary, position_ids=batch.position_ids)
        if not self.has_last_stage:
            return hidden
        hidden = self.model.norm(hidden).flatten(0, 1)[
            batch.positions
        ]  # one name: else unselected positions stay in memory
        if family.logits_divisor and not self.scores:  # here, not on the logits, which are many more numbers
            hidden = hidden / getattr(self.config, family.logits_divisor)
        return hidden

    def next_logits(self, input_ids: Tensor, position_ids: Tensor, attended: Tensor, cache: Cache) -> Tensor:
        """Returns the logits [B, vocabulary] of the token that follows input_ids [B, l], the last l of the L tokens
        that `cache` then holds. `attended` [B, L]: 0 for padding, which is on the left. Runs transformers' forward."""
        hidden = self.model(
            input_ids=input_ids,
            attention_mask=attended,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        logits = self.lm_head(hidden)
        divisor = FAMILIES[self.config.model_type].logits_divisor
        return logits / getattr(self.config, divisor) if divisor else logits


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
        model.lm_head.chunk_tokens = loss_chunk_tokens
    return model


def materialize(model: CausalLM, device: torch.device) -> None:
    """Gives every meta parameter uninitialized memory on `device`; moves the rotary buffers there as they are."""
    every = [module for module in model.modules() if isinstance(module, CausalLM)]
    frequencies = [[buffer.clone() for buffer in each.model.rotary_emb.buffers()] for each in every]
    model.to_empty(device=device)  # it empties real buffers too, and makes two parameters of a tied one: mended below
    for each, numbers in zip(every, frequencies, strict=True):
        each.tie()
        for buffer, number in zip(each.model.rotary_emb.buffers(), numbers, strict=True):
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
    matrices = [p for block in model.blocks for p in block.parameters() if p.ndim == 2]
    block = count_parameters(matrices)
    trained = count_parameters(p for p in matrices if p.requires_grad)
    head = count_parameters(model.head.parameters())
    per_token = 4 * (block + head) + 2 * (trained + head * model.head.weight.requires_grad)
    per_pair = 6 * config.num_hidden_layers * config.num_attention_heads * head_size(config)
    return Flops(per_token, per_pair, block, trained, count_flops(model.teacher) if model.teacher else None)
