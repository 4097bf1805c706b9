"""Sources: every kind of file gives the same rows, what cannot be read is named, and a mixture has its shares."""

import csv
import gzip
import importlib.util
import json

import numpy as np
import pytest
from data_rows import build, chats, rows_of, text_rows
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tiny import tokenizer, write_chats

from shardbook.data.sources import load_sources, mix
from shardbook.data.tokenized import build_documents
from shardbook.recipe import Data, RecipeError


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
