"""transformers' own arguments, of a script that has no others but for its model and data."""

from collections.abc import Sequence
from pathlib import Path

from shardbook.translate.layout import read_layout, without_layout
from shardbook.translate.rules import (
    Entry,
    File,
    Program,
    Rule,
    absent_entries,
    ignored,
    read_section,
    text,
    whole,
)
from shardbook.translate.trainer import DEFAULTS, trainer_rules


def read(file: File, program: str = "", launcher: Sequence[Entry] = ()) -> list[Entry]:
    """Returns the entries of a script that has transformers' own arguments, as Stanford Alpaca's and FastChat's."""
    rules = plain_rules(file)
    entries = without_layout(read_section(file.keys, rules))
    entries += read_layout(file, "transformers", launcher)
    entries.append(Entry("(trainer)", None, {}, "what it trains is its script's: here answers of conversations"))
    return entries + absent_entries(file.keys, DEFAULTS, rules, [*launcher, *entries], "transformers")


def plain_rules(file: File) -> dict[str, Rule]:
    names = {"data_path": "data.train", "train_file": "data.train", "eval_data_path": "data.eval"}
    return {
        **trainer_rules(file),
        **{name: text(key) for name, key in (names | {"validation_file": "data.eval"}).items()},
        "model_max_length": whole("data.max_length"),
        "lazy_preprocess": ignored,
    }


TRANSFORMERS = Program("transformers' TrainingArguments", frozenset(plain_rules(File(Path(), {}))), read)
