"""The model FLOPs of training: products with matrices, and causal attention within documents.

Invariant: they are of the whole model, so they are counted before anything splits it.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from shardbook.model.attention import head_size, heads_of
from shardbook.model.causal_lm import CausalLM
from shardbook.model.experts import matrices_of, stacked_parameters
from shardbook.model.marks import packed_numel


@dataclass(frozen=True)
class Flops:
    """Model FLOPs of training: for each token, and for each pair of tokens of one document (its length squared)."""

    per_token: int
    per_pair: int
    block: int = 0  # elements of the blocks' matrices
    block_trained: int = 0  # of these, the elements that get a gradient
    beside: "Flops | None" = None  # of a frozen model that runs beside this one; not part of the model FLOPs

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
    config = model.config
    matrices = matrices_of(model.blocks)
    stacked = {p: experts for block in model.blocks for p, experts in stacked_parameters(block).items()}
    chosen = experts_per_token(config) or max(stacked.values(), default=0)  # without a router a token meets all
    share = {p: min(chosen, of) / of for p, of in stacked.items()}
    packed = packed_numel(model)
    met = {p: int(share.get(p, 1) * packed.get(p, p.numel())) for p in [*matrices, *stacked]}
    block, trained = sum(met.values()), sum(count for p, count in met.items() if p.requires_grad)
    head = sum(p.numel() for p in model.head.parameters())
    per_token = 4 * (block + head) + 2 * (trained + head * model.head.weight.requires_grad)
    per_pair = 6 * config.num_hidden_layers * heads_of(config)[0] * head_size(config)
    return Flops(per_token, per_pair, block, trained)
