"""Encoding: rows become tokens once, and each setting that changes a token is another encoding."""

import json
from datetime import date

import pytest
from data_rows import build, text_rows
from datasets import Dataset
from tiny import CHATML, tokenizer, write_chats

import shardbook.data.encoding as encoding
import shardbook.data.tokenized as tokenized
from shardbook.data.encoding import load_tokenizer
from shardbook.data.tokenized import build_documents
from shardbook.recipe import Data, RecipeError


def test_messages_need_a_template(folder):
    write_chats(folder / "a.jsonl", 3)
    with pytest.raises(RecipeError, match=r"rows hold messages, .* no chat template; .* or data.chat_template to a"):
        build_documents(Data(train=str(folder / "a.jsonl")), tokenizer(None), folder / "coder")


def test_a_day_that_no_template_reads_is_refused(folder):
    write_chats(folder / "a.jsonl", 2)
    with pytest.raises(RecipeError, match=r"data.chat_template_date = 2024-05-01: the chat template reads no clock"):
        build(folder, train=str(folder / "a.jsonl"), chat_template_date="2024-05-01")


def test_text_is_tokenised_once_whatever_day_it_is(folder, monkeypatch):
    """Its template may read the clock, and is not used."""
    dated = tokenizer("{{ strftime_now('%d') }}" + CHATML)
    dated.save_pretrained(folder / "dated")
    data = Data(train=text_rows(folder / "a.jsonl", ["abc", "de"]))
    first, _ = build_documents(data, dated, folder / "dated")
    monkeypatch.setattr(encoding, "_cached_encoder", None)  # a second encoding would fail
    monkeypatch.setattr(tokenized, "date", type("Clock", (date,), {"today": classmethod(lambda _: date(2020, 1, 1))}))
    again, _ = build_documents(data, dated, folder / "dated")
    assert again.digest == first.digest and "clock" not in first.summary


def test_encoding_is_cached(folder, monkeypatch):
    write_chats(folder / "a.jsonl", 6)
    first, _ = build(folder, train=str(folder / "a.jsonl"))
    monkeypatch.setattr(encoding, "_cached_encoder", None)  # a second encoding would fail
    again, _ = build(folder, train=str(folder / "a.jsonl"))
    assert again.encoded.to_list() == first.encoded.to_list()
    with pytest.raises(TypeError):
        build(folder, train=str(folder / "a.jsonl"), max_length=100)  # another encoding


def test_long_rows_are_encoded_a_few_at_a_time(folder, monkeypatch):
    """As many as fit, one at least; tokens do not depend on it."""
    together, whole = [], Dataset.map

    def spied(self, function, **named):
        together.append(named["batch_size"])
        return whole(self, function, **named)

    monkeypatch.setattr(Dataset, "map", spied)
    train = text_rows(folder / "long.jsonl", ["a" * 1000, "b" * 900, "c" * 1100])
    found = []
    for most in (4_000_000, 2_500, 10):
        monkeypatch.setattr(encoding, "BYTES_TOGETHER", most)
        found.append(build(folder, train=train, max_length=2048)[0].encoded.to_list())
    assert together == [512, 2, 1] and found[0] == found[1] == found[2]


def test_every_setting_that_changes_tokens_is_another_encoding(folder):
    rows = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}] * 2
    (folder / "c.jsonl").write_text(json.dumps({"messages": rows}) + "\n")
    shouting = CHATML.replace("<|im_start|>{{", "{% if loud and message.role == 'user' %}!{% endif %}<|im_start|>{{")
    (folder / "loud.jinja").write_text(shouting)
    loud = {"chat_template": str(folder / "loud.jinja")}
    settings = [{}, {"system": "Be kind."}, {"train_on": "last"}, {"train_on": "all"}, loud]
    settings += [loud | {"chat_template_kwargs": {"loud": True}}]
    found = []
    for more in settings:
        (document,) = build(folder, train=str(folder / "c.jsonl"), **more)[0].encoded.to_list()
        found.append((tokenizer().decode(document["input_ids"]), sum(document["mask"])))
    plain, system, last, every, template, shouted = found
    assert system == ("<|im_start|>system\nBe kind.<|im_end|>\n" + plain[0], 4) and plain[1] == 4
    assert last == (plain[0], 2) and every == (plain[0], len(tokenizer()(plain[0])["input_ids"]))
    assert template == plain and shouted == (plain[0].replace("<|im_start|>user", "!<|im_start|>user"), 4)
    assert load_tokenizer(folder / "coder", "model.tokenizer", loud["chat_template"]).chat_template == shouting


def test_a_template_for_a_tokenizer_without_one(folder):
    write_chats(folder / "a.jsonl", 3)
    tokenizer(None).save_pretrained(folder / "bare")
    (folder / "chatml.jinja").write_text(CHATML)
    data = Data(train=str(folder / "a.jsonl"), chat_template=str(folder / "chatml.jinja"))
    documents, _ = build_documents(data, tokenizer(None), folder / "bare")
    with_own, _ = build(folder, train=str(folder / "a.jsonl"))
    assert documents.encoded.to_list() == with_own.encoded.to_list()


def test_a_system_prompt_for_text_is_refused(folder):
    source = text_rows(folder / "t.jsonl", ["x"])
    with pytest.raises(RecipeError, match=r"data.system = 'Be kind.': only conversations .* data.train holds text"):
        build(folder, train=source, system="Be kind.")
    write_chats(folder / "a.jsonl", 2)
    mixed, _ = build(folder, train=[source, str(folder / "a.jsonl")], system="Be kind.")
    assert mixed.totals.examples == 3
