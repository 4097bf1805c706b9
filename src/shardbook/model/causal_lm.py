"""The model: a Hugging Face config becomes a meta-device causal LM built from transformers' own blocks.

`CausalLM` walks the blocks itself (instead of calling transformers' forward) for three reasons: the packed mask is
made once and without a host sync, the head sees only trained positions and never holds all logits, and later axes
(pipeline, context) cut exactly here. Parameter names are transformers' own, so weights go in and out unrenamed.
Does no IO but reading a config; weights are filled in by weights.py.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from shardbook.dtypes import DTYPES
from shardbook.model import embedded
from shardbook.recipe import Model, RecipeError, first_line, nearest

CONFIG_FILES = ["*.json", "*.jinja", "tokenizer*"]


@dataclass(frozen=True)
class Family:
    """What we know of a transformers architecture beyond its config: which old checkpoint entries mean nothing."""

    ignored_suffixes: tuple[str, ...] = (".rotary_emb.inv_freq",)  # saved as weights by transformers before 4.32


FAMILIES = {"llama": Family(), "mistral": Family(), "qwen2": Family(), "qwen3": Family()}


class LossHead(nn.Linear):
    """The language-model head as a loss: hidden [n, hidden] and targets [n] -> negative log-likelihood [n], fp32.

    Logits exist for `chunk_tokens` rows at a time (0: all) and are recomputed in backward; with a vocabulary of 128k
    and 8k trained tokens the whole fp32 matrix and its gradient would be 8 GB.
    """

    chunk_tokens: int = 0

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        if not self.chunk_tokens or len(targets) <= self.chunk_tokens:
            return self._loss(hidden, targets)
        pairs = zip(hidden.split(self.chunk_tokens), targets.split(self.chunk_tokens), strict=True)
        return torch.cat([checkpoint(self._loss, h, t, use_reentrant=False) for h, t in pairs])

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, self.weight).float(), targets, reduction="none")


class CausalLM(nn.Module):
    """A decoder-only transformer whose output is the loss of chosen positions."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype):
        super().__init__()
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.config = config
        self.model = hf.model
        # After the body: a tied weight then goes by the embedding's name, as in Hugging Face files.
        self.lm_head = LossHead(config.hidden_size, config.vocab_size, bias=False, device="meta", dtype=dtype)
        # Meta buffers hold no numbers and no file has them: rotary frequencies are computed here, on the host, in fp32.
        self.model.rotary_emb = type(self.model.rotary_emb)(config)
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one parameter, where the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.layers)

    @property
    def parts(self) -> list[list[nn.Module]]:
        """The groups of modules to shard and gather together, in forward order; tied weights share one group."""
        body, blocks = self.model, [[block] for block in self.blocks]
        if self.config.tie_word_embeddings:
            return [[body.norm, body.embed_tokens, self.lm_head], *blocks]
        return [[body.embed_tokens], *blocks, [body.norm, self.lm_head]]

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, documents: Tensor | None, positions: Tensor, targets: Tensor
    ) -> Tensor:
        """Negative log-likelihood [n], fp32, of `targets` [n] at `positions` [n], indices into the flat [B * L].

        input_ids, position_ids, documents: int64 [B, L]. A token attends to earlier tokens with its own document
        number; `documents` None: one document a row, padding only at its end (nothing attends forward to it).
        """
        hidden = self.model.embed_tokens(input_ids)
        rotary = self.model.rotary_emb(hidden, position_ids=position_ids)
        mask = attention_mask(documents, input_ids, hidden.dtype, self.config._attn_implementation)
        for block in self.model.layers:
            hidden = block(hidden, attention_mask=mask, position_embeddings=rotary, position_ids=position_ids)
        hidden = self.model.norm(hidden)
        return self.lm_head(hidden.flatten(0, 1)[positions], targets)


def attention_mask(
    documents: Tensor | None, input_ids: Tensor, dtype: torch.dtype, implementation: str
) -> Tensor | None:
    """[B, 1, L, L]: causal and within a document. None for plain causal rows under sdpa: it has a kernel for them."""
    if documents is None and implementation == "sdpa":
        return None
    length = input_ids.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None]
    if documents is not None:
        allowed = allowed & (documents[:, :, None] == documents[:, None, :])
    if implementation == "sdpa":
        return allowed[:, None]
    # eager attention ADDS the mask to its scores: a boolean one would add 1 where it should forbid
    return torch.zeros(allowed.shape, dtype=dtype, device=input_ids.device).masked_fill(
        ~allowed, torch.finfo(dtype).min
    )[:, None]


def load_config(model: Model, folder: Path, max_length: int) -> PreTrainedConfig:
    """The transformers config in `folder`. Raises RecipeError for a family or length that it cannot train."""
    try:
        config = AutoConfig.from_pretrained(folder, attn_implementation=model.attention, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.path = {model.path!r}: no usable config.json: {first_line(error)}") from None
    if config.model_type not in FAMILIES:
        raise RecipeError(
            f"model.path = {model.path!r}: family {config.model_type!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}{nearest(config.model_type, list(FAMILIES))}"
        )
    if max_length > config.max_position_embeddings:
        raise RecipeError(
            f"data.max_length = {max_length}: {model.path} sees at most {config.max_position_embeddings} tokens"
        )
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window and max_length > window:
        raise RecipeError(
            f"data.max_length = {max_length}: {model.path} "
            f"attends within a window of {window} tokens, and longer rows are not supported"
        )
    if getattr(config, "attention_dropout", 0.0):
        raise RecipeError(
            f"model.path = {model.path!r}: attention_dropout = {config.attention_dropout}; only 0 is supported"
        )
    if getattr(config, "quantization_config", None):
        raise RecipeError(
            f"model.path = {model.path!r}: holds quantised weights; full fine-tuning needs the unquantised ones"
        )
    return config


def build_model(config: PreTrainedConfig, master: str, loss_chunk_tokens: int = 0) -> CausalLM:
    """The model on the meta device (rotary buffers on the host), parameters in the master dtype (`fp32`, `bf16`)."""
    model = CausalLM(config, DTYPES[master])
    model.lm_head.chunk_tokens = loss_chunk_tokens
    return model


def materialize(model: CausalLM, device: torch.device) -> None:
    """Give every meta parameter uninitialised memory on `device`, and move the rotary buffers there unharmed."""
    rotary = model.model.rotary_emb
    frequencies = {name: buffer.clone() for name, buffer in rotary.named_buffers()}
    model.to_empty(device=device)  # empties real buffers too, and makes two parameters of a tied one
    model.tie()
    for name, buffer in rotary.named_buffers():
        buffer.copy_(frequencies[name])


def apply_compile(model: CausalLM) -> None:
    """Compile each block in place. `torch.compile(block)` would return a wrapper whose FSDP hooks never fire."""
    for block in model.blocks:
        block.compile()


def flops_per_token(model: CausalLM, length: float) -> float:
    """Model FLOPs to train on one token of a row of `length`: 6 per matrix parameter, and causal attention.

    Attention by the count of PaLM, arXiv 2204.02311, appendix B (12 * layers * heads * head_dim * length), halved since
    half of the scores are masked. The embedding lookup is no matmul; a tied head counts once; recomputation does not.
    """
    config = model.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    matrices = sum(p.numel() for block in model.blocks for p in block.parameters() if p.ndim == 2) + math.prod(
        model.lm_head.weight.shape
    )
    return 6 * matrices + 6 * config.num_hidden_layers * heads * head_dim * length


def fetch_folder(path: str, revision: str, what: str, patterns: list[str]) -> Path:
    """The local directory `path`, or the hub snapshot of that id (files matching `patterns`). Raises RecipeError."""
    if Path(path).is_dir():
        return Path(path)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise RecipeError(f"{what} = {path!r}: no such directory, and not a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
    except (OSError, HfHubHTTPError, ValueError) as error:
        token = "HF_TOKEN is set" if os.environ.get("HF_TOKEN") else "HF_TOKEN is not set"
        raise RecipeError(
            f"{what} = {path!r}: the hub did not give it ({type(error).__name__}: {first_line(error)}); {token}. "
            f"If the model is gated, accept its licence and set HF_TOKEN; without a network "
            f"set {what} to a local directory"
        ) from None


def model_folder(model: Model) -> Path:
    """The directory of config and weights (with random weights: of the config). Raises RecipeError."""
    if model.path == embedded.MODEL:
        return embedded.smollm2_folder()
    weights = ["*.safetensors", "*.safetensors.index.json"] if model.init == "pretrained" else []
    return fetch_folder(model.path, model.revision, "model.path", [*CONFIG_FILES, *weights])


def tokenizer_folder(model: Model) -> Path:
    """The directory of the tokenizer: its own, else the model's. Raises RecipeError."""
    if (model.tokenizer or model.path) == embedded.MODEL:
        return embedded.smollm2_folder()
    return fetch_folder(
        model.tokenizer or model.path, "main" if model.tokenizer else model.revision, "model.tokenizer", CONFIG_FILES
    )
