"""A run's teacher: whether it can teach this student, and its weights."""

import hashlib
import json
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from shardbook.data.tokenized import load_tokenizer
from shardbook.model.adapters import digest_weights
from shardbook.model.families import load_config
from shardbook.model.hub import CONFIG_FILES, WEIGHT_FILES, fetch_folder, tokenizer_folder
from shardbook.model.weights import load_weights
from shardbook.parallel.sharding import ShardedModel
from shardbook.recipe import Model, Recipe, RecipeError

KEY = "distill.teacher"


def load_teacher(recipe: Recipe) -> PreTrainedConfig | None:
    """The teacher's config; None where the recipe has none. Raises RecipeError where it reads other tokens than the
    student, or not as many."""
    if not (path := recipe.distill.teacher):
        return None
    folder = fetch_folder(path, "main", KEY, CONFIG_FILES)
    config = load_config(Model(path=path), folder, recipe.data.max_length, KEY)
    ours, theirs = load_tokenizer(tokenizer_folder(recipe.model), "model.tokenizer"), load_tokenizer(folder, KEY)
    if (here := digest_tokens(ours)) != (there := digest_tokens(theirs)):
        raise RecipeError(
            f"{KEY} = {path!r}: has another tokenizer than the student (vocabulary and merges {there} there, {here} "
            "here), so its tokens mean something else; choose a teacher of the student's family"
        )
    if len(theirs) > config.vocab_size:
        raise RecipeError(f"{KEY} = {path!r}: has {config.vocab_size} embeddings, its tokenizer {len(theirs)} tokens")
    return config


def digest_tokens(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of what decides which ids a text becomes: vocabulary, merges, how text is split before, tokens that were added.
    Not of templates, nor of what is put around a text."""
    backend: Any = tokenizer
    whole = json.loads(backend.backend_tokenizer.to_str())
    does = {name: whole["model"].get(name) for name in ("type", "vocab", "merges")}
    does |= {name: whole.get(name) for name in ("normalizer", "pre_tokenizer")}
    does["added"] = {token["content"]: token["id"] for token in whole["added_tokens"]}
    return hashlib.sha256(json.dumps(does, sort_keys=True).encode()).hexdigest()[:16]


def fill_teacher(sharded: ShardedModel, recipe: Recipe) -> None:
    """Its weights, where there is one, and what they are. Collective."""
    teacher: Any = getattr(sharded.model, "teacher", None)
    if teacher is not None:
        # ranks of a node ask at once: the hub's files have locks, and one of them downloads
        folder = fetch_folder(recipe.distill.teacher, "main", KEY, [*CONFIG_FILES, *WEIGHT_FILES])
        load_weights(teacher, folder)
        teacher.identity = digest_weights(folder)
