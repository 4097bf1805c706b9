"""The prompts of samples: messages of the recipe, or rows up to their first trained answer."""

import json
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from shardbook.data.chat import Encoder
from shardbook.data.tokenized import Documents
from shardbook.recipe import Data, Recipe, RecipeError

LOOKED_AT = 1000  # documents searched for prompts


@dataclass(frozen=True)
class Prompts:
    ids: list[list[int]]
    stops: list[int]  # tokens that end an answer


def build_prompts(
    recipe: Recipe, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, folder: Path, documents: Documents
) -> Prompts:
    """Returns the prompts, the same in every step; none where generate.steps is 0. `folder`: the model's. Raises
    RecipeError where a prompt leaves no room for an answer, or rows hold no prompt."""
    asked, room = recipe.generate, recipe.data.max_length - recipe.generate.max_new_tokens
    if not asked.steps:
        return Prompts([], [])
    encoder = build_encoder(tokenizer, recipe.data)
    said = f"generate.max_new_tokens = {asked.max_new_tokens} and data.max_length = {recipe.data.max_length}"
    way_out = "lower the first, or raise the second"
    found = [encoder.prompt(text, f"generate.prompts: {text!r}") for text in asked.prompts]
    for text, ids in zip(asked.prompts, found, strict=True):
        if len(ids) > room:
            raise RecipeError(f"{said}: the prompt {text[:40]!r} has {len(ids)} tokens; {way_out}")
    if not asked.prompts:
        begun = 0
        for number in nsmallest(LOOKED_AT, chain.from_iterable(documents.rows)):
            row = documents.encoded[number]
            ids = row["input_ids"][: row["mask"].index(True)]
            begun += bool(ids)
            if 0 < len(ids) <= room and len(found) < asked.samples:
                found.append(ids)
        if not begun:
            raise RecipeError(f"generate.samples = {asked.samples}: rows of text have no prompt; set generate.prompts")
        if len(found) < asked.samples:
            raise RecipeError(
                f"generate.samples = {asked.samples}: {len(found)} rows have a prompt that leaves room for an answer "
                f"({said}); ask for fewer, or set generate.prompts"
            )
    return Prompts(found, find_stops(tokenizer, config, folder, encoder))


def build_encoder(tokenizer: PreTrainedTokenizerBase, data: Data) -> Encoder:
    return Encoder(tokenizer, data.system, data.train_on, data.chat_template_kwargs, data.chat_template_date)


def find_stops(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, folder: Path, encoder: Encoder
) -> list[int]:
    """Returns the tokens that end a sequence by generation_config.json, else by config and tokenizer, and the end of
    turn if it is one token: a model that learns the template writes it before its own config lists it."""
    file, ends = folder / "generation_config.json", list[Any]()
    if file.is_file():
        ends = [json.loads(file.read_text()).get("eos_token_id")]
    if ends in ([], [None]):
        ends = [config.eos_token_id, tokenizer.eos_token_id]
    if tokenizer.chat_template:
        turn = tokenizer(encoder.template.end_of_turn(), add_special_tokens=False)["input_ids"]
        ends += [turn] * (len(turn) == 1)
    flat = chain.from_iterable(end if isinstance(end, list) else [end] for end in ends)
    return sorted({end for end in flat if end is not None})


def find_learned_stops(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, folder: Path, data: Data
) -> list[int]:
    """Returns the stops of a model that was trained; none where the chat template, whatever it is of, refuses."""
    try:
        return find_stops(tokenizer, config, folder, build_encoder(tokenizer, data))
    except RecipeError:
        return []
