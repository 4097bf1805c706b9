"""A slice of a source: the rows that `datasets` has by the same words, of every kind of source."""

import json

import pytest
from datasets import Dataset, load_dataset

from shardbook.data import sources
from shardbook.data.find import find_files
from shardbook.data.slices import split_slice
from shardbook.data.sources import load_sources, read_raw
from shardbook.recipe import RecipeError

ROWS = [{"text": f"row {number}"} for number in range(13)]
SLICES = ["[:5]", "[5:]", "[2:9]", "[:20%]", "[20%:]", "[33%:67%]", "[:100%]", "[:99]", "[1:50%]", "[:]"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "rows.csv").write_text("text\n" + "".join(row["text"] + "\n" for row in ROWS))
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    return tmp_path


def rows_of(spec):
    return [
        row
        for one in load_sources(spec, "data.train")
        for row in read_raw(one.table.to_dict(), one.renames, one.is_json)
    ]


@pytest.mark.parametrize("part", SLICES)
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_slice_has_the_rows_that_datasets_has(part, kind, folder):
    path = str(folder / f"rows.{kind}")
    reader = "json" if kind == "jsonl" else kind
    expected = load_dataset(reader, data_files=path, split=f"train{part}").to_list()
    assert rows_of(f"{path}{part}") == expected


def test_a_slice_of_a_hub_id_is_of_its_split(folder, monkeypatch):
    for name in ("load_dataset_builder", "load_dataset"):
        real = getattr(sources, name)
        local = lambda hub_id, subset, real=real, **more: real(str(folder), subset, **more)  # noqa: E731
        monkeypatch.setattr(sources, name, local)
    (folder / "rows.csv").unlink()
    (folder / "rows.parquet").unlink()
    (folder / "rows.jsonl").rename(folder / "train.jsonl")
    for spec in ("owner/name[:3]", "owner/name:train[:3]", "owner/name:default:train[:3]"):
        assert rows_of(spec) == ROWS[:3], spec


def test_slices_of_a_list_are_each_sources(folder):
    path = str(folder / "rows.jsonl")
    assert rows_of([f"{path}[:1]", f"{path}[12:]"]) == [ROWS[0], ROWS[12]]
    one, other = (load_sources(f"{path}{part}", "data.train")[0].table for part in ("[:2]", "[1:3]"))
    assert one._fingerprint != other._fingerprint  # by which tokenised rows are kept


def test_a_pattern_with_brackets_is_no_slice(folder):
    for name in ("rows.[j]sonl", "[r]ows.jsonl"):
        assert split_slice(str(folder / name), "data.train") == (str(folder / name), None)
        assert [path.name for path in find_files(str(folder / name), "data.train").paths] == ["rows.jsonl"]
    assert rows_of(f"{folder}/rows.[j]sonl[:2]") == ROWS[:2]
    (folder / "odd[:1]").mkdir()
    (folder / "odd[:1]" / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1]) + "\n")
    assert rows_of(f"{folder}/odd[:1]") == ROWS[:2]  # a folder of that name


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        ("[13:]", "this slice of it holds no rows"),
        ("[20:]", "this slice of it holds no rows"),
        ("[5:5]", "this slice of it holds no rows"),
        ("[9:2]", "this slice of it holds no rows"),
        ("[:101%]", "percents are at most 100"),
        ("[:5][:2]", "a slice is of one split; write a list of sources"),
        ("[-3:]", r"a slice behind a name is \[start:stop\]"),
        ("[:half]", r"a slice behind a name is \[start:stop\]"),
        (":test", "a file or a directory has no splits"),
    ],
)
def test_what_is_no_slice_is_refused(behind, words, folder):
    with pytest.raises(RecipeError, match=words):
        load_sources(f"{folder}/rows.jsonl{behind}", "data.train")


def test_a_sum_of_splits_has_no_slice():
    with pytest.raises(RecipeError, match="a slice is of one split"):
        find_files("owner/name:train+test[:10]", "data.train")


def test_a_name_that_no_file_can_have_is_no_slice():
    with pytest.raises(RecipeError):
        find_files("x" * 300 + "[:2]", "data.train")
