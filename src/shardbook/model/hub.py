"""The directory of a model's files: a local one, a snapshot of the Hugging Face hub, or the embedded default."""

import io
import json
import math
import os
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HfHubHTTPError

from shardbook.model import embedded
from shardbook.paths import is_hub_id
from shardbook.recipe import Model, RecipeError, first_line

INDEX = "model.safetensors.index.json"
CONFIG_FILES = ["*.json", "*.jinja", "tokenizer*"]
WEIGHTS = "model.safetensors"  # without an index
HEADER_BYTES = 100 * 10**6  # of a weights file; the library's own limit: a longer one is refused
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # tensors of other dtypes are never read


def fetch_folder(path: str, revision: str, what: str, patterns: list[str]) -> Path:
    """Returns an embedded model's directory, the local directory `path`, or the hub snapshot of that id (files
    matching `patterns`). Raises RecipeError, which names the recipe key `what`."""
    if path in embedded.MODELS:
        return embedded.embedded_folder(path)
    if path and Path(path).is_dir():  # an empty path would be the working directory
        return Path(path)
    if Path(path).is_file():
        raise RecipeError(f"{what} = {path!r}: is a file; must be a directory, or a hub id (owner/name)")
    if not is_hub_id(path):
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


def weights_files(folder: Path) -> list[Path]:
    """Returns the weights files of a Hugging Face directory. Raises RecipeError where there is none."""
    if (folder / INDEX).is_file():
        files = [folder / name for name in indexed_files(folder)]
        if absent := [file for file in files if not file.is_file()]:
            raise RecipeError(f"weights file {absent[0]}: named in {INDEX}, but not there")
        return files
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / "adapter_config.json").is_file():
        raise RecipeError(f"{folder}: holds an adapter; set model.path to its base, and lora.adapter to it")
    raise RecipeError(f"{folder}: no {WEIGHTS} and no {INDEX} (pickled weights are not read)")


def indexed_files(folder: Path) -> list[str]:
    """Returns the names of the weights files in the index of a Hugging Face directory. Raises RecipeError."""
    try:
        return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(f"weights file {folder / INDEX}: damaged ({type(error).__name__}: {error})") from None


def read_header(path: Path, file: io.FileIO) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Returns the dtype, as the format writes it, the shape and the first byte of each tensor in an open weights file.
    Raises RecipeError where their places are not exactly the rest of the file."""
    length, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
    if size < 8 + length or length > HEADER_BYTES:
        raise damaged(path, f"its header would have {length:,} bytes, the file has {size:,}")
    tensors, end = dict[str, tuple[str, tuple[int, ...], int]](), 0
    try:
        header: dict[str, Any] = json.loads(file.read(length))
        entries = [(*entry["data_offsets"], name, entry) for name, entry in header.items() if name != "__metadata__"]
        for start, stop, name, entry in sorted(entries, key=lambda each: each[:2]):
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            wanted = math.prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else stop - start
            if start != end or stop - start != wanted or stop < start:
                raise ValueError(f"{name} is said to be at bytes {start:,} to {stop:,}")
            tensors[name], end = (dtype, shape, 8 + length + start), stop
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(path, f"its header cannot be read: {type(error).__name__}: {error}") from None
    if size != 8 + length + end:
        raise damaged(path, f"it has {size:,} bytes, its header says {8 + length + end:,}")
    return tensors


def damaged(path: Path, reason: str) -> RecipeError:
    return RecipeError(f"weights file {path}: truncated or not safetensors ({reason})")


def loadable(path: str) -> str:
    """Returns model.path as any program can load it, from any directory: a hub id, or an absolute path."""
    if path in embedded.MODELS:
        return str(embedded.embedded_folder(path))
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def check_weights(model: Model, folder: Path) -> None:
    """Raises RecipeError where a weights file of a `model` that is a local `folder` is missing, or broken at its
    beginning."""
    if model.init == "pretrained" and Path(model.path).is_dir():
        for weights in weights_files(folder):
            with weights.open("rb", buffering=0) as file:
                read_header(weights, file)


def config_folder(model: Model, what: str = "model.path") -> Path:
    """Returns the directory of the config; from the hub it fetches no weights. Raises RecipeError, which names the
    recipe key `what`."""
    return fetch_folder(model.path, model.revision, what, CONFIG_FILES)


def model_folder(model: Model, what: str = "model.path") -> Path:
    """Returns the directory of config and weights (with random weights: of the config). Of the hub's files it fetches
    those that are read: some repositories hold the weights once more, in other files. Raises RecipeError."""
    folder = config_folder(model, what)
    if model.init == "random":
        return folder
    weights = indexed_files(folder) if (folder / INDEX).is_file() else [WEIGHTS]
    return fetch_folder(model.path, model.revision, what, [*CONFIG_FILES, *weights])


def tokenizer_folder(model: Model) -> Path:
    """Returns the directory of the tokenizer: its own, else the model's. Raises RecipeError."""
    path, revision = (model.tokenizer, "main") if model.tokenizer else (model.path, model.revision)
    return fetch_folder(path, revision, "model.tokenizer", CONFIG_FILES)
