"""Tiny real things: a byte-level tokenizer with a chat template, models of each family, conversations, a recipe."""

import itertools
import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from shardbook.data.chat import Encoder
from shardbook.recipe import RecipeError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a byte, three special ones: 259 in all."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIALS)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    made.chat_template = template
    return made


def encode_row(row: dict, coder: PreTrainedTokenizerFast, where: str, **settings) -> tuple[list[int], list[bool]]:
    """Token ids and trained mask of one row, uncut. `settings`: of an Encoder."""
    (encoded,) = Encoder(coder, **settings).encode([row], [where])
    return encoded.ids.tolist(), encoded.mask.tolist()


def trained_text(row: dict, template: str | None = CHATML, **settings) -> list[str]:
    """The trained tokens as text, one string for each run of them. `settings`: of an Encoder."""
    coder = tokenizer(template)
    ids, mask = encode_row(row, coder, "row 7", **settings)
    runs = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [coder.decode([i for i, _ in run]) for trained, run in runs if trained]


def said_by(function, *given, **named) -> str:
    """The one line with which it refuses."""
    with pytest.raises(RecipeError) as caught:
        function(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def config(family: str = "llama", tied: bool = True, vocab: int = 259, **changes):
    facts = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.08,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if family in ("mistral", "phi3"):
        facts["sliding_window"] = None
    if family == "granite":  # far from one, so that each is seen
        facts |= {"embedding_multiplier": 3.0, "logits_scaling": 2.5}
        facts |= {"residual_multiplier": 0.4, "attention_multiplier": 0.2}
    if family == "smollm3":
        facts |= {"no_rope_layer_interval": 2}
    return AutoConfig.for_model(family, **(facts | changes))


def write_model(folder: Path, family: str = "llama", tied: bool = True, vocab: int = 259, **changes) -> Path:
    """A Hugging Face directory with random weights (seed 0) in fp32, and the tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family, tied, vocab, **changes), dtype=torch.float32)
    with torch.no_grad():  # norms and biases away from 1 and 0, so that a lost one shows
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_all(folder: Path) -> None:
    """What every test may read: `model` (tied), `untied` (odd vocabulary), `padded` (the letter e is its padding, whose
    embedding is not trained) and `chats.jsonl`."""
    write_model(folder / "model")
    write_model(folder / "untied", tied=False, vocab=287)
    write_model(folder / "padded", pad_token_id=tokenizer().convert_tokens_to_ids("e"))
    write_chats(folder / "chats.jsonl", 40)


def write_chats(path: Path, count: int, seed: int = 0) -> Path:
    """Conversations of one to three exchanges, of very different lengths."""
    words = ["yes", "no", "why", "tell me more", "the quick brown fox", "jumps over", "a lazy dog", "42"]
    dice = random.Random(seed)
    rows = []
    for _ in range(count):
        messages = []
        for _ in range(dice.randint(1, 3)):
            messages.append({"role": "user", "content": " ".join(dice.choices(words, k=dice.randint(1, 4)))})
            messages.append({"role": "assistant", "content": " ".join(dice.choices(words, k=dice.randint(1, 6)))})
        rows.append({"messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


RECIPE = """
[model]
path = "{tiny}/model"
[data]
train = "{tiny}/chats.jsonl"
eval_size = 2
max_length = 128
skip_untrainable = true
[optim]
learning_rate = 3e-3
eps = 1e-3
weight_decay = 0.1
max_grad_norm = 0
lr_scheduler_type = "constant"
[train]
steps = 5
[run]
dir = "{out}"
report_to = "none"
"""


def write_recipe(tiny: Path, out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "tiny.toml"
    # a GPU computes in bf16 unless it is told: numbers are compared in fp32
    path.write_text(
        RECIPE.format(tiny=tiny, out=out) + '[precision]\nparams = "fp32"\n' * ("SHARDBOOK_TEST_STREAMS" in os.environ)
    )
    return path


def write_pairs(path: Path, count: int, seed: int = 0) -> Path:
    """Preferences of one or two exchanges, whose two answers are of unlike length."""
    words = ["yes", "no", "why", "tell me more", "the quick brown fox", "jumps over", "a lazy dog", "42"]
    dice, rows = random.Random(seed), []
    for number in range(count):
        prompt = [{"role": "user", "content": " ".join(dice.choices(words, k=dice.randint(1, 4)))}]
        if dice.random() < 0.5:
            prompt += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "and?"}]
        said = [f"{number} " + " ".join(dice.choices(words, k=dice.randint(1, 5))) for _ in range(2)]
        answers = [[{"role": "assistant", "content": each}] for each in said]
        rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def edit_weights(folder, edit):
    """Writes the weights in `folder` anew, after `edit` has changed the tensors by name."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
