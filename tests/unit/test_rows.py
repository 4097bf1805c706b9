"""From sources to micro-batches: reading, caching, packing, order."""

import csv
import gzip
import importlib.util
import json
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tiny import CHATML, config, tokenizer, write_chats

import shardbook.data.encoding as encoding
import shardbook.data.tokenized as tokenized
from shardbook.data.encoding import load_tokenizer
from shardbook.data.loader import Batching, Loader, build_micro_batch, eval_micro_batches, permute
from shardbook.data.sources import load_sources, mix, read_raw
from shardbook.data.tokenized import Documents, build_documents, check_vocabulary, digest_rows, pack
from shardbook.recipe import Data, RecipeError, list_recipes, load_recipe
from shardbook.recipe.load import parse_recipe
from shardbook.run.directory import RunDirectory, first_day, read_facts
from shardbook.run.prompts import build_prompts


def text_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def folder(tmp_path):
    tokenizer().save_pretrained(tmp_path / "coder")
    return tmp_path


def rows_of(source):
    return read_raw(source.table.to_dict(), source.renames, source.is_json)


def build(folder, **data):
    return build_documents(Data(**data), tokenizer(), folder / "coder")


# ---- sources


def test_every_local_kind_of_source_gives_the_same_rows(folder):
    write_chats(folder / "a.jsonl", 6)
    rows = rows_of(load_sources(str(folder / "a.jsonl"), "data.train")[0])
    (folder / "shards").mkdir()
    Dataset.from_list(rows[:4]).to_parquet(folder / "shards" / "0.parquet")
    Dataset.from_list(rows[4:]).to_parquet(folder / "shards" / "1.parquet")
    Dataset.from_list(rows).save_to_disk(folder / "saved")
    for name in ("shards", "saved", "shards/*.parquet", "**/[01].parquet"):
        assert rows_of(load_sources(str(folder / name), "data.train")[0]) == rows
    both = load_sources([str(folder / "a.jsonl"), str(folder / "saved")], "data.train")
    assert [rows_of(part) for part in both] == [rows, rows]


def test_unusable_sources_are_named(folder):
    empty, broken = folder / "empty.jsonl", folder / "broken.jsonl"
    empty.write_text("")
    broken.write_text('{"text": \n')
    (folder / "nothing").mkdir()
    (folder / "blank.jsonl").write_text("\n \n")
    (folder / "list.jsonl").write_text('{"text": "a"}\n\n[1, 2]\n')
    (folder / "table.xls").write_text("a,b")
    (folder / "twice.csv").write_text("a,text,a\n1,2,3\n")
    (folder / "cut.parquet").write_bytes(b"PAR1 and no more")
    (folder / "odd.parquet").write_bytes(b"PAR1 and a wrong footer PAR1")
    cases = {
        str(folder / "absent.jsonl"): "no such file",
        str(folder / "absent"): "no such directory",
        str(folder / "table.xls"): "this kind of file is not read",
        "": "needs a file",
        "chitchatt": "no such directory, and not a hub id",
        str(empty): "holds no rows",
        str(broken): r"cannot be read as json \(line 1 of broken.jsonl: Expecting value",
        str(
            folder / "cut.parquet"
        ): r"cut.parquet cannot be read \(truncated, or not parquet: it does not end with PAR1\)",
        str(folder / "odd.parquet"): r"cannot be read as parquet \(.+; where the file is whole, delete its copy in /",
        str(folder / "blank.jsonl"): "holds no rows",
        str(folder / "list.jsonl"): r"cannot be read as json \(line 3 of list.jsonl: is no table of fields\)",
        str(
            folder / "twice.csv"
        ): r"cannot be read as csv \(twice.csv: its first line has the column 'a' twice; [^;]+\)$",
        str(folder / "nothing"): "no file that ends with .jsonl, .json, .parquet, .csv, .tsv",
    }
    for name, message in cases.items():
        with pytest.raises(RecipeError, match=r"data.train = .*" + message):
            load_sources(name, "data.train")
    with pytest.raises(
        RecipeError, match=r"data.eval = 'owner/name:test': the hub did not give it .*HF_TOKEN.*local file"
    ):
        load_sources("owner/name:test", "data.eval")


def test_tables_and_packed_files_give_the_rows_that_their_text_says(folder):
    """Also numbers, dates, empty cells and what pandas would take for a missing value."""
    rows = [{"prompt": "1 + 1, and?\nsay", "completion": "2"}, {"prompt": "when", "completion": "2024-01-01"}]
    rows += [{"prompt": "what", "completion": "NA"}, {"prompt": "", "completion": 'a "b"'}]
    for suffix, separator in ((".csv", ","), (".tsv", "\t")):
        with (folder / f"rows{suffix}").open("w", newline="", encoding="utf-8-sig") as file:
            table = csv.DictWriter(file, ["prompt", "completion"], delimiter=separator)
            table.writeheader()
            table.writerows(rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "rows.CSV.gz").write_bytes(gzip.compress((folder / "rows.csv").read_bytes()))
    (folder / "tables").mkdir()
    for number in (1, 2):
        (folder / "tables" / f"{number}.csv").write_bytes((folder / "rows.csv").read_bytes())
    for name in ("rows.csv", "rows.tsv", "rows.CSV.gz", "rows.jsonl.gz"):
        assert rows_of(load_sources(str(folder / name), "data.train")[0]) == rows, name
    assert rows_of(load_sources(str(folder / "tables"), "data.train")[0]) == rows * 2


def test_zst_is_read_where_its_package_is_installed(folder, monkeypatch):
    path = folder / "rows.jsonl.zst"
    path.write_bytes(b"(\xb5/\xfd")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RecipeError, match=r"reading .zst needs the package zstandard: pip install zstandard"):
            load_sources(str(path), "data.train")
    zstandard = pytest.importorskip("zstandard")
    path.write_bytes(zstandard.compress(b'{"text": "a"}\n'))
    assert rows_of(load_sources(str(path), "data.train")[0]) == [{"text": "a"}]


def test_columns_of_other_names_are_the_fields_that_the_recipe_says(folder):
    (folder / "a.csv").write_text("id,question,answer\n1,why,because\n")
    text_rows(folder / "b.jsonl", ["more"])
    columns = {"prompt": "question", "completion": "answer"}
    documents, _ = build(folder, train=[str(folder / "a.csv")], columns=columns)
    plain, _ = build_documents(
        Data(train=str(chats(folder / "c.jsonl", {"prompt": "why", "completion": "because"}))),
        tokenizer(),
        folder / "coder",
    )
    assert documents.digest == plain.digest
    for spec, said in (
        (str(folder / "b.jsonl"), r"data.columns = .*b.jsonl' has no column question; it has text"),
        ([str(folder / "a.csv"), str(folder / "b.jsonl")], r"b.jsonl' has no column question; it has text"),
    ):
        with pytest.raises(RecipeError, match=said):
            build(folder, train=spec, columns=columns)
    both = [str(folder / "a.csv"), str(folder / "c.jsonl")]
    assert len(build(folder, train=both, columns=columns)[0].encoded) == 2  # the second has the fields by their names


def chats(path, row):
    path.write_text(json.dumps(row) + "\n")
    return path


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


def test_text_that_is_not_utf_8_is_named(folder):
    (folder / "latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "gr\xfc"}\n')
    with pytest.raises(RecipeError, match=r"line 2 of latin.jsonl: not UTF-8: byte 0xfc after '..text.: .gr'"):
        build(folder, train=str(folder / "latin.jsonl"))


def test_bad_rows_are_named_by_their_number_in_the_source(folder):
    rows = [{"text": "fine", "prompt": None}, {"text": None, "prompt": "lonely"}, {"text": "fine", "prompt": None}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        RecipeError,
        match=r"data.train: row 1: has the fields prompt; nearest to prompt and completion: lacks completion",
    ):
        build(folder, train=str(folder / "rows.jsonl"), eval_size=1)


def test_messages_need_a_template(folder):
    write_chats(folder / "a.jsonl", 3)
    with pytest.raises(RecipeError, match=r"rows hold messages, .* no chat template; .* or data.chat_template to a"):
        build_documents(Data(train=str(folder / "a.jsonl")), tokenizer(None), folder / "coder")


def test_rows_of_text_have_no_prompt_to_continue(folder):
    source = text_rows(folder / "t.jsonl", ["some text", "more"])
    words = [f"data.train={source}", "generate.steps=1", "generate.max_new_tokens=4"]
    recipe = parse_recipe("[train]\nsteps = 1\n", "mine.toml", words)
    coder = tokenizer()
    documents, _ = build_documents(recipe.data, coder, folder / "coder")
    said = r"generate.samples = 4: rows of text have no prompt; set generate.prompts"
    with pytest.raises(RecipeError, match=said):
        build_prompts(recipe, config(), coder, folder, documents)


# ---- encoding


def test_a_day_that_no_template_reads_is_refused(folder):
    write_chats(folder / "a.jsonl", 2)
    with pytest.raises(RecipeError, match=r"data.chat_template_date = 2024-05-01: the chat template reads no clock"):
        build(folder, train=str(folder / "a.jsonl"), chat_template_date="2024-05-01")


def test_the_first_day_is_that_of_the_run(folder, monkeypatch):
    """Also of a run that was stopped before its first step; then that of the checkpoint it begins with, also behind a
    link, or where its checkpoints are; a checkpoint that is in no run has none."""
    monkeypatch.chdir(folder)
    run, elsewhere = folder / "runs" / "one", folder / "disk" / "step-000002"
    for made in (run, elsewhere):
        made.mkdir(parents=True)
    (run / "checkpoints").symlink_to(folder / "disk")
    (run / "resolved.toml").write_text('[data]\nchat_template_date = "2020-01-01"\n')
    (folder / "latest").symlink_to(run / "checkpoints" / "step-000002")
    for way in (run / "checkpoints" / "step-000002", "runs/one/checkpoints/step-000002"):
        assert first_day({}, way) == "2020-01-01"
    for way in ("", "/ckpt", folder / "else"):
        assert first_day({}, way) == first_day(read_facts(folder / "new"), way) == str(date.today())
    RunDirectory("new", folder / "new", finished_steps=0, is_held=False).open(keep=2, saved=0, day="2021-02-03")
    assert first_day(read_facts(folder / "new"), run / "checkpoints" / "step-000002") == "2021-02-03"


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


def test_a_system_prompt_for_text_is_refused(folder):
    source = text_rows(folder / "t.jsonl", ["x"])
    with pytest.raises(RecipeError, match=r"data.system = 'Be kind.': only conversations .* data.train holds text"):
        build(folder, train=source, system="Be kind.")
    write_chats(folder / "a.jsonl", 2)
    mixed, _ = build(folder, train=[source, str(folder / "a.jsonl")], system="Be kind.")
    assert mixed.totals.examples == 3


# ---- mixtures


def test_columns_of_sources_need_not_fit(folder):
    """Each is encoded by itself: an unused column of another type, flags, calls, a prompt of messages beside text."""
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok"}
    rows = [
        {"messages": [user, answer], "id": 1},
        {"messages": [user, answer | {"train": True, "name": "x"}], "id": "a"},
        {"prompt": "1+1=", "completion": "2", "id": {"of": 1}},
        {"prompt": [user], "completion": [answer], "id": [1]},
        {"text": "all"},
    ]
    sources = [str(folder / f"{number}.jsonl") for number in range(len(rows))]
    for source, row in zip(sources, rows, strict=True):
        (folder / source).write_text(2 * (json.dumps(row) + "\n"))
    apart = [build(folder, train=source)[0] for source in sources]
    together, _ = build(folder, train=sources)
    assert together.encoded.to_list() == [row for part in apart for row in part.encoded.to_list()]
    assert [source.rows for source in together.sources] == [2, 2, 2, 2, 2]
    (folder / "bad.jsonl").write_text('{"text": "x"}\n{"text": " "}\n')
    with pytest.raises(RecipeError, match=r"^data.train, .*/bad.jsonl: row 1: text is empty"):
        build(folder, train=[sources[0], str(folder / "bad.jsonl")])
    chat = [{"role": "user", "content": "u" * 50}, answer]
    (folder / "long.jsonl").write_text(json.dumps(rows[0]) + "\n" + json.dumps({"messages": chat}) + "\n")
    with pytest.raises(RecipeError, match=r"^data.train, .*/long.jsonl: row 1: data.max_length = 62 .*\(1 of 6 rows\)"):
        build(folder, train=[sources[0], sources[1], str(folder / "long.jsonl")], max_length=62)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=4), st.data())
def test_a_mixture_has_each_source_s_share_evenly(counts, dice):
    weights = [dice.draw(st.integers(1, 20)) for _ in counts]
    total, starts = sum(counts), np.cumsum([0, *counts])
    exact = np.array(weights) / sum(weights) * total
    if min(exact) < 1:
        return
    mixed = mix(np.arange(total), counts, weights)
    assert len(mixed) == total and (mix(np.arange(total), counts, weights) == mixed).all()
    for start, count, share in zip(starts, counts, exact, strict=False):
        times = np.bincount(mixed[(mixed >= start) & (mixed < start + count)] - start, minlength=count)
        assert abs(times.sum() - share) < 1  # largest remainder
        assert times.max() - times.min() <= 1
        taken = np.flatnonzero(times == times.max())
        gaps = np.diff([*taken, taken[0] + count])
        assert times.max() == times.min() or gaps.max() - gaps.min() <= 1


def test_weights_as_large_as_a_float_can_be():
    assert mix(np.arange(8), [4, 4], [1e308, 1e308]).tolist() == list(range(8))
    assert mix(np.arange(8), [4, 4], [1.5e308, 0.5e308]).tolist() == mix(np.arange(8), [4, 4], [3, 1]).tolist()


def test_weights(folder):
    many = text_rows(folder / "many.jsonl", [f"{'m' * 5}{n}" for n in range(9)])
    few = text_rows(folder / "few.jsonl", [f"few{n}" for n in range(3)])
    plain, _ = build(folder, train=[many, few], max_length=16)
    assert sorted(document for row in plain.rows for document in row) == list(range(12))
    mixed, _ = build(folder, train=[many, few], weights=[1, 3], max_length=16)
    documents = sorted(document for row in mixed.rows for document in row)
    assert documents == [0, 3, 6, *[9] * 3, *[10] * 3, *[11] * 3]
    assert max(sum(mixed.encoded[document]["length"] for document in row) for row in mixed.rows) <= 16
    assert mixed.totals.examples == 12 and mixed.sources == ((many, 9, "", ()), (few, 3, "", ()))
    held, test = build(folder, train=[many, few], weights=[1, 3], eval_size=4)  # held out before, each once
    seen, unseen = ({document for row in part.rows for document in row} for part in (held, test))
    assert len(unseen) == 4 and not seen & unseen
    with pytest.raises(RecipeError, match=r"data.weights = \[1000, 1\]: 3 rows of source 1 .* 0 are its share"):
        build(folder, train=[many, few], weights=[1000, 1])


# ---- packing and order


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_packing_keeps_every_document_once_and_fits(lengths):
    rows = pack(list(range(len(lengths))), lengths, 40)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    used = [sum(lengths[document] for document in row) for row in rows]
    assert max(used) <= 40
    # best fit decreasing never needs more than 11/9 of the best plus 1 (Johnson 1973); the best needs sum / 40
    half_full = sum(1 for n in used if n <= 20)
    assert half_full <= 1, "two half-empty rows would fit in one"


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 50))
def test_order_is_a_permutation(size, seed, epoch):
    assert sorted(permute(index, size, seed, epoch) for index in range(size)) == list(range(size))


def test_order_depends_on_seed_and_epoch_and_looks_random():
    def order(seed, epoch):
        return np.array([permute(i, 1000, seed, epoch) for i in range(1000)])

    base = order(1, 0)
    for other in (order(2, 0), order(1, 1), np.arange(1000)):
        assert (base == other).sum() < 10  # two random permutations agree in one place on average
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.1  # three standard deviations of 1/sqrt(1000)


def fake_documents(count: int) -> Documents:
    rows = [{"input_ids": [number] * 3, "mask": [True] * 3} for number in range(count)]
    return Documents(Dataset.from_list(rows), [(number,) for number in range(count)], 3.0, "")


def seen(ranks: int, accumulation: int, batch: int, steps: int, start: int = 0) -> list[list[int]]:
    """The documents of each step, over all ranks, in stream order."""
    loaders = [Loader(fake_documents(11), Batching(None, batch, r, ranks), accumulation, 5) for r in range(ranks)]
    result = []
    for loader in loaders:
        loader.load_state_dict(loader.state_dict() | {"consumed_rows": start})
    for _ in range(steps):
        micros = [loader.step_at(loader.consumed_rows) for loader in loaders]
        for loader in loaders:
            loader.consumed_rows += loader.rows_per_step
        order = [micros[rank][m].input_ids[:, 0].tolist() for m in range(accumulation) for rank in range(ranks)]
        result.append([document for part in order for document in part])
    return result


def test_a_step_is_the_same_rows_for_every_split():
    whole = seen(1, 1, 12, 4)
    assert seen(4, 1, 3, 4) == seen(2, 3, 2, 4) == seen(3, 4, 1, 4) == whole
    assert seen(2, 3, 2, 2, start=24) == whole[2:]  # seeking gives the tail of the straight run
    stream = [document for step in whole for document in step]
    assert sorted(stream[:11]) == sorted(stream[11:22]) == list(range(11))  # each epoch is every row once
    assert stream[:11] != stream[11:22]


def test_a_place_in_another_stream_is_refused():
    loader = Loader(fake_documents(11), Batching(None, 1, 0, 1), 1, seed=5)
    for other in ({"rows": 12}, {"seed": 6}):
        with pytest.raises(RecipeError, match=r"the checkpoint was made with .* this recipe has 11 rows and seed 5"):
            loader.load_state_dict(loader.state_dict() | other)


def test_other_data_of_as_many_rows_is_refused():
    loader = Loader(replace(fake_documents(11), digest="ours"), Batching(None, 1, 0, 1), 1, seed=5)
    with pytest.raises(
        RecipeError, match=r"made with other data \(theirs there, ours here; as many rows\): keep \[data\]"
    ):
        loader.load_state_dict(loader.state_dict() | {"data": "theirs"})
    loader.load_state_dict(loader.state_dict() | {"consumed_rows": 3})
    assert loader.consumed_rows == 3


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


def test_a_packed_micro_batch():
    documents = Dataset.from_list(
        [
            {"input_ids": [5, 6, 7], "mask": [False, True, True]},
            {"input_ids": [8, 9], "mask": [True, True]},
            {"input_ids": [3, 4], "mask": [False, False]},
        ]
    )
    micro = build_micro_batch(documents, [(0, 1), (2,)], Batching(6, 2, 0, 1, documents=2, multiple=1))
    assert micro.input_ids.tolist() == [[5, 6, 7, 8, 9, 0], [3, 4, 0, 0, 0, 0]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0]]
    # where documents begin, then padding, in either row, and the end as often as there is room for documents
    assert micro.cu_seqlens.tolist() == [0, 3, 5, 6, 8, 12, 12] and micro.cu_seqlens.dtype == torch.int32
    assert (micro.packed, micro.pairs) == (True, 9 + 4 + 4)
    # 7 does not predict 8: the first token of a document has no past, even where its mask is on
    assert (micro.positions.tolist(), micro.targets.tolist()) == ([0, 1, 3], [6, 7, 9])


@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 3), (4, 2), (16, 1)])
def test_evaluation_sees_every_row_once_and_ranks_agree_on_the_count(ranks, batch):
    documents = fake_documents(11)
    every = [list(eval_micro_batches(documents, Batching(None, batch, rank, ranks))) for rank in range(ranks)]
    assert len({len(micros) for micros in every}) == 1
    assert all(micro.ends.dtype == torch.int64 for micros in every for micro in micros)  # also where it has no row
    targets = torch.cat([micro.targets for micros in every for micro in micros])
    assert sorted(targets.tolist()) == sorted(list(range(11)) * 2)
