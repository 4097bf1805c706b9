"""Rows of JSON files: what is encoded is the file's own JSON, and what is no JSON is named by file, line and key."""

import gzip
import io
import json
import os

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tiny import tokenizer

from shardbook.data import sources
from shardbook.data.json_rows import read_json_rows
from shardbook.data.sources import load_sources, read_raw
from shardbook.data.tokenized import build_documents
from shardbook.recipe import Data, RecipeError


def read(text, suffix=".jsonl"):
    content = text if isinstance(text, bytes) else text.encode()
    return list(read_json_rows(io.BytesIO(content), f"rows{suffix}", suffix))


def rows_of(path):
    (source,) = load_sources(str(path), "data.train")
    return read_raw(source.table.to_dict(), source.renames, source.is_json)


# ---- values

SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
SIMPLE |= st.dates().map(str) | st.datetimes().map(str) | st.sampled_from(["", "null", "NaN", "1e5", "\u2028", "\x00"])
VALUES = st.recursive(SIMPLE, lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside), max_leaves=6)
ROWS = st.lists(st.dictionaries(st.text(), VALUES, min_size=1, max_size=4), min_size=1, max_size=4)


@examples(max_examples=200)
@given(rows=ROWS, ascii_only=st.booleans(), indent=st.sampled_from([None, 0, 3]))
def test_rows_are_what_json_reads_however_they_are_written(rows, ascii_only, indent):
    """Values, their kinds, and the order of keys: repr tells 1 from 1.0 and from true."""
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    long = [json.dumps(row, ensure_ascii=ascii_only, indent=indent) for row in rows]
    files = {
        ".jsonl": "\ufeff" + "\r\n\n".join(lines),
        ".json": json.dumps(rows, ensure_ascii=ascii_only, indent=indent),
    }
    for suffix, text in [*files.items(), (".json", "\n".join(lines)), (".json", " ".join(long))]:
        parsed = read(text, suffix)
        assert repr([json.loads(row.text) for row in parsed]) == repr(rows)
        assert [list(json.loads(row.fields)) for row in parsed] == [list(row) for row in rows]
    assert [row.text for row in read(files[".jsonl"])] == lines  # to the letter


CHATML = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}\
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LETTERS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(
    LETTERS, st.recursive(SIMPLE, lambda inside: st.lists(inside) | st.dictionaries(LETTERS, inside), max_leaves=4)
)


@st.composite
def conversations(draw):
    """A row with tools and one or two calls, whose arguments are any tables."""
    names = draw(
        st.lists(st.sampled_from(["look_up", "add_numbers", "send_mail"]), min_size=1, max_size=2, unique=True)
    )
    calls = [{"type": "function", "function": {"name": name, "arguments": draw(ARGUMENTS)}} for name in names]
    tools = [{"type": "function", "function": {"name": name, "parameters": draw(ARGUMENTS)}} for name in names]
    asked = {"role": "user", "content": draw(LETTERS)}
    return {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": calls}], "tools": tools}


def test_two_hundred_rows_of_tool_calls_are_trained_as_the_template_writes_them(tmp_path):
    """Compared is the text that transformers renders of json.loads, with the tokens that are trained on."""
    drawn = []

    @examples(max_examples=200)
    @given(row=conversations())
    def make(row):
        drawn.append(row)

    make()
    assert len(drawn) >= 200
    coder = tokenizer(CHATML)
    coder.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in drawn))
    (tmp_path / "rows.json").write_text(json.dumps(drawn, indent=1, ensure_ascii=False))
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    texts = [coder.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False) for row in lines]
    expected = [coder(text, add_special_tokens=False)["input_ids"] for text in texts]
    for name in ("rows.jsonl", "rows.json"):
        data = Data(train=str(tmp_path / name), max_length=1_000_000)
        documents, _ = build_documents(data, coder, tmp_path / "model")
        assert documents.encoded["input_ids"][:] == expected


NULL = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"a": None, "b": 1}}]}


def test_a_null_of_the_file_is_trained_and_one_of_a_table_is_not(tmp_path):
    """A table of columns has a null wherever another row has a key, so that none of them is a row's own for certain."""
    row = {"messages": [{"role": "user", "content": "x"}, NULL]}
    coder = tokenizer(CHATML)
    coder.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    for name, arguments in (("rows.jsonl", '{"a": null, "b": 1}'), ("rows.parquet", '{"b": 1}')):
        documents, _ = build_documents(Data(train=str(tmp_path / name)), coder, tmp_path / "model")
        assert f"<call>f {arguments}<|im_end|>" in coder.decode(documents.encoded[0]["input_ids"])
        note = "where messages.tool_calls.arguments.a is null it is left out, also where the row wrote null itself"
        assert (note in documents.summary) == name.endswith(".parquet")


# ---- whole files


def test_rows_are_no_dates_and_no_traces(tmp_path):
    """Text that looks like a date is text, and names of columns mean nothing."""
    answers = [{"instruction": "when", "output": f"2024-05-{day:02d}"} for day in range(1, 10)]
    messages = [{"role": "user", "content": "2024-05-01"}, {"role": "assistant", "content": "2024-05-01T10:00:00Z"}]
    traces = [
        {"id": "a", "source": "b", "model": "m", "system_prompt": "s", "messages": messages, "cwd": "/", "type": "user"}
    ]
    for name, rows in (("answers", answers), ("traces", traces)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert rows_of(tmp_path / f"{name}.jsonl") == rows


def test_files_of_unlike_keys_and_kinds_are_read(tmp_path):
    first = [{"messages": [{"role": "user", "content": "x"}], "id": 1}, {"text": "2024-05-01"}]
    second = [
        {"messages": [{"role": "user", "content": "x", "weight": 0}], "id": "one"},
        {"text": None, "more": [1, "a"]},
    ]
    for name, rows in (("a", first), ("b", second)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert rows_of(tmp_path) == first + second
    (source,) = load_sources(str(tmp_path), "data.train")
    kinds = {"messages": {"a list"}, "id": {"a number", "text"}, "text": {"text"}, "more": {"a list"}}
    assert source.fields == kinds and len(source) == 4
    assert source.table["place"][:] == [f"line {line} of {name}.jsonl" for name in "ab" for line in (1, 2)]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_key_that_comes_after_ten_megabytes_is_read(tmp_path, suffix):
    rows = [{"text": "x" * 1000}] * 11_000 + [{"text": "y", "weight": 0.1}]
    path = tmp_path / f"long{suffix}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) if suffix == ".jsonl" else json.dumps(rows))
    assert path.stat().st_size > 11_000_000
    assert rows_of(path) == rows


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.csv", "rows.parquet"])
def test_a_file_that_changes_is_read_again_though_its_time_does_not(tmp_path, name):
    path = tmp_path / name

    def write(text):
        if path.suffix == ".parquet":
            Dataset.from_list([{"text": text}]).to_parquet(path)
        else:
            content = (f"text\n{text}\n" if path.suffix == ".csv" else json.dumps({"text": text})).encode()
            path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
        os.utime(path, (1_700_000_000, 1_700_000_000))

    write("before")
    assert rows_of(path) == [{"text": "before"}]
    write("behind")  # as long
    assert rows_of(path) == [{"text": "behind"}]


def test_a_copy_elsewhere_is_the_same_table(tmp_path):
    """Machines whose files are alike name their tables alike."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text('{"text": "a"}\n')
    tables = [load_sources(str(tmp_path / folder / "rows.jsonl"), "data.train")[0].table for folder in "ab"]
    assert tables[0]._fingerprint == tables[1]._fingerprint and tables[0].cache_files == tables[1].cache_files


def test_json_of_the_hub_is_read_as_local_files_are(tmp_path, monkeypatch):
    """Stood in for by a folder, which `datasets` looks through as it does through a repository."""
    rows = [{"text": "2024-05-01", "n": 1}, {"text": "b", "n": 2.5}, {"text": "c"}]
    (tmp_path / "hub").mkdir()
    for split, some in (("train", rows), ("test", rows[1:])):
        (tmp_path / "hub" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (tmp_path / "tables").mkdir()
    Dataset.from_list(rows[:1]).to_parquet(tmp_path / "tables" / "train.parquet")
    for name in ("load_dataset_builder", "load_dataset"):
        real = getattr(sources, name)
        local = lambda hub_id, subset, real=real, **more: real(  # noqa: E731
            str(tmp_path / hub_id.partition("/")[2]), subset, **more
        )
        monkeypatch.setattr(sources, name, local)
    for spec, expected in (("owner/hub", rows), ("owner/hub:test", rows[1:]), ("owner/tables", rows[:1])):
        (source,) = load_sources(spec, "data.train")
        assert repr(read_raw(source.table.to_dict(), source.renames, source.is_json)) == repr(expected)
        assert source.is_json == ("hub" in spec)
    assert repr(rows_of("owner/hub:test+train")) == repr([*rows[1:], *rows])
    (tmp_path / "parts").mkdir()
    subsets = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("one", "two"))
    (tmp_path / "parts" / "README.md").write_text(f"---\nconfigs:\n{subsets}---\n")
    for name, row in (("one", rows[0]), ("two", rows[1])):
        (tmp_path / "parts" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    assert rows_of("owner/parts:two:train") == [rows[1]] and rows_of("owner/parts:one:") == [rows[0]]
    said = r"'owner/parts:train': names no subset, and it has 'one', 'two'; write owner/parts:subset:train"
    with pytest.raises(RecipeError, match=said):
        load_sources("owner/parts:train", "data.train")
    with pytest.raises(RecipeError, match="must be owner/name, owner/name:split or owner/name:subset:split"):
        load_sources("owner/parts:one:train:test", "data.train")
    with pytest.raises(RecipeError, match=r"the hub did not give it .*Unknown split"):
        load_sources("owner/hub:valid", "data.train")

    def unreachable(hub_id, subset):
        raise ConnectionError("no network")

    monkeypatch.setattr(sources, "load_dataset_builder", unreachable)  # then what came before is read
    assert rows_of("owner/hub") == rows and rows_of("owner/hub:test") == rows[1:]
    with pytest.raises(RecipeError, match=r"the hub did not give it .*no network"):
        load_sources("owner/other", "data.train")


# ---- what is refused

BAD = {
    '{"a": 1, "b": 2, "a": 3}': "has the key 'a' twice in one table",
    '{"messages": [{"role": "user", "role": "user"}]}': "has the key 'role' twice in one table",
    '{"a": {"b": [1, -1e999]}}': "a.b[1] is -1e999, a number beyond float64, or 4300 digits",
    '{"a": [{"b": 1.0E-400}]}': "a[0].b is 1.0E-400, a number beyond float64, or 4300 digits",
    f'{{"a": 1{"0" * 4300}}}': f"a is 1{'0' * 39}, a number beyond float64, or 4300 digits",
    r'{"messages": [{"content": "half \ud83d"}]}': "messages[0].content holds half of a character",
    r'{"\uDC00": 1}': "a key of the row holds half of a character",
    r'{"\uDC00": "\ud83d"}': r"\udc00 holds half of a character",
    '{"a": 1} [2]': "is no table of fields",
    '{"a": 1,}': "Illegal trailing comma before end of object: column 8",
    '{"a": 1': "Expecting ',' delimiter: column 8",
    "{'a': 1}": "Expecting property name enclosed in double quotes: column 2",
    "[1, 2]": "is no table of fields",
    '"text"': "is no table of fields",
    "[" * 100_000: "holds tables in tables deeper than can be read",
}


@pytest.mark.parametrize("line", BAD)
def test_what_is_no_row_is_named_by_file_line_and_key(line, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "a"}}\n\n{line}\n')
    with pytest.raises(RecipeError) as refused:
        load_sources(str(path), "data.train")
    beginning = f"data.train = {str(path)!r}: cannot be read as json (line 3 of rows.jsonl: "
    if "column" in BAD[line]:  # each Python says it in words of its own
        assert str(refused.value).startswith(beginning) and "column" in str(refused.value)
    else:
        assert str(refused.value).startswith(beginning + BAD[line]), refused.value


def test_numbers_that_only_python_writes_and_rows_that_share_a_line_are_read():
    text = '{"a": NaN} {"a": [-Infinity, 0e-400, 1E5, -0.0]}\r{"a": 3}\n{}{"a": 4}'
    assert repr([json.loads(row.text) for row in read(text)]) == (
        "[{'a': nan}, {'a': [-inf, 0.0, 100000.0, -0.0]}, {'a': 3}, {}, {'a': 4}]"
    )
    assert [row.place for row in read(text)] == [f"line {line} of rows.jsonl" for line in (1, 1, 1, 2, 2)]


def test_a_pair_of_halves_is_a_character_and_a_backslash_is_none():
    text = r'{"a": "\ud83d\ude00 \\ud83d"}'
    assert [json.loads(row.text) for row in read(text)] == [{"a": "\U0001f600 \\ud83d"}]


LISTS = {
    '[{"a": 1}\n{"a": 2}]': (2, "Expecting ',' or ']' after a row of the list"),
    '[{"a": 1},\n]': (2, "Expecting a row after ','"),
    '[{"a": 1},\n\n{"a": 2}': (3, "the list of rows is not closed"),
    '[{"a": 1}]\n[{"a": 2}]': (2, "goes on after the list of rows: '[{\"a\": 2}]'"),
    '[{"a": 1},\n {"b": 1e999}]': (2, "b is 1e999"),
    '[{"a": 1},\n 2]': (2, "is no table of fields"),
    '{"a":\n 1}\n{"a": \n x}': (4, "Expecting value: column 2"),
}


@pytest.mark.parametrize("text", LISTS)
def test_what_is_wrong_in_a_list_is_named_by_its_line(text):
    line, message = LISTS[text]
    with pytest.raises(ValueError) as refused:
        read(text, ".json")
    assert str(refused.value).startswith(f"line {line} of rows.json: {message}"), refused.value


def test_text_that_is_no_utf_8_is_named_by_its_line():
    for suffix in (".jsonl", ".json"):
        with pytest.raises(ValueError, match=rf"^line 2 of rows{suffix}: not UTF-8: byte 0xfc after .*'"):
            read(b'{"text": "a"}\n{"text": "gr\xfc"}\n', suffix)


def test_a_row_that_cannot_be_trained_is_named_by_its_number_line_and_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "b.jsonl").write_text('\n{"text": "x"}\n{"text": " "}\n')
    coder = tokenizer(CHATML)
    coder.save_pretrained(tmp_path / "model")
    message = r"^data.train: row 2: text is empty \(line 3 of b.jsonl\)$"
    with pytest.raises(RecipeError, match=message):
        build_documents(Data(train=str(tmp_path / "*.jsonl")), coder, tmp_path / "model")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_column_that_the_first_row_lacks_is_one_that_another_row_has(tmp_path, suffix):
    rows = [{"instruction": "a", "output": "b", "more": None}, {"instruction": "c", "output": "d", "more": "e"}]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        del rows[0]["more"]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(train=str(path), columns={"input": "more"})
    (source,) = load_sources(str(path), "data.train", data.columns)
    assert read_raw(source.table.to_dict(), source.renames, source.is_json)[1]["input"] == "e"


def test_text_beside_numbers_under_other_names_needs_no_template(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "ab", "chosen": true, "prompt": 3}\n')
    coder = tokenizer(None)
    coder.save_pretrained(tmp_path / "model")
    assert len(build_documents(Data(train=str(tmp_path / "rows.jsonl")), coder, tmp_path / "model")[0].encoded) == 1


def test_files_of_one_name_in_several_folders_are_told_apart(tmp_path):
    for folder, text in (("a", "x"), ("b", " ")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n")
    coder = tokenizer(CHATML)
    coder.save_pretrained(tmp_path / "model")
    with pytest.raises(RecipeError, match=r"row 1: text is empty \(line 1 of b/rows.jsonl\)$"):
        build_documents(Data(train=str(tmp_path / "**" / "*.jsonl")), coder, tmp_path / "model")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_packed_file_that_is_cut_or_none_is_refused(tmp_path, suffix):
    pack = gzip.compress if suffix == ".gz" else pytest.importorskip("zstandard").compress
    rows = b"".join(b'{"text": "%d"}\n' % (number * 7919) for number in range(60_000))
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(pack(rows[:400_000]) + pack(rows[400_000:]))  # two frames
    assert len(load_sources(str(path), "data.train")[0]) == 60_000
    for content in (path.read_bytes()[:-100], pack(rows)[: len(pack(rows)) * 2 // 3], rows):
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=r"rows.jsonl\.\w+ cannot be "):
            load_sources(str(path), "data.train")


def test_an_empty_list_has_no_rows(tmp_path):
    (tmp_path / "rows.json").write_text(" [ ] ")
    with pytest.raises(RecipeError, match="holds no rows"):
        load_sources(str(tmp_path / "rows.json"), "data.train")
