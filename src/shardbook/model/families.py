"""The families: which configs are refused before weights are read. None is listed: a self-check asks a small model."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, __version__
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardbook.recipe import Model, RecipeError, first_line

RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")  # in names of a config's shares of noise
SIZES = ("hidden_size", "num_hidden_layers")  # transformers takes any number
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
    setting, words = f"{what} = {model.path!r}", dict[str, Any]()
    try:
        words = dict(json.loads((folder / "config.json").read_text()))
        if not (family := words.get("model_type")):  # transformers would guess it from the folder's name
            raise ValueError("it has no model_type")
        if family not in CONFIG_MAPPING:
            reason = "its own code (auto_map) is not run" if "auto_map" in words else "a newer one may"
            raise ValueError(f"transformers {__version__} has no model_type {family!r}; {reason}")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of whatever kind: transformers' own checks raise a dozen, and the file is a stranger's
        why = blame(words, lambda some: AutoConfig.for_model(**some)) + first_line(error.__cause__ or error)
        raise RecipeError(f"{setting}: no usable config.json: {why}") from None
    text = text_config(config)
    if text is None or text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise RecipeError(f"{setting}: transformers has no causal LM of the family {config.model_type!r}")
    config = text
    most = getattr(config, "max_position_embeddings", None) or max_length  # some have no positions
    if max_length > most:
        raise RecipeError(f"data.max_length = {max_length}: {model.path} sees at most {most} tokens")
    for name, value in config.to_dict().items():
        if name in SIZES and isinstance(value, int) and value < 1:
            raise RecipeError(f"{setting}: no usable config.json: {name} = {value}; must be at least 1")
    for owner, name, value in shares_of_noise(config):
        if not model.disable_dropout:
            way_out = "set model.disable_dropout=true to train without it"
            raise RecipeError(f"{setting}: {name} = {value}; only 0 is supported: {way_out}")
        owner[name] = type(value)(0)
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]:
        short, known = kind.get("original_max_position_embeddings") or most, ("default", *ROPE_INIT_FUNCTIONS)
        if kind.get("rope_type", "default") not in known:
            allowed = f"must be one of {', '.join(known)}"
            raise RecipeError(f"{setting}: no usable config.json: rope_type = {kind['rope_type']!r}; {allowed}")
        if kind.get("rope_type") in ("dynamic", "longrope") and max_length > short:
            raise RecipeError(
                f"data.max_length = {max_length}: beyond {short} tokens the rotation of {model.path} "
                f"({kind['rope_type']}) depends on the longest row of a micro-batch; must be at most {short}"
            )
    if quantised := getattr(config, "quantization_config", None):
        method = (quantised if isinstance(quantised, dict) else vars(quantised)).get("quant_method", "unnamed")
        raise RecipeError(
            f"{setting}: holds quantised weights ({method}), which are neither trained nor taken as a frozen base; "
            f"set {what} to a copy in bf16"
        )
    return config


def shares_of_noise(config: PreTrainedConfig) -> list[tuple[dict[str, Any], str, float]]:
    """Returns each dropout or jitter above 0 of a config, or of one inside of it: the values that hold it, its name
    there, and its share."""
    shares, inside = list[tuple[dict[str, Any], str, float]](), [vars(config)]
    while inside:
        values = inside.pop()
        for name, value in values.items():
            if isinstance(value, dict | PreTrainedConfig):
                inside.append(value if isinstance(value, dict) else vars(value))
            elif type(value) in (int, float) and value != 0 and _is_noise(str(name)):
                shares.append((values, name, value))
    return shares


def _is_noise(name: str) -> bool:
    return any(word in name for word in RANDOM) and name not in NOT_OURS


def blame(words: dict[str, Any], build: Callable[[dict[str, Any]], Any]) -> str:
    """Returns words that name each key of a config that `build` refuses without which it takes the rest."""
    reasons = []
    for name, value in words.items():
        with suppress(Exception):  # of whatever kind, as in load_config
            built = build({other: kept for other, kept in words.items() if other != name})
            reasons.append(f"{name} = {value!r} (transformers' default is {getattr(built, name, None)!r})")
    return " or ".join(reasons) + ": " * bool(reasons)
