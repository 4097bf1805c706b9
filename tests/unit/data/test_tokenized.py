"""Documents of tokens: what is cut, dropped, held out and packed, and the digest of all of it."""

import json

import numpy as np
import pytest
from data_rows import build, chats, text_rows
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tiny import config, tokenizer, write_chats

import shardbook.data.tokenized as tokenized
from shardbook.data.tokenized import build_documents, check_vocabulary, digest_rows, pack
from shardbook.recipe import Data, RecipeError, list_recipes, load_recipe


def test_held_out_rows_are_a_share_and_never_all(folder):
    rows = text_rows(folder / "t.jsonl", [f"text {number}" for number in range(20)])
    train, held_out = build(folder, train=rows, eval_size=0.1)
    assert (len(held_out.rows) > 0, held_out.totals.examples, train.totals.examples) == (True, 2, 18)
    said = r"eval_size = 64: holds out all of the 20 rows of data.train; set data.eval_size to a share, 0.1, or fewer"
    with pytest.raises(RecipeError, match=said):
        build(folder, train=rows, eval_size=64)
    shipped = {load_recipe(path).data.eval_size for path in list_recipes().values()} - {0}
    for size in shipped:  # every recipe trains on twenty rows of one's own
        train, held_out = build(folder, train=rows, eval_size=size)
        assert held_out.totals.examples >= 1 and train.totals.examples + held_out.totals.examples == 20
    assert shipped


def test_no_advice_that_is_followed_already(folder):
    rows = str(chats(folder / "c.jsonl", {"prompt": "why", "completion": "a"}))
    with pytest.raises(RecipeError, match=r"raise it, or set data.skip_untrainable=true"):
        build(folder, train=rows, max_length=2)
    with pytest.raises(RecipeError, match=r"\(1 of 1 rows\); raise it$"):
        build(folder, train=rows, max_length=2, skip_untrainable=True)


def test_cutting(folder):
    source = text_rows(folder / "t.jsonl", ["x" * 30, "y" * 5])
    documents, _ = build(folder, train=source, max_length=16, packing=False)
    assert documents.encoded["length"][:] == [16, 6]
    assert documents.encoded["trained"][:] == [15, 5]
    assert documents.summary == "2 documents in 2 rows; 22 tokens, 20 of them trained; 1 documents cut to 16"


def test_rows_that_lose_every_trained_token(folder):
    chat = [{"role": "user", "content": "u" * 50}, {"role": "assistant", "content": "a"}]
    short = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    (folder / "c.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in (short, chat, short)))
    with pytest.raises(RecipeError, match=r"data.train: row 1: data.max_length = 40 .*\(1 of 3 rows\); raise it"):
        build(folder, train=str(folder / "c.jsonl"), max_length=40)
    documents, _ = build(folder, train=str(folder / "c.jsonl"), max_length=40, skip_untrainable=True, packing=False)
    assert documents.rows == [(0,), (2,)]
    assert documents.summary.endswith("1 documents without a trained token dropped")
    with pytest.raises(RecipeError, match=r"row 0: data.max_length = 8 .*\(3 of 3 rows\)"):
        build(folder, train=str(folder / "c.jsonl"), max_length=8, skip_untrainable=True)


def test_held_out_rows(folder):
    write_chats(folder / "a.jsonl", 20)
    source = str(folder / "a.jsonl")
    for size, held in ((4, 4), (0.25, 5)):
        train, test = build(folder, train=source, eval_size=size, packing=False)
        chosen = [row[0] for row in test.rows]
        assert len(chosen) == held
        assert sorted(chosen + [row[0] for row in train.rows]) == list(range(20))
    with pytest.raises(RecipeError, match=r"data.eval_size = 20: holds out all of the 20 rows"):
        build(folder, train=source, eval_size=20)
    _, test = build(folder, train=source, eval=source)
    assert sum(len(row) for row in test.rows) == 20


def test_pairs_of_a_row_and_what_is_trained_of_them(folder):
    row = {"instruction": "Hi", "chosen": "ok", "rejected": "never"}
    (folder / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    data = Data(train=str(folder / "pairs.jsonl"))
    (pair,) = build_documents(data, tokenizer(), folder / "coder", sequences=2)[0].encoded.to_list()
    assert pair["lengths"][1] - pair["lengths"][0] == 3 and pair["trained"] == 2 + 1 + 5 + 1
    with pytest.raises(RecipeError, match=r"data.train_on = 'all': a preference is between answers"):
        build_documents(data.model_copy(update={"train_on": "all"}), tokenizer(), folder / "coder", sequences=2)


def test_a_pair_of_which_one_side_is_not_trained_is_none(folder):
    """Cut so short that the longer prompt's answers are gone, or one of them."""
    rows = [{"prompt": "a", "chosen": "b" * 40, "rejected": "c"}, {"prompt": "a" * 40, "chosen": "b", "rejected": "c"}]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(train=str(folder / "pairs.jsonl"), max_length=20)
    with pytest.raises(RecipeError, match=r"row 1: data.max_length = 20 leaves it without a trained token"):
        build_documents(data, tokenizer(), folder / "coder", sequences=2)
    skips = data.model_copy(update={"skip_untrainable": True})
    documents, _ = build_documents(skips, tokenizer(), folder / "coder", sequences=2)
    assert documents.rows == [(0,)] and documents.totals == (19 + 2, 1, 19)
    (folder / "same.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "b"}) + "\n")
    with pytest.raises(RecipeError, match="row 0: chosen and rejected are the same"):
        build_documents(Data(train=str(folder / "same.jsonl")), tokenizer(), folder / "coder", sequences=2)


def test_a_pair_whose_tokens_are_equal_is_none(folder):
    """They differ only behind the cut: what is left has no better answer."""
    rows = [{"prompt": "a", "chosen": "b" * 40 + end, "rejected": "b" * 40 + "d"} for end in ("c", "cc")]
    rows.append({"prompt": "a", "chosen": "b", "rejected": "c"})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(train=str(folder / "pairs.jsonl"), max_length=20)
    said = r"row 0: data.max_length = 20 leaves it .*, or with equal answers \(2 of 3 rows\)"
    with pytest.raises(RecipeError, match=said):
        build_documents(data, tokenizer(), folder / "coder", sequences=2)
    skips = data.model_copy(update={"skip_untrainable": True})
    documents, _ = build_documents(skips, tokenizer(), folder / "coder", sequences=2)
    assert documents.rows == [(2,)] and documents.totals == (4, 1, 2)
    assert documents.summary.endswith(
        "; 2 pairs without a trained token in each answer, or with equal answers, dropped"
    )
    whole, _ = build_documents(data.model_copy(update={"max_length": 43}), tokenizer(), folder / "coder", sequences=2)
    assert whole.totals.examples == 3 and "cut" in whole.summary  # cut, and still not equal


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_packing_keeps_every_document_once_and_fits(lengths):
    rows = pack(list(range(len(lengths))), lengths, 40)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    used = [sum(lengths[document] for document in row) for row in rows]
    assert max(used) <= 40
    # best fit decreasing never needs more than 11/9 of the best plus 1 (Johnson 1973); the best needs sum / 40
    half_full = sum(1 for n in used if n <= 20)
    assert half_full <= 1, "two half-empty rows would fit in one"


def test_a_token_that_no_sample_reads_changes_the_digest(tmp_path, monkeypatch):
    """Of equal length, in a document that is not among the sampled ones."""
    monkeypatch.setattr(tokenized, "SAMPLED", 2)
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    digests = []
    for name, word in (("one", "b"), ("same", "b"), ("other", "c")):
        said = ["a", word, "a"]
        rows = [{"prompt": "x", "completion": each} for each in said]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = Data(train=str(tmp_path / f"{name}.jsonl"), max_length=64)
        digests.append(build_documents(data, tokenizer(), tmp_path / "tokenizer")[0].digest.split("-"))
    one, same, other = digests
    assert one == same and one[0] == other[0] and one[1] != other[1]


def test_the_digest_of_data_is_of_tokens_and_counts():
    def digest(rows, documents, trained):
        counts = [np.array([len(rows[d]) for d in documents]), np.array(trained)]
        encoded = Dataset.from_dict({"input_ids": rows, "other": list(range(len(rows)))})
        return digest_rows(encoded, np.array(documents), *counts)

    rows = [[1, 2, 3], [4, 5], [6]]
    base = digest(rows, [0, 1, 2], [2, 1, 1])
    assert base == digest([*rows, [9]], [0, 1, 2], [2, 1, 1]) and len(base) == 16
    others = [
        ([[1, 2, 3], [4, 7], [6]], [0, 1, 2], [2, 1, 1]),
        (rows, [0, 2, 1], [2, 1, 1]),
        (rows, [0, 1, 2], [1, 1, 1]),
    ]
    assert len({base, *(digest(*other) for other in others)}) == 4
    # int64, little-endian: not what this machine or a version of datasets happens to store
    assert base == "bcce7d9c06f0fc2c"


def test_a_tokenizer_larger_than_the_model_is_refused():
    check_vocabulary(tokenizer(), config(vocab=259))
    with pytest.raises(RecipeError, match=r"model.tokenizer: has 259 tokens, the model 258 embeddings"):
        check_vocabulary(tokenizer(), config(vocab=258))
