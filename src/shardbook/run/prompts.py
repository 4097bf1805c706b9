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
    """The prompts of a run's samples, which may be none."""

    ids: list[list[int]]
    stops: list[int]  # tokens that end an answer
    texts: list[str]  # of the recipe, one for each; none where rows begin with them
    left_out: str = ""  # words on those that leave no room for an answer


def build_prompts(
    recipe: Recipe, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, folder: Path, documents: Documents
) -> Prompts:
    """Returns the prompts, the same in every step; none where generate.steps is 0. `folder`: the model's. Prompts that
    leave no room for an answer are left out. Raises RecipeError where rows hold no prompt."""
    asked, room = recipe.generate, recipe.data.max_length - recipe.generate.max_new_tokens
    if not asked.steps:
        return Prompts([], [], [])
    encoder = build_encoder(tokenizer, recipe.data)
    every = [encoder.prompt(text, f"generate.prompts: {text!r}") for text in asked.prompts]
    fitting = [(text, ids) for text, ids in zip(asked.prompts, every, strict=True) if len(ids) <= room]
    texts, ids = [text for text, _ in fitting], [ids for _, ids in fitting]
    if not asked.prompts:
        ids = _prompts_of_rows(documents, asked.samples, room)
    left_out = ""
    if lacking := asked.count - len(ids):
        answer = f"for generate.max_new_tokens = {asked.max_new_tokens} in data.max_length = {recipe.data.max_length}"
        if asked.prompts:
            longest = f"the longest has {max(map(len, every))} tokens, which leaves no room {answer}"
            left_out = f"{lacking} of {asked.count} prompts left out: {longest}"
        else:
            left_out = (
                f"{len(ids)} in place of {asked.count}: no more of the first {LOOKED_AT:,} rows leave room {answer}"
            )
    return Prompts(ids, find_stops(tokenizer, config, folder, encoder), texts, left_out)


def _prompts_of_rows(documents: Documents, count: int, room: int) -> list[list[int]]:
    """Returns what the first rows with at most `room` tokens before their first trained one begin with, at most `count`
    of them. Raises RecipeError where no row has a token before it."""
    begun, prompts = 0, list[list[int]]()
    for number in nsmallest(LOOKED_AT, chain.from_iterable(documents.rows)):
        row = documents.encoded[number]
        ids = row["input_ids"][: row["mask"].index(True)]
        begun += bool(ids)
        if 0 < len(ids) <= room and len(prompts) < count:
            prompts.append(ids)
    if not begun:
        raise RecipeError(f"generate.samples = {count}: rows of text have no prompt; set generate.prompts")
    return prompts


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
