"""The families: which transformers architectures are trained, and which configs are refused before weights are read."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from shardbook.recipe import Model, RecipeError, first_line


@dataclass(frozen=True)
class Family:
    """The facts of a transformers architecture that its config does not have: how queries and keys are normalised, and
    which matrices are fused."""

    head_norms: bool = False  # queries and keys are normalised, each head by itself
    wide_norms: bool = False  # queries and keys are normalised over all heads; a block's norms come after, not before
    fused: bool = False  # one matrix makes queries, keys and values, another gate and up


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(head_norms=True),
    "olmo2": Family(wide_norms=True),
    "smollm3": Family(),
    "granite": Family(),
    "phi3": Family(fused=True),
}
WHY_NOT = {  # families that people ask for, and the reason why they are not supported
    "gemma2": "it caps attention's scores and logits",
    "gemma3": "most of its layers attend within a window of 512 or 1,024 tokens",
    "gemma3_text": "most of its layers attend within a window of 512 or 1,024 tokens",
}
DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop")


def load_config(model: Model, folder: Path, max_length: int, what: str = "model.path") -> PreTrainedConfig:
    """Returns the transformers config in `folder`, which the recipe key `what` names. Raises RecipeError for a family
    or length that cannot be trained."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{what} = {model.path!r}: no usable config.json: {first_line(error)}") from None
    if config.model_type not in FAMILIES:
        why = f" ({reason})" if (reason := WHY_NOT.get(config.model_type)) else ""
        raise RecipeError(
            f"{what} = {model.path!r}: family {config.model_type!r} is not supported{why}; "
            f"supported: {', '.join(FAMILIES)}"
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
    for name in DROPOUTS:
        if share := getattr(config, name, 0.0):
            raise RecipeError(f"{what} = {model.path!r}: {name} = {share}; only 0 is supported")
    rope = getattr(config, "rope_parameters", None) or {}
    short = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if rope.get("rope_type") in ("dynamic", "longrope") and max_length > short:
        raise RecipeError(
            f"data.max_length = {max_length}: beyond {short} tokens the rotation of {model.path} "
            f"({rope['rope_type']}) depends on the longest row of a micro-batch; must be at most {short}"
        )
    if getattr(config, "quantization_config", None):
        raise RecipeError(
            f"{what} = {model.path!r}: holds quantised weights; full fine-tuning needs the unquantised ones"
        )
    return config
