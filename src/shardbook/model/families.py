"""The families: which configs are refused before weights are read. None is listed: a self-check asks a small model."""

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardbook.recipe import Model, RecipeError, first_line

RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")  # in names of a config's shares of noise
NOT_OURS = ("classifier_dropout", "summary_first_dropout")  # of heads that are not built


def text_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Returns the config of the text model of a model that may have more; None where it has no one text model that
    transformers has by itself."""
    try:
        text = config.get_text_config()
    except ValueError:  # it has several
        return None
    if text is not config:
        if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return None
        text.tie_word_embeddings = config.tie_word_embeddings  # a text model's own word is not heeded in the whole
        text.quantization_config = getattr(config, "quantization_config", None)
    return text


def load_config(model: Model, folder: Path, max_length: int, what: str = "model.path") -> PreTrainedConfig:
    """Returns the transformers config in `folder`, which the recipe key `what` names. Raises RecipeError for a family
    or length that cannot be trained."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{what} = {model.path!r}: no usable config.json: {first_line(error)}") from None
    said = f"{what} = {model.path!r}"
    text = text_config(config)
    if text is None or text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise RecipeError(f"{said}: transformers has no causal LM of the family {config.model_type!r}")
    config = text
    most = getattr(config, "max_position_embeddings", None) or max_length  # some have no positions
    if max_length > most:
        raise RecipeError(f"data.max_length = {max_length}: {model.path} sees at most {most} tokens")
    for name, value in config.to_dict().items():
        if isinstance(value, float) and value > 0 and any(word in name for word in RANDOM) and name not in NOT_OURS:
            raise RecipeError(f"{said}: {name} = {value}; only 0 is supported")
    if getattr(config, "output_router_logits", False):
        raise RecipeError(f"{said}: output_router_logits = true; only false is supported: a router has no loss here")
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]:
        short = kind.get("original_max_position_embeddings") or most
        if kind.get("rope_type") in ("dynamic", "longrope") and max_length > short:
            raise RecipeError(
                f"data.max_length = {max_length}: beyond {short} tokens the rotation of {model.path} "
                f"({kind['rope_type']}) depends on the longest row of a micro-batch; must be at most {short}"
            )
    if quantised := getattr(config, "quantization_config", None):
        method = (quantised if isinstance(quantised, dict) else vars(quantised)).get("quant_method", "unnamed")
        raise RecipeError(
            f"{said}: holds quantised weights ({method}), which are neither trained nor taken as a frozen base; "
            f"set {what} to a copy in bf16"
        )
    return config
