"""Well-known models by their shapes: all that a plan needs, without a hub, a license or a download."""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from shardbook.model import embedded
from shardbook.model.families import load_config
from shardbook.recipe import Model, RecipeError, nearest


@cache
def known_shapes() -> dict[str, dict[str, Any]]:
    """Returns shapes.toml: by name the hub `ids`, `family` and `config`."""
    return tomllib.loads(Path(__file__).with_name("shapes.toml").read_text())


def shape_config(model: Model, max_length: int, what: str = "model.path") -> PreTrainedConfig:
    """Returns the config of `model.path`: a local directory (or its config.json), or a name or hub id of shapes.toml.
    Fetches nothing. Raises RecipeError for any other path, with the nearest known name."""
    path = model.path
    local = Path(path).parent if path.endswith("config.json") else Path(path)
    if path and local.is_dir():
        return load_config(model, local, max_length, what)
    for name, known in known_shapes().items():
        if path == name or path in known["ids"]:
            config = known["config"]
            if max_length > (longest := config["max_position_embeddings"]):
                raise RecipeError(f"data.max_length = {max_length}: {path} sees at most {longest} tokens")
            if config.get("sliding_window") == 0:  # none, for which TOML has no word
                config = config | {"sliding_window": None}
            return AutoConfig.for_model(known["family"], **config)
    names = [word for name, known in known_shapes().items() for word in (name, *known["ids"])]
    names = [name for name in names if _architecture(name) == _architecture(path)]  # never another one
    raise RecipeError(
        f"{what} = {path!r}: not a directory, and its shape is not known here; known are "
        f"{', '.join(known_shapes())}{nearest(path, names)} (any other: give a directory with its config.json)"
    )


def _architecture(name: str) -> str:
    """Returns the first word of a model's name: `llama` of `meta-llama/Llama-3.1-8B`."""
    return re.split(r"[^a-z]", name.rpartition("/")[2].lower())[0]


def hub_id(name: str) -> str:
    """Returns the hub id that a run would fetch for a name of shapes.toml; any other `name` unchanged."""
    return name if name in embedded.MODELS or name not in known_shapes() else str(known_shapes()[name]["ids"][0])
