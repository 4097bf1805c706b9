"""Rows of data for tests: written, read back and encoded."""

import json

from tiny import tokenizer

from shardbook.data.sources import read_raw
from shardbook.data.tokenized import build_documents
from shardbook.recipe import Data


def text_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def rows_of(source):
    return read_raw(source.table.to_dict(), source.renames, source.is_json)


def build(folder, **data):
    return build_documents(Data(**data), tokenizer(), folder / "coder")


def chats(path, row):
    path.write_text(json.dumps(row) + "\n")
    return path
