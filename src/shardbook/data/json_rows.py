"""Rows of JSON: each is the text that the file has, checked once and parsed where it is encoded. Knows no formats.

Invariant: no value of a row is changed, put in another order or united with those of other rows. What is no JSON, or
would not come back as it was written (a key twice, a number beyond float64), is an error: file, line and key. NaN and
infinities are no JSON, but Python writes and reads them, and so they are read.
"""

import collections
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

KINDS = {str: "text", list: "a list", dict: "a table", bool: "true or false", int: "a number", float: "a number"}
BLANK = " \t\r\n"  # white space of JSON
DIGITS = 4300  # of an integer, at most: Python reads no more
VERSION = 1  # of what is kept of a row: raise it when that changes


class JsonRow(NamedTuple):
    """A row as its file has it, and where."""

    text: str
    fields: str  # JSON of a table: the name of each field, and the kind of its value (KINDS); null has none
    place: str  # its first line and its file


class _Parser:
    """Parses strictly: a key occurs once, and a number is one that can be held."""

    def __init__(self) -> None:
        self.odd: list[str] = []  # numbers of the last text that cannot
        self.decoder = json.JSONDecoder(
            object_pairs_hook=_table, parse_float=self._read_float, parse_int=self._read_int
        )

    def parse(self, text: str, begin: int = 0) -> tuple[Any, int]:
        """Returns the value that begins at `begin`, and its end. Raises ValueError, with the key where it knows it."""
        self.odd.clear()
        value, end = self.decoder.raw_decode(text, begin)
        if self.odd:
            limits = f"float64, or {DIGITS} digits"
            raise ValueError(
                f"{_path(value, lambda each: each is self)} is {self.odd[0][:40]}, a number beyond {limits}"
            )
        row_text = text[begin:end]
        if ("\\ud" in row_text or "\\uD" in row_text) and (path := _path(value, _is_half)):
            path = path.encode(errors="backslashreplace").decode()
            raise ValueError(f"{path} holds half of a character (a lone surrogate), which no text can")
        return value, end

    def _read_float(self, text: str) -> Any:
        number = float(text)
        is_lost = math.isinf(number) or (number == 0 and text.lower().partition("e")[0].strip("-0."))
        return self._keep(text) if is_lost else number

    def _read_int(self, text: str) -> Any:
        return int(text) if len(text) <= DIGITS else self._keep(text)

    def _keep(self, text: str) -> "_Parser":
        self.odd.append(text)
        return self


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        ((twice, _),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"has the key {twice!r} twice in one table")
    return table


def _is_half(value: Any) -> bool:
    return isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value)


def _path(value: Any, is_wanted: Callable[[Any], bool], at: str = "") -> str:
    """Returns the way to the first wanted value inside: messages[0].content; a key that is wanted is its own."""
    if is_wanted(value):
        return at or "it"
    inside: Any = ()
    if isinstance(value, dict):
        inside = [(f"{at}.{name}" if at else name, each) for name, each in value.items()]
        inside = itertools.chain(inside, ((f"a key of {at or 'the row'}", name) for name in value))
    elif isinstance(value, list):
        inside = [(f"{at}[{number}]", each) for number, each in enumerate(value)]
    return next(filter(None, (_path(each, is_wanted, way) for way, each in inside)), "")


def read_json_rows(file: IO[bytes], name: str, suffix: str) -> Iterator[JsonRow]:
    """Yields the rows of an open file: of .jsonl those of each line; of .json those of a list, or rows one after
    another, each over any number of lines. `name`: of the file, in words. Raises ValueError, which names the line."""
    parser, fields = _Parser(), _Fields()
    rows = _of_lines(file, parser) if suffix == ".jsonl" else _of_text(file, parser)
    try:
        for line, text, row in rows:
            if not isinstance(row, dict):
                raise _BadRow(line, "is no table of fields")
            yield JsonRow(text, fields.of(row), f"line {line} of {name}")
    except _BadRow as error:
        raise ValueError(f"line {error.args[0]} of {name}: {error.args[1]}") from None
    except (OSError, EOFError, zlib.error) as error:  # of a packed file
        raise ValueError(f"{name} cannot be unpacked: {error}") from None


class _BadRow(Exception):
    """A line and what is wrong with it."""


class _Fields:
    """Writes the fields of rows; most rows have those of the row before."""

    def __init__(self) -> None:
        self.kinds: list[tuple[str, type]] | None = None
        self.written = ""

    def of(self, row: dict[str, Any]) -> str:
        if (kinds := [(name, type(value)) for name, value in row.items()]) != self.kinds:
            self.kinds, self.written = kinds, json.dumps({name: KINDS.get(kind) for name, kind in kinds})
        return self.written


def _of_lines(file: IO[bytes], parser: _Parser) -> Iterator[tuple[int, str, Any]]:
    for number, line in enumerate(file, 1):
        text = _decode(line, lambda _, number=number: number).strip(BLANK)
        if not text:
            continue
        end = 0
        while end < len(text):
            begin = _skip(text, end)
            value, end = _parse(parser, text, begin, lambda _, number=number: number)
            yield number, text[begin:end], value


def _of_text(file: IO[bytes], parser: _Parser) -> Iterator[tuple[int, str, Any]]:
    content = file.read()
    text = _decode(content, lambda before: before.count(b"\n") + 1)
    known = [0, 1]  # a place and its line

    def line_of(place: int) -> int:
        known[:] = place, known[1] + text.count("\n", known[0], place)
        return known[1]

    at = _skip(text, 0)
    is_list = text.startswith("[", at)
    at = _skip(text, at + 1) if is_list else at
    end = at
    while at < len(text) and not (is_list and text[at] == "]"):
        line = line_of(at)
        value, end = _parse(parser, text, at, line_of)
        yield line, text[at:end], value
        at = _skip(text, end)
        if is_list and not text.startswith("]", at):
            if at == len(text):
                break
            if not text.startswith(",", at):
                raise _BadRow(line_of(min(at, len(text))), "Expecting ',' or ']' after a row of the list")
            at = _skip(text, at + 1)
            if text.startswith("]", at):
                raise _BadRow(line_of(at), "Expecting a row after ','")
    if is_list and not text.startswith("]", at):
        raise _BadRow(line_of(len(text)), "the list of rows is not closed")
    if is_list and (at := _skip(text, at + 1)) < len(text):
        raise _BadRow(line_of(at), f"goes on after the list of rows: {text[at : at + 20]!r}")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in BLANK:
        at += 1
    return at


def _parse(parser: _Parser, text: str, at: int, line_of: Callable[[int], int]) -> tuple[Any, int]:
    try:
        return parser.parse(text, at)
    except json.JSONDecodeError as error:
        raise _BadRow(line_of(error.pos), f"{error.msg}: column {error.colno}") from None
    except ValueError as error:
        raise _BadRow(line_of(at), str(error)) from None
    except RecursionError:
        raise _BadRow(line_of(at), "holds tables in tables deeper than can be read") from None


def _decode(content: bytes, line_of: Callable[[bytes], int]) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        reason = f"not UTF-8: byte {content[error.start]:#x} after {before[-40:].decode(errors='replace')!r}"
        raise _BadRow(line_of(before), reason) from None
