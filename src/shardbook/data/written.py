"""Written: whether a chat template writes all that a conversation says. Knows nothing of tokens or of masks.

Invariant: the content of each message, the name, description and parameters of each tool, and the name and every
argument of each call are in the text, in a place of their own; else the row is refused, which names the first that is
not. A word that also stands elsewhere proves nothing: a probe (probe.py), the same conversation with another word in
each place, is rendered too, once for all conversations of one form. Then the row's own values are looked for.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import markupsafe

from shardbook.data.fields import MEDIA, holds
from shardbook.data.formats import PLAIN, Message
from shardbook.data.probe import (
    THOUGHTS,
    WORD,
    Probe,
    arguments_of,
    build_probe,
    calls_of,
    describe,
    is_other,
    name_of,
    parameters_of,
    split_thought,
)
from shardbook.recipe import RecipeError

OTHER_TEMPLATE = "set data.chat_template to one that does"
FORMS_KEPT = 512  # probes whose answer is kept
CHANGES_TRIED = 32  # of a probe
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
SWITCH = re.compile(r"(?<!\S)/\w+")  # a word by which a user switches something, as /no_think

Render = Callable[[list[Message], list[Any] | None], str]  # raises RecipeError


class Written:
    """Asks one template, `source`, which `render` renders."""

    def __init__(self, source: str, render: Render):
        self.source, self.render = source, render
        self.answers: dict[str, tuple[str, list[str]] | None] = {}  # of probes, by their keys

    def check(self, messages: list[Message], tools: list[Any] | None, text: str, where: str) -> list[str]:
        """Returns the names of messages' other fields that the template does not write. Raises RecipeError where
        `text`, that of the conversation, lacks something of it. Thoughts of earlier answers may be missing."""
        missing, unread = "", list[str]()
        # "alike" is nearer to the row, for templates that look a call's tool up or obey a field; "kept" says least
        for names in ("apart", "alike", "kept"):
            probe = build_probe(messages, tools, names)
            if answer := self._answer(probe):
                lost, unread = answer
                missing = missing or probe.described(lost)
                if not lost:
                    missing = ""
                if not lost or names == "alike":
                    break
        if missing:
            raise RecipeError(f"{where}: the chat template does not write {missing}; {OTHER_TEMPLATE}")
        numbers = {*NUMBER.findall(text)}
        for what, value in _values_of(messages, tools):
            if not (str(value) in numbers or _is_in(value, text) or self._is_switched(value, text)):
                reason = f"does not write {what} as the row has it, {str(value)[:40]!r}"
                raise RecipeError(f"{where}: the chat template {reason}; {OTHER_TEMPLATE}")
        others = dict.fromkeys(
            name for each in messages for name, value in each.items() if is_other(name) and holds(value)
        )
        return [name for name in others if name in unread or (name not in probe.fields and not self._names(name))]

    def _answer(self, probe: Probe) -> tuple[str, list[str]] | None:
        if (key := probe.key) not in self.answers:
            if len(self.answers) == FORMS_KEPT:
                self.answers.clear()
            self.answers[key] = self._ask(probe)
        return self.answers[key]

    def _ask(self, probe: Probe) -> tuple[str, list[str]] | None:
        """Returns the place of a probe that the template does not write, empty where it writes all, and the names of
        the fields that it does not write; None where it refuses the probe."""
        try:
            text = self.render(probe.messages, probe.tools)
        except RecipeError:
            return None
        written = {*WORD.findall(text)}
        unread = [name for name in probe.fields if not any(word in written for word in probe.fields[name])]
        lost = next((word for word in probe.words if word not in written), "")
        return lost or self._lost_name(probe, text) or self._lost_change(probe, text), unread

    def _lost_name(self, probe: Probe, text: str) -> str:
        """Returns the first name of a call, or of an argument, that other places may have too and that stands in the
        text as often without the calls, or their arguments, as with them."""
        for names, bare in ((probe.called, probe.without_calls), (probe.shared, probe.without_arguments)):
            with contextlib.suppress(RecipeError):
                other = self.render(bare(), probe.tools) if names else ""
                if lost := next((name for name in names if text.count(name) <= other.count(name)), ""):
                    return lost
        return ""

    def _lost_change(self, probe: Probe, text: str) -> str:
        """Returns the number of the first change of a probe that does not change the text."""
        for number, (messages, tools) in enumerate(itertools.islice(probe.changes(), CHANGES_TRIED)):
            with contextlib.suppress(RecipeError):
                if self.render(messages, tools) == text:
                    return str(number)
        return ""

    def _is_switched(self, value: Any, text: str) -> bool:
        """Returns whether a text lacks only words that the template takes out of it because it knows them."""
        if not isinstance(value, str) or not any(word in self.source for word in SWITCH.findall(value)):
            return False
        return SWITCH.sub(lambda word: "" if word[0] in self.source else word[0], value).strip() in text

    def _names(self, field: str) -> bool:
        """Returns whether the template's source names a field, or a thought by any name: transformers gives it all."""
        names = "|".join(map(re.escape, THOUGHTS if field in THOUGHTS else (field,)))
        return bool(re.search(rf"\b({names})\b", self.source))


def check_media(messages: list[Message], where: str) -> None:
    """Raises RecipeError for a message with an image, or what else is not text."""
    for number, message in enumerate(messages):
        if len(message) > len(PLAIN) and (
            media := [name for name in message if name in MEDIA and holds(message[name])]
        ):
            raise RecipeError(f"{where}: message {number} has {media[0]}, and only text is trained")


def _is_in(value: Any, text: str) -> bool:
    """Returns whether a text or a number is in `text`, as it is or as JSON, Python or HTML write it inside quotes."""
    if not isinstance(value, str):
        return json.dumps(value) in text or str(value) in text
    if value in text:
        return True
    ways = (json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1], repr(value)[1:-1])
    return any(way in text for way in (*ways, str(markupsafe.escape(value))))


def _values_of(messages: list[Message], tools: list[Any] | None) -> Iterator[tuple[str, Any]]:
    """Yields what must be in the text, after its name in words."""
    for number, message in enumerate(messages):
        thought, content = split_thought(message)
        if number == len(messages) - 1 and thought:
            yield f"the thought of message {number}", thought
        yield describe(number, message), content
        for what, function in calls_of(message):
            words = f"{what} in message {number}"
            yield words, function["name"]
            yield from _leaves(arguments_of(function), f"in {words}")
    for tool in tools or ():
        what, function = f"the tool {name_of(tool)}", tool.get("function") or tool
        for value, words in ((function.get("name"), what), (function.get("description"), f"the description of {what}")):
            if isinstance(value, str):
                yield words, value.strip()
        for name, parameter in parameters_of(function).items():
            yield f"the parameter {name} of {what}", name
            if isinstance(parameter, dict) and isinstance(description := parameter.get("description"), str):
                yield f"what {name} is, a parameter of {what}", description.strip()
            yield from _names_inside(parameter, name, what)


def _names_inside(schema: Any, path: str, of: str) -> Iterator[tuple[str, Any]]:
    """Yields the names of what a parameter's schema has inside: properties, also those of a list's items."""
    if not isinstance(schema, dict):
        return
    yield from _names_inside(schema.get("items"), f"{path}[]", of)
    inside = schema.get("properties")
    for name, each in inside.items() if isinstance(inside, dict) else ():
        yield f"the parameter {path}.{name} of {of}", name
        yield from _names_inside(each, f"{path}.{name}", of)


def _leaves(value: Any, of: str, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the texts and numbers inside an argument, with the way to each in words."""
    if isinstance(value, dict):
        inside = [(f"{path}.{name}" if path else name, each) for name, each in value.items()]
    elif isinstance(value, list):
        inside = [(f"{path}[{number}]", each) for number, each in enumerate(value)]
    else:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            yield (f"the argument {path} {of}" if path else f"the arguments {of}"), value
        return
    for way, each in inside:
        yield from _leaves(each, of, way)
