"""A run's teacher: whether it can teach this student, and its weights."""

import hashlib
import json
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from shardbook.model.adapters import digest_weights
from shardbook.model.hub import model_folder
from shardbook.model.weights import load_weights
from shardbook.parallel.sharding import ShardedModel
from shardbook.ranks.distributed import gather_results
from shardbook.recipe import Recipe, RecipeError

KEY = "distill.teacher"


def check_teacher(
    path: str, config: PreTrainedConfig, theirs: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises RecipeError where the tokenizer of a teacher, `theirs`, differs from the student's `tokenizer`, or its
    `config` has fewer embeddings than tokens."""
    if (digest := digest_tokens(tokenizer)) != (their_digest := digest_tokens(theirs)):
        raise RecipeError(
            f"{KEY} = {path!r}: has another tokenizer than the student (vocabulary and merges {their_digest} there, "
            f"{digest} here), so its tokens mean something else; choose a teacher of the student's family"
        )
    if len(theirs) > config.vocab_size:
        raise RecipeError(f"{KEY} = {path!r}: has {config.vocab_size} embeddings, its tokenizer {len(theirs)} tokens")


def digest_tokens(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a digest of everything that decides a text's token ids: vocabulary, merges, normalizer, pre-tokenizer and
    added tokens; not of templates, nor of special tokens around a text."""
    backend: Any = tokenizer
    serialized = json.loads(backend.backend_tokenizer.to_str())
    does = {name: serialized["model"].get(name) for name in ("type", "vocab", "merges")}
    does |= {name: serialized.get(name) for name in ("normalizer", "pre_tokenizer")}
    does["added"] = {token["content"]: token["id"] for token in serialized["added_tokens"]}
    return hashlib.sha256(json.dumps(does, sort_keys=True).encode()).hexdigest()[:16]


def fill_teacher(sharded: ShardedModel, recipe: Recipe) -> None:
    """Loads the teacher's weights, where this rank has them, and notes their digest, where the recipe names one.
    Raises RecipeError, on every rank, where one of them cannot. Collective."""
    model: Any = sharded.model
    if recipe.distill.teacher:
        # ranks of a node ask at once: the hub's files have locks, and one of them downloads
        folder = model_folder(recipe.distill.model, KEY)
        gather_results(lambda: load_weights(model.teacher, folder) if model.teacher else None, (RecipeError,))
        model.teacher_identity = digest_weights(folder)
