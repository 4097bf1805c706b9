"""The families: which transformers architectures are trained, and which configs are refused before weights are read."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from shardbook.recipe import Model, RecipeError, first_line, nearest


@dataclass(frozen=True)
class Family:
    """What we know of a transformers architecture beyond its config: which old checkpoint entries mean nothing, and
    whether queries and keys are normalised by head."""

    ignored_suffixes: tuple[str, ...] = (".rotary_emb.inv_freq",)  # saved as weights by transformers before 4.32
    head_norms: bool = False


FAMILIES = {"llama": Family(), "mistral": Family(), "qwen2": Family(), "qwen3": Family(head_norms=True)}


def load_config(model: Model, folder: Path, max_length: int) -> PreTrainedConfig:
    """The transformers config in `folder`. Raises RecipeError for a family or length that it cannot train."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
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
