"""Files beside an export's weights, of a whole model or an adapter: its padding, and the tokens that end an answer.

Invariant: what a model was trained with travels with it: whoever loads the export scores and stops as the run did.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def choose_padding(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, ends: set[int]) -> None:
    """Sets, for both, a token for padding that ends no row: transformers reads the score at the last token that is no
    padding, and without such a token scores only one answer at a time."""
    special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
    known = [tokenizer.pad_token_id if tokenizer.pad_token else None, config.pad_token_id, *special]
    config.pad_token_id = next((token for token in known if token is not None and token not in ends), None)
    if config.pad_token_id is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)


def write_generation(
    out: Path, folder: Path, config: PreTrainedConfig, stops: Sequence[int], always: bool = False
) -> None:
    """Writes the generation_config.json of `folder`, with `stops` where it or the config lacks one: a chat template
    that was learned may end answers with another token than the base model's. `always`: also where it says what the
    config says, for an adapter, which has no config."""
    source = folder / "generation_config.json"
    ids = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    words = json.loads(source.read_text()) if source.is_file() else {k: v for k, v in ids.items() if v is not None}
    ends = words.get("eos_token_id", ids["eos_token_id"])
    if not {*stops} <= {*(ends if isinstance(ends, list) else [ends])}:
        (out / source.name).write_text(json.dumps(words | {"eos_token_id": [*stops]}, indent=2) + "\n")
    elif source.is_file():
        shutil.copy(source, out)
    elif always:
        (out / source.name).write_text(json.dumps(words, indent=2) + "\n")
