"""Prompts of samples at any length of rows: what leaves no room for an answer is left out, and said."""

import json

import pytest
from data_rows import text_rows
from tiny import config, said_by, tokenizer

from shardbook.data.tokenized import build_documents
from shardbook.recipe import Recipe, RecipeError
from shardbook.recipe.load import parse_recipe
from shardbook.run.prompts import build_prompts

TURNS = [
    {"messages": [{"role": "user", "content": "a" * length}, {"role": "assistant", "content": "b"}]}
    for length in (2, 9)
]
FRAME = len("<?>user\n<?>\n<?>assistant\n".replace("<?>", "."))  # tokens of a turn around its text


def prompts_of(folder, max_length, rows=TURNS, **generate):
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    coder = tokenizer()
    coder.save_pretrained(folder)
    sections = {
        "model": {"path": "there"},
        "train": {"steps": 1},
        "generate": {"steps": 1, "max_new_tokens": 8} | generate,
    }
    sections["data"] = {"train": str(source), "max_length": max_length, "skip_untrainable": True}
    recipe = Recipe.model_validate(sections)
    documents, _ = build_documents(recipe.data, coder, folder, 1)
    return build_prompts(recipe, config(), coder, folder, documents)


@pytest.mark.parametrize(
    ("room", "texts", "words"),
    [
        (9, ["aa", "a" * 9], ""),
        (
            8,
            ["aa"],
            "1 of 2 prompts left out: the longest has {} tokens, which leaves no room for generate.max_new_tokens = 8",
        ),
        (
            1,
            [],
            "2 of 2 prompts left out: the longest has {} tokens, which leaves no room for generate.max_new_tokens = 8",
        ),
    ],
)
def test_prompts_of_the_recipe(room, texts, words, tmp_path):
    length = FRAME + room + 8
    prompts = prompts_of(tmp_path, length, prompts=["aa", "a" * 9])
    assert prompts.texts == texts and [len(ids) for ids in prompts.ids] == [FRAME + len(text) for text in texts]
    assert prompts.left_out == (words.format(FRAME + 9) + f" in data.max_length = {length}" if words else "")


def test_prompts_of_rows(tmp_path):
    prompts = prompts_of(tmp_path, FRAME + 9 + 8, samples=2)
    assert sorted(map(len, prompts.ids)) == [FRAME + 2, FRAME + 9] and (prompts.texts, prompts.left_out) == ([], "")
    prompts = prompts_of(tmp_path, FRAME + 8 + 8, samples=2)
    assert list(map(len, prompts.ids)) == [FRAME + 2]
    answer = f"generate.max_new_tokens = 8 in data.max_length = {FRAME + 16}"
    assert prompts.left_out == f"1 in place of 2: no more of the first 1,000 rows leave room for {answer}"


def test_rows_of_text_have_none(tmp_path):
    refusal = said_by(prompts_of, tmp_path, 64, [{"text": "a quick brown fox"}])
    assert refusal == "generate.samples = 4: rows of text have no prompt; set generate.prompts"


def test_rows_of_text_have_no_prompt_to_continue(tmp_path):
    source = text_rows(tmp_path / "t.jsonl", ["some text", "more"])
    words = [f"data.train={source}", "generate.steps=1", "generate.max_new_tokens=4"]
    recipe = parse_recipe("[train]\nsteps = 1\n", "mine.toml", words)
    coder = tokenizer()
    coder.save_pretrained(tmp_path / "coder")
    documents, _ = build_documents(recipe.data, coder, tmp_path / "coder")
    said = r"generate.samples = 4: rows of text have no prompt; set generate.prompts"
    with pytest.raises(RecipeError, match=said):
        build_prompts(recipe, config(), coder, tmp_path, documents)
