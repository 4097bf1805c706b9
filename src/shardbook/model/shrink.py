"""A config made small. `keep_layers` leaves layers out. `shrink_config` leaves two of each kind and shrinks widths by
their names, switches never, so that the result of a check of the small model holds for the large one.

Invariant: ratios stay (fewer key heads than heads, groups of experts, partial rotations).
"""

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY, LAYERS = 128, 4
# The largest number that a width of a name may keep. An indexer's heads stay many: where each has a score below zero,
# tokens tie at zero, and the kernel chooses.
_WIDTHS = """
256: n_positions n_ctx max_seq_len context_length rel_extent
128: vocab_size vocab_size_per_layer_input unpadded_vocab_size ngram_vocab_size_base
64: attention_hidden_size dense_intermediate_size mamba_d_ssm mamba_intermediate_size
48: intermediate_size ffn_hidden_size ffn_dim n_inner dff intermediate_size_mlp
32: hidden_size n_embd d_model embedding_dim word_embed_proj_dim lru_width d_inner
16: moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size
16: moe_shared_expert_intermediate_size router_hidden_size shared_experts_intermediate_size
16: hidden_size_per_layer_input ple_embed_dim kv_lora_rank q_lora_rank o_lora_rank adapter_rank attention_head_dim
16: hc_lowrank index_n_heads indexer_n_heads
8: head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels swa_head_dim linear_head_dim
8: linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim mamba_n_heads mamba_num_heads
8: n_mamba_heads rotary_dim global_head_dim mamba_d_state state_size ssm_state_size laurel_rank gated_norm_rank
8: d_rel index_head_dim indexer_head_dim index_block_size
4: num_query_groups indexer_budget mamba_dt_rank time_step_rank num_experts num_local_experts
4: n_routed_experts moe_num_experts zero_expert_num sliding_window attention_window_size sliding_window_size
4: window_size local_attention attention_chunk_size index_topk
2: linear_num_key_heads n_groups mamba_n_groups mamba_ngroups o_groups heads_per_ngram num_experts_per_tok
2: num_experts_per_token moe_topk moe_k n_group num_expert_group index_topk_blocks num_mem_blocks split_ngram_parts
2: rescale_every indexer_compress_ratio interleave_moe_layer_step attn_layer_period expert_layer_period layer_group_size
1: topk_group first_k_dense_replace num_dense_layers attn_layer_offset
"""
_LINES = [line.partition(":") for line in _WIDTHS.split("\n")]
SIZES = {name: int(size) for size, _, names in _LINES for name in names.split()}
# at most four of these; three would not divide the other widths, which are powers of two
HEADS = ["num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads", "swa_num_attention_heads"]
HEADS += ["linear_num_value_heads", "linear_num_heads"]
LAYER_COUNTS = ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "num_layers_per_stack"]
KEY_HEADS = dict.fromkeys(["num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"], "num_attention_heads")
KEY_HEADS |= {"swa_num_key_value_heads": "swa_num_attention_heads", "kv_n_heads": "n_heads"}
# lists of numbers of layers, and the first one's number
INDEX_LISTS = dict.fromkeys(["moe_layers", "mlp_only_layers", "hybrid_layer_ids", "full_attn_idxs"], 0)
INDEX_LISTS |= {"attn_layer_indices": 0, "cross_attention_layers": 0, "ple_layer_ids": 1}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id")


def keep_layers(config: PreTrainedConfig, numbers: Sequence[int]) -> PreTrainedConfig:
    """Returns a copy of `config` with these of its layers, in this order."""
    few = copy.deepcopy(config)
    inner, kept = few.get_text_config(), list(numbers)
    layers = inner.num_hidden_layers
    for name, value in [*vars(inner).items()]:
        setattr(inner, name, _of_layers(name, value, layers, kept))
    inner.num_hidden_layers = len(kept)
    return few


def _of_layers(name: str, value: Any, layers: int, kept: list[int]) -> Any:
    """Returns what a config of `layers` layers says under `name` of those that are `kept`, by their new numbers."""
    if name == "per_layer_config" and isinstance(value, dict):
        return {str(kept.index(int(number))): each for number, each in value.items() if int(number) in kept}
    if not isinstance(value, (list, tuple)) or name in TOKENS:
        return value
    if name in INDEX_LISTS:
        first = INDEX_LISTS[name]
        return [kept.index(number - first) + first for number in value if number - first in kept]
    return [value[number] for number in kept] if len(value) == layers else value


def shrink_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a small config of the same class, with the switches of `config`."""
    words = config.to_dict()
    if (inner := config.get_text_config()) is not config:
        key = next(key for key, value in vars(config).items() if value is inner)
        words[key] = _shrunk(inner.to_dict(), inner.num_hidden_layers)
    else:
        words = _shrunk(words, config.num_hidden_layers)
    words.pop("quantization_config", None)
    return type(config).from_dict(words)


def _shrunk(words: dict[str, Any], layers: int) -> dict[str, Any]:
    kept = layers_of_each_kind(words, layers)
    shrunk = {name: _small(name, value, layers, kept) for name, value in copy.deepcopy(words).items()}
    for name, of_heads in KEY_HEADS.items():
        if value := words.get(name):
            heads = words.get(of_heads) or words.get("n_head") or 2 * value
            few = shrunk.get(of_heads) or shrunk.get("n_head") or 4
            shrunk[name] = 3 if heads % value else few if value == heads else min(value, 2)  # 3 divides no better
    if words.get("qk_head_dim"):
        shrunk["qk_head_dim"] = shrunk["qk_nope_head_dim"] + shrunk["qk_rope_head_dim"]
    width, rotated, others = (words.get(f"{name}head_dim") or 0 for name in ("", "qk_rope_", "qk_nope_"))
    if others and width > rotated > 0:  # a head is both of its parts, not the rotated one
        shrunk["head_dim"] = shrunk["qk_nope_head_dim"] + shrunk["qk_rope_head_dim"]
    if words.get("expand") and words.get("num_heads"):  # a mixer's heads are as wide as its state
        shrunk["num_heads"] = shrunk["hidden_size"] * words["expand"] // shrunk["head_dim"]
    if isinstance(words.get("num_kv_shared_layers"), int):
        shrunk["num_kv_shared_layers"] = min(words["num_kv_shared_layers"], len(kept) // 2)
    if (words.get("pad_token_id") or 0) >= words.get("vocab_size", math.inf):
        shrunk["pad_token_id"] = VOCABULARY  # outside of the vocabulary, as it was
    _cut_rotations(shrunk)
    return shrunk


def _small(name: str, value: Any, layers: int, kept: list[int]) -> Any:
    cut = _of_layers(name, value, layers, kept)
    if name == "per_layer_config" and isinstance(value, dict):
        return {number: _shrunk(each, layers) for number, each in cut.items()}
    if isinstance(value, (list, tuple)):
        return cut if name in INDEX_LISTS or cut is value else [_small(name, each, -1, kept) for each in cut]
    if name in ("attn_config", "ffn_config"):
        return _shrunk(value if isinstance(value, dict) else value.to_dict(), layers)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name in LAYER_COUNTS:
        return len(kept)
    if name in TOKENS:
        return min(value, VOCABULARY - 1)
    if name in HEADS:
        return 2 if value == 3 else min(value, 4)
    return min(value, SIZES.get(name, value))


def layers_of_each_kind(words: dict[str, Any], layers: int) -> list[int]:
    """Returns the numbers of the layers that stay: the first two of each kind, which the lists of `words` distinguish,
    and at least LAYERS, or all where there are fewer."""
    listed = [(name, value) for name, value in words.items() if isinstance(value, (list, tuple))]
    by_number = [value for name, value in listed if len(value) == layers and name not in INDEX_LISTS]
    indices = [{number - INDEX_LISTS[name] for number in value} for name, value in listed if name in INDEX_LISTS]
    apart = {int(number): each for number, each in (words.get("per_layer_config") or {}).items()}
    kinds: dict[str, list[int]] = {}
    for number in range(layers):
        kind = [value[number] for value in by_number], [number in each for each in indices], apart.get(number)
        kinds.setdefault(repr(kind), []).append(number)
    kept = {number for numbers in kinds.values() for number in numbers[:2]}
    others = [number for number in range(layers) if number not in kept]
    return sorted([*kept, *others[: max(0, LAYERS - len(kept))]])


def _cut_rotations(words: dict[str, Any]) -> None:
    """Shortens factors of rotations, one for each pair of a head's numbers, to the small heads."""
    ropes: Iterable[Any] = [words.get("rope_parameters"), words.get("rope_scaling")]
    for rope in [inner for each in ropes if isinstance(each, dict) for inner in (each, *each.values())]:
        if isinstance(rope, dict):
            for name in ("short_factor", "long_factor"):
                if name in rope:
                    rope[name] = rope[name][: int(4 * (rope.get("partial_rotary_factor") or 1))]
