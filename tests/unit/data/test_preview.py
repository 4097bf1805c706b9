"""A look at the data: it shows the tokens that the loader gives, and its counts are theirs."""

import json

import numpy as np
import pytest
from tiny import tokenizer, write_chats

from shardbook import cli
from shardbook.compare.data_page import write_data_page
from shardbook.data.loader import Loader, choose_batching
from shardbook.data.preview import _bars, _pieces, as_text, show_preview, take_preview
from shardbook.data.tokenized import build_documents
from shardbook.parallel.mesh import DataRank
from shardbook.recipe import load_recipe


@pytest.fixture
def place(tmp_path):
    """A tokenizer, two sources and a recipe of them."""
    tokenizer().save_pretrained(tmp_path / "coder")
    write_chats(tmp_path / "a.jsonl", 12)
    turns = [{"from": "human", "value": "grüß <b>dich</b>"}, {"from": "gpt", "value": "ok 🙂"}]
    (tmp_path / "b.jsonl").write_text(json.dumps({"conversations": turns}) + "\n")
    both = f'["{tmp_path}/a.jsonl", "{tmp_path}/b.jsonl"]'
    text = f'[model]\ntokenizer = "{tmp_path}/coder"\n[data]\ntrain = {both}\nmax_length = 128\n[train]\nsteps = 1\n'
    (tmp_path / "look.toml").write_text(text)
    return tmp_path


def look_at(place, *words, rows=2, sequences=1):
    recipe = load_recipe(place / "look.toml", ["data.skip_untrainable=true", *words])
    return take_preview(recipe.data, recipe.train, tokenizer(), place / "coder", rows, sequences), recipe


def test_tokens_are_text_again_and_a_character_of_several_is_one_piece():
    text = "grüß 🙂\x1b[31m.\n"
    ids = tokenizer()(text)["input_ids"]
    pieces = _pieces(ids, [False] * len(ids), tokenizer())
    assert "".join(piece.text for piece in pieces) == text.replace("\x1b", "\ufffd")
    assert [piece.tokens for piece in pieces] == [1, 1, 2, 2, 1, 4, *[1] * 7] and len(pieces) == len(text)
    half = _pieces(ids[:3], [False, False, True], tokenizer())  # cut within a character
    assert [(piece.text, piece.trained) for piece in half] == [("g", False), ("r", False), ("\ufffd", True)]


def test_what_is_shown_is_what_is_trained(place):
    look, _ = look_at(place)
    (name, (one,)) = look.examples[-1]
    assert name == f"{place}/b.jsonl, row 0" and len(look.examples) == 3
    said = "<|im_start|>user\ngrüß <b>dich</b><|im_end|>\n<|im_start|>assistant\n⟦ok 🙂<|im_end|>⟧\n"
    assert as_text(one, is_plain=True).plain == said
    assert "".join(piece.text for piece in one.pieces if piece.trained) == "ok 🙂<|im_end|>"
    assert (one.tokens, one.trained) == (len(tokenizer()(said)["input_ids"]) - 6, 8)  # two brackets of three bytes


@pytest.mark.parametrize("words", [[], ["data.weights=[1, 1]"], ["data.packing=false", "data.max_length=64"]])
def test_counts_are_those_of_the_rows(place, words):
    batch = 3 if "data.packing=false" in words else 1
    look, recipe = look_at(place, *words, f"train.per_device_train_batch_size={batch}", "data.eval_size=3")
    documents, held_out = build_documents(recipe.data, tokenizer(), place / "coder")
    *parts, together, held = look.parts
    assert len(parts) == 2 and len(held.lengths) == held_out.totals.examples == 3
    assert held.trained == held_out.totals.tokens and together.trained == documents.totals.tokens
    encoded = documents.encoded.to_list()
    numbers = [number for row in documents.rows for number in row]
    assert together.lengths.sum() == sum(encoded[number]["length"] for number in numbers)
    assert together.cut == sum(encoded[number]["cut"] for number in numbers)
    assert [len(part.lengths) for part in parts] == [
        sum(number < 12 for number in numbers),
        sum(number >= 12 for number in numbers),
    ]
    assert sum(count for _, _, count in look.bars) == len(numbers)
    # padding, by the loader itself: an epoch of whole micro-batches
    batching = choose_batching(recipe.data, recipe.train, DataRank(), "cuda", documents)
    loader, rows = Loader(documents, batching, 1, recipe.train.seed), len(documents.rows)
    assert rows % batch == 0
    micros = [micro for start in range(0, rows, batch) for micro in loader.step_at(start)]
    tokens = sum(micro.input_ids.numel() for micro in micros)
    assert f"; {1 - together.lengths.sum() / tokens:.1%} of " in look.summary


def test_what_is_dropped_of_held_out_rows_is_counted(place):
    long = {"messages": [{"role": "user", "content": "a" * 500}, {"role": "assistant", "content": "b"}]}
    short = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (place / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (long, short, long)))
    look, _ = look_at(place, f"data.eval={place}/held.jsonl")
    assert (len(look.parts[-1].lengths), look.parts[-1].dropped) == (1, 2)
    look, _ = look_at(place, "data.eval_size=2", f"data.train={place}/held.jsonl", "data.eval_size=0")
    assert look.parts[-1].dropped == 2  # of train


def test_pairs_stand_one_under_the_other(place, capsys):
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3 or 4"}] * 2
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    look, _ = look_at(place, f"data.train={place}/pairs.jsonl", sequences=2, rows=1)
    ((_, (chosen, rejected)),) = look.examples
    assert chosen.title == "chosen: 6 tokens, 2 of them trained"
    assert rejected.title == "rejected: 11 tokens, 7 of them trained"
    assert look.bars == [(n, n, {6: 2, 11: 2}.get(n, 0)) for n in range(12)]
    show_preview(look)
    out = capsys.readouterr().out
    assert "1+1=⟦2<|endoftext|>⟧" in out and out.index("chosen: 6") < out.index("rejected: 11")


def test_a_histogram_has_round_ranges_and_every_length():
    for most in (1, 11, 12, 119, 4096, 131072):
        bars = _bars(np.array([1, most]))
        assert len(bars) <= 12 and sum(count for *_, count in bars) == 2 and bars[-1][0] <= most <= bars[-1][1]


def test_a_long_sequence_is_shown_by_its_ends(place):
    (place / "b.jsonl").write_text(json.dumps({"text": "x" * 3000}) + "\n")
    look, _ = look_at(place, f"data.train={place}/b.jsonl", "data.max_length=4096")
    said = as_text(look.examples[0][1][0], is_plain=False).plain
    assert said.startswith("x" * 800 + "\n[... 2,001 tokens ...]\n" + "x" * 199 + "<|endoftext|>")


def test_the_command(place, capsys):
    words = ["data", str(place / "look.toml"), "--rows", "1", "data.skip_untrainable=true"]
    assert cli.main([*words, "--html", str(place / "page.html")]) == 0
    out = capsys.readouterr().out
    for part in ("b.jsonl, row 0", "⟦ok 🙂<|im_end|>⟧", "together", "of rows of 128 tokens is padding", "█"):
        assert part in out
    page = (place / "page.html").read_text()
    assert "grüß" not in page and "&lt;b&gt;" in page.replace("</span><span>", "")  # a byte a token here
    assert "<mark>🙂</mark>" in page and '<td class="bar"' in page and "src=" not in page and "<script" not in page
    for wrong, said in (
        (["--html", str(place / "page.html")], "page.html: exists; name a new file"),
        (["--rows", "-1"], "--rows -1: must be at least 0"),
        (["data.train=/nowhere.jsonl"], "data.train = '/nowhere.jsonl': no such file"),
        (["data.max_length=8"], "leaves it without a trained token"),
    ):
        assert cli.main([*words, *wrong]) == 2
        captured = capsys.readouterr()
        assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_page_of_hostile_names(place):
    look, _ = look_at(place, rows=0)
    write_data_page(place / "page.html", "a <b>&amp;</script>", look)
    assert "<h1>a &lt;b&gt;&amp;amp;&lt;/script&gt;</h1>" in (place / "page.html").read_text()
