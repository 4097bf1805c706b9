"""Rules: what the value of another program's key becomes in a recipe, and the entry that tells it.

Invariant: no key is dropped in silence. Each sets something (with a remark where it differs), needs nothing here, or is
refused by name; a key without a rule is refused too, whatever its value.
"""

import json
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from shardbook.recipe import first_line, nearest

Settings = dict[str, Any]  # by section.key of a recipe
Result = tuple[Settings, str]  # settings, and a remark
Rule = Callable[[Any], Result]

KEYS = tomllib.loads(Path(__file__).with_name("keys.toml").read_text())
STAGE = "parallel.stage"
AXES = TP_SIZE, CP_SIZE, PP_SIZE, EP_SIZE = tuple(f"parallel.{axis}_size" for axis in ("tp", "cp", "pp", "ep"))
BATCH, ACCUMULATION = "train.per_device_train_batch_size", "train.gradient_accumulation_steps"
ON, OFF = ("true", "on", "yes", "1"), ("false", "off", "no", "none", "null", "0", "")
WRONG = (TypeError, ValueError, OverflowError)  # of a value that a rule cannot read
NO_FILE = "no such file; one of that name beside this one is read too"
INSTEAD = "method is sft, dpo, orpo, simpo, reward or distill"
COMMENTS = ("_", "//", "#", "$")  # a name that begins so, with a text, is a comment
REMARKS = {
    TP_SIZE: "neighbouring ranks; between matrices they split tokens too",
    CP_SIZE: "neighbouring ranks; inside attention slices are exchanged for heads (Ulysses)",
    EP_SIZE: "neighbouring data ranks share experts, and tokens are exchanged; none is dropped",
    PP_SIZE: "blocks are dealt out evenly, micro-batches run in 1f1b",
}


class Refused(ValueError):
    """The error of a value without a counterpart in a recipe; its message says why, or what to set instead."""


@dataclass(frozen=True)
class File:
    """The keys of a configuration file; `path` finds the files that it names."""

    path: Path
    keys: dict[str, Any]

    def find(self, name: str) -> Path | None:
        """Returns the file that this one names: from the working directory, one of its own folders, or beside it."""
        named = Path(name).expanduser()
        places = [named, *(folder / named for folder in self.path.resolve().parents), self.path.parent / named.name]
        try:
            return next((place for place in places if place.is_file()), None)
        except OSError:  # no name that a file can have
            return None

    def section(self, name: str) -> dict[str, Any]:
        """Returns the keys of a section, none where it is absent or no section."""
        inside = self.keys.get(name)
        return inside if isinstance(inside, dict) else {}

    def is_on(self, name: str) -> bool:
        return is_on(self.keys.get(name))


@dataclass(frozen=True)
class Entry:
    """The result of one key: the settings that it makes, and a remark."""

    key: str
    value: Any
    settings: Settings
    remark: str = ""
    refused: bool = False

    def __str__(self) -> str:
        shown = json.dumps(self.value, default=str)
        became = ", ".join(f"{name} = {json.dumps(value, default=str)}" for name, value in self.settings.items())
        result = "REFUSED, " * self.refused + "; ".join(part for part in (became, self.remark) if part)
        if self.value is None:  # a key that is not in the file, and still means something
            return f"{self.key}: {result}"
        return f"{self.key} = {shown if len(shown) <= 60 else shown[:57] + '...'}: {result}"


@dataclass(frozen=True)
class Program:
    """A program whose configuration is read: the names of its keys, and what reads them."""

    name: str
    keys: frozenset[str]  # of the top level
    read: Callable[..., list[Entry]]


def read_section(
    keys: dict[str, Any], rules: dict[str, Rule], prefix: str = "", auto: dict[str, Any] | None = None
) -> list[Entry]:
    """Returns an entry for each of `keys`, and for each key of a section that has rules for its parts.

    `auto`: what stands for the word "auto", by the last part of a key; a key without one keeps Shardbook's default, or,
    where none has one, what another file says. None: "auto" is a value like others.
    """
    entries = []
    for name, value in keys.items():
        key = f"{prefix}{name}"
        has_parts = any(rule.startswith(f"{key}.") for rule in rules)
        rule = rules.get(key)
        try:
            if rule is None and isinstance(value, str) and str(name).startswith(COMMENTS):
                entries.append(Entry(key, value, {}))
            elif value == "auto" and auto is not None and rule:
                entries.append(_auto_entry(key, rule, auto))
            elif has_parts and isinstance(value, dict):
                entries += read_section(value, rules, f"{key}.", auto) or [Entry(key, value, {})]
            elif has_parts and rule is None and value is not None:
                raise Refused("must be a section: keys and values")
            elif rule is None and not has_parts:
                raise Refused(f"not a key that is known here{nearest(key, list(rules))}")
            else:
                entries.append(Entry(key, value, *(rule(value) if rule else ({}, ""))))
        except Refused as error:
            entries.append(Entry(key, value, {}, str(error), refused=True))
        except AttributeError:
            entries.append(Entry(key, value, {}, "must be a section: keys and values", refused=True))
        except WRONG as error:
            entries.append(Entry(key, value, {}, f"not what this key takes ({first_line(error)})", refused=True))
    return entries


def _auto_entry(key: str, rule: Rule, auto: dict[str, Any]) -> Entry:
    name = key.rpartition(".")[2]
    if name in auto:
        return Entry(key, "auto", rule(auto[name])[0], "auto: the default of transformers' Trainer")
    if rule is ignored or key in HAVE_AUTO:
        return Entry(key, "auto", *rule("auto"))
    return Entry(key, "auto", {}, "Shardbook's default" if auto else "")


# keys whose rule has a word of its own for "auto"
HAVE_AUTO = {
    "pipeline.stages",
    *(f"expert_parallel.{name}" for name in ("top_k", "score_func", "score_apply", "routed_scaling_factor")),
}


def absent_entries(
    keys: dict[str, Any], defaults: dict[str, Any], rules: dict[str, Rule], set_by: Iterable[Entry], program: str
) -> list[Entry]:
    """Returns an entry for each default of a program that makes settings which no entry of `set_by` makes."""
    decided = {key for entry in set_by for key in entry.settings}
    entries = []
    for name, default in defaults.items():
        if keys.get(name) is None:
            try:
                settings, _ = rules[name](default)
            except WRONG:  # of a key beside it, which is refused by itself
                continue
            if settings and not settings.keys() <= decided:
                left = {key: value for key, value in settings.items() if key not in decided}
                entries.append(Entry(f"({name})", None, left, f"absent is {json.dumps(default)} in {program}"))
    return entries


def words(text: str) -> list[str]:
    return text.split()


def is_on(value: Any) -> bool:
    """Returns whether a value is neither false, none, 0 nor empty, also as a word in quotes."""
    if isinstance(value, int | float):
        return value != 0
    return value not in ([], {}) and str(value).strip().lower() not in OFF


def ignored(value: Any) -> Result:
    """Returns nothing to set: the key changes no number here, or is the launcher's."""
    return {}, ""


def off(why: str = "has no counterpart") -> Rule:
    """Returns the rule of a key that is refused unless it is off: false, 0, nothing, or a section that is not enabled
    or on no device."""

    def rule(value: Any) -> Result:
        section = value if isinstance(value, dict) else {}
        is_off = not is_on(value) or section.get("enabled", True) is False
        if is_off or section.get("device", "a device") in ("none", None):
            return {}, ""
        raise Refused(why)

    return rule


def listed_rules(program: str) -> dict[str, Rule]:
    """Returns the rules of a program's keys in keys.toml: those that need nothing, and those without a counterpart."""
    lists = KEYS[program]
    return dict.fromkeys(lists["ignored"].split(), ignored) | dict.fromkeys(lists["refused"].split(), off())


def only(*values: Any, why: str = "has no counterpart") -> Rule:
    """Returns the rule of a key that is refused unless it is one of `values`, which need nothing here, or absent."""

    def rule(value: Any) -> Result:
        if value is None or value in values:
            return {}, ""
        raise Refused(f"{why}; what can be translated: {', '.join(map(str, values))}")

    return rule


def whole_number(value: Any) -> int:
    try:
        if not isinstance(value, bool) and int(value) == float(value):
            return int(value)
    except WRONG:
        pass
    raise Refused(f"must be a whole number, not {value!r}")


def real_number(value: Any) -> float:
    try:
        if not isinstance(value, bool) and isfinite(given := float(value)):
            return given
    except WRONG:
        pass
    raise Refused(f"must be a finite number, not {value!r}")


def whole(key: str) -> Rule:
    return lambda value: ({key: whole_number(value)}, "") if value is not None else ({}, "")


def number(key: str) -> Rule:
    return lambda value: ({key: real_number(value)}, "") if value is not None else ({}, "")


def scalar(key: str) -> Rule:
    """Returns the rule of a number that a recipe keeps whole where it is."""

    def rule(value: Any) -> Result:
        if value is None:
            return {}, ""
        given = real_number(value)
        return {key: int(given) if given == int(given) else given}, ""

    return rule


def text(key: str, remark: str = "") -> Rule:
    """Returns the rule of a key whose text is the setting's; empty and absent set nothing."""

    def rule(value: Any) -> Result:
        if value is not None and not isinstance(value, str):
            raise Refused("must be text")
        return ({key: value}, remark) if value else ({}, "")

    return rule


def noted(remark: str) -> Rule:
    """Returns the rule of a key that sets nothing, with a remark where it is on."""
    return lambda value: ({}, remark if is_on(value) else "")


def switch(key: str, on: Any, otherwise: Any = None, remark: str = "", **beside: Any) -> Rule:
    """Returns the rule of a yes or no, in any spelling; with `on` come the settings `beside`, `section__key`."""
    also = {name.replace("__", "."): value for name, value in beside.items()}

    def rule(value: Any) -> Result:
        if value is None or str(value).lower() in OFF:
            return ({}, "") if otherwise is None or value is None else ({key: otherwise}, "")
        if str(value).lower() not in ON:
            raise Refused(f"must be true or false, not {value!r}")
        return {key: on} | also, remark

    return rule


def choice(key: str, to: dict[str, Any], refused: str = "has no counterpart", remark: str = "") -> Rule:
    """Returns the rule of a key with a few words, in any case; a word that becomes None sets nothing."""

    def rule(value: Any) -> Result:
        if value is None and "none" not in to:
            return {}, ""
        word = str(value).lower()
        if word not in to and "true" in to:
            word = "true" if word in ON else "false" if word in OFF else word
        if word not in to:
            raise Refused(f"{refused}; what can be translated: {', '.join(to)}")
        return ({key: to[word]}, remark) if to[word] is not None else ({}, "")

    return rule


def axis(key: str) -> Rule:
    """Returns the rule of the number of ranks along an axis inside the model: 1 is off, and 0 in DeepSpeed."""

    def rule(value: Any) -> Result:
        if (ranks := whole_number(1 if value is None else value)) < 0:
            raise Refused("must be a whole number of ranks")
        return ({key: ranks}, REMARKS[key]) if ranks > 1 else ({}, "")

    return rule
