"""Written: whether a chat template writes all that a conversation says. Knows nothing of tokens or of masks.

Invariant: the content of each message, the name, description and parameters of each tool, and the name and every
argument of each call are in the text, in a place of their own; else the row is refused, which names the first that is
not. A word that also stands elsewhere proves nothing: a probe, the same conversation with another word in each place,
is rendered too, once for all conversations of one form.
"""

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import markupsafe

from shardbook.data.fields import MEDIA, holds
from shardbook.data.formats import PLAIN, Message
from shardbook.recipe import RecipeError

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of a message that hold a thought
CALLS = ("tool_calls", "function_call")
IDS = ("tool_call_id", "id")  # of calls and their results
END_OF_THOUGHT = "</think>"
OTHER_TEMPLATE = "set data.chat_template to one that does"
FORMS_KEPT = 4096  # probes whose answer is kept
NUMBER = 7_310_000_000  # numbers of a probe follow it

Render = Callable[[list[Message], list[Any] | None], str]  # raises RecipeError
Words = dict[str, str]  # a placeholder -> what it stands for, in words


class Written:
    """Asks one template, `source`, which `render` renders."""

    def __init__(self, source: str, render: Render):
        self.source, self.render = source, render
        self.ask = functools.lru_cache(FORMS_KEPT)(self._ask)

    def check(self, messages: list[Message], tools: list[Any] | None, text: str, where: str) -> list[str]:
        """Returns the names of messages' other fields that the template does not write. Raises RecipeError where
        `text`, that of the conversation, lacks something of it. Thoughts may be missing: a template drops those of
        earlier turns, and an answer that is trained is looked at by itself."""
        probe, places = _probe_of(messages, tools)
        missing, unread = self.ask(json.dumps(probe), tuple(places.words), tuple(places.fields.items()))
        if missing:
            raise RecipeError(f"{where}: the chat template does not write {places.words[missing]}; {OTHER_TEMPLATE}")
        for what, value in _values_of(messages, tools):
            if not _is_in(value, text):
                said = f"does not write {what} as the row has it, {str(value)[:40]!r}"
                raise RecipeError(f"{where}: the chat template {said}; {OTHER_TEMPLATE}")
        others = {name for message in messages for name, value in message.items() if _is_other(name) and holds(value)}
        others -= {*places.fields.values()}
        return [*unread, *sorted(name for name in others if not self._names(name))]

    def _ask(
        self, probe: str, words: tuple[str, ...], fields: tuple[tuple[str, str], ...]
    ) -> tuple[str, tuple[str, ...]]:
        """Returns the first of the `words` of a probe that the template does not write, empty where it writes all, and
        the names of the `fields` whose words it does not write."""
        messages, tools = json.loads(probe)
        try:
            text = self.render(messages, tools)
        except (
            RecipeError
        ):  # it asks for more of a name or a number than that it is one: then only values are looked at
            return "", ()
        written = {name for word, name in fields if word in text}
        return next((word for word in words if word not in text), ""), tuple(
            {name: 0 for _, name in fields if name not in written}
        )

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


def _is_other(field: str) -> bool:
    return field not in PLAIN and field not in CALLS


def _is_in(value: Any, text: str) -> bool:
    """Returns whether a text or a number is in `text`, as it is or as JSON, Python or HTML write it inside quotes."""
    if not isinstance(value, str):
        return json.dumps(value) in text or str(value) in text
    if value in text:
        return True
    ways = (
        json.dumps(value, ensure_ascii=False)[1:-1],
        json.dumps(value)[1:-1],
        repr(value)[1:-1],
        str(markupsafe.escape(value)),
    )
    return any(way in text for way in ways)


def _values_of(messages: list[Message], tools: list[Any] | None) -> list[tuple[str, Any]]:
    """Returns what must be in the text, after its name in words: contents of messages, names, and arguments."""
    values: list[tuple[str, Any]] = []
    for number, message in enumerate(messages):
        content = message["content"].strip()
        if END_OF_THOUGHT in content and message["role"] == "assistant":
            content = content.rpartition(END_OF_THOUGHT)[2].strip()
        values.append((_message_words(number, message), content))
        for name, call in calls_of(message):
            values.append((f"{name} in message {number}", call["name"]))
            values += _leaves(_arguments_of(call), f"in {name} in message {number}")
    values += [(f"the tool {name_of(tool)}", name_of(tool)) for tool in tools or ()]
    return values


def _message_words(number: int, message: Message) -> str:
    return f"message {number} ({message['role']})"


def _leaves(value: Any, of: str, path: str = "") -> list[tuple[str, Any]]:
    """Returns the texts and numbers inside an argument, with the way to each in words."""
    if isinstance(value, dict):
        inside = [(f"{path}.{name}" if path else name, each) for name, each in value.items()]
    elif isinstance(value, list):
        inside = [(f"{path}[{number}]", each) for number, each in enumerate(value)]
    else:
        is_said = isinstance(value, str | int | float) and not isinstance(value, bool)
        return [(f"the argument {path} {of}" if path else f"the arguments {of}", value)] if is_said else []
    return [leaf for way, each in inside for leaf in _leaves(each, of, way)]


def name_of(tool: dict[str, Any]) -> str:
    return str((tool.get("function") or tool).get("name", ""))


def calls_of(message: Message) -> list[tuple[str, dict[str, Any]]]:
    """Returns the functions that a message calls, after their names in errors. The old form is `function_call`."""
    calls = [(f"the call of {name_of(call)}", call["function"]) for call in message.get("tool_calls", ())]
    old = message.get("function_call")
    return [*calls, (f"function_call {old['name']}", old)] if old else calls


def _arguments_of(function: dict[str, Any]) -> Any:
    """Returns the arguments of a call; None where there are none, also in the text that function_call has of them."""
    arguments = function.get("arguments")
    return None if isinstance(arguments, str) and arguments.strip() in ("", "{}") else arguments


# ---- the probe


class _Placeholders:
    """Gives each place a word or a number that stands nowhere else. A word is as ids of calls are: nine letters and
    digits."""

    def __init__(self) -> None:
        self.words: Words = {}
        self.fields: Words = {}  # of fields that need not be written: their names
        self.ids: dict[str, str] = {}

    def of_id(self, value: str) -> str:
        return self.ids.setdefault(value, f"id{len(self.ids):05d}di")

    def of_field(self, name: str, value: Any) -> Any:
        """Returns the placeholder of a message's other field. A thought may be dropped, and an id may be looked up."""
        if not isinstance(value, str) or not value.strip():
            return value
        if name in IDS:
            return self.of_id(value)
        word = f"fq{len(self.fields):05d}qf"
        if name not in THOUGHTS:
            self.fields[word] = name
        return word

    def of(self, value: Any, words: str) -> Any:
        """Returns the placeholder of a value that holds something; others, which a template may drop as it drops none,
        stay as they are, and so do true and false."""
        if isinstance(value, str) and value.strip():
            value = f"zq{len(self.words):05d}qz"
        elif isinstance(value, int | float) and not isinstance(value, bool) and value:
            value = NUMBER + len(self.words) + (0.5 if isinstance(value, float) else 0)
        else:
            return value
        self.words[str(value)] = words
        return value

    def inside(self, value: Any, of: str, path: str = "") -> Any:
        """Returns an argument with placeholders in place of names, texts and numbers."""
        if isinstance(value, dict):
            table = {}
            for name, each in value.items():
                way = f"{path}.{name}" if path else name
                table[self.of(name, f"the argument {way} {of}")] = self.inside(each, of, way)
            return table
        if isinstance(value, list):
            return [self.inside(each, of, f"{path}[{number}]") for number, each in enumerate(value)]
        return self.of(value, f"the argument {path} {of}" if path else f"the arguments {of}")


def _probe_of(messages: list[Message], tools: list[Any] | None) -> tuple[list[Any], _Placeholders]:
    """Returns a conversation of the same form, as messages and tools, and what its placeholders stand for."""
    places = _Placeholders()
    probes = []
    for number, message in enumerate(messages):
        probe = {name: places.of_field(name, value) if _is_other(name) else value for name, value in message.items()}
        probe |= {"role": message["role"], "content": places.of(message["content"], _message_words(number, message))}
        if calls := message.get("tool_calls"):
            probe["tool_calls"] = [_probe_call(call, number, places) for call in calls]
        if old := message.get("function_call"):
            probe["function_call"] = _probe_function(old, f"function_call {old['name']} in message {number}", places)
        probes.append(probe)
    return [probes, [_probe_tool(tool, places) for tool in tools] if tools else tools], places


def _probe_call(call: dict[str, Any], number: int, places: _Placeholders) -> dict[str, Any]:
    what = f"the call of {name_of(call)} in message {number}"
    probe = call | {"function": _probe_function(call["function"], what, places)}
    return probe | {"id": places.of_id(call["id"])} if isinstance(call.get("id"), str) else probe


def _probe_function(function: dict[str, Any], what: str, places: _Placeholders) -> dict[str, Any]:
    probe = function | {"name": places.of(function["name"], what)}
    if arguments := _arguments_of(function):
        probe["arguments"] = places.inside(arguments, f"in {what}")
    return probe


def _probe_tool(tool: dict[str, Any], places: _Placeholders) -> dict[str, Any]:
    """Returns a tool whose name, description, parameters and their descriptions are placeholders. What a schema says
    deeper inside is for its template to write or not: types decide how it writes them."""
    function = tool.get("function") or tool
    what = f"the tool {name_of(tool)}"
    probe = dict(function)
    if isinstance(function.get("name"), str):
        probe["name"] = places.of(function["name"], what)
    if isinstance(function.get("description"), str):
        probe["description"] = places.of(function["description"], f"the description of {what}")
    schema = function.get("parameters")
    if isinstance(schema, dict) and isinstance(properties := schema.get("properties"), dict):
        named, renamed = {}, {}
        for name, each in properties.items():
            renamed[name] = places.of(name, f"the parameter {name} of {what}")
            if isinstance(each, dict) and isinstance(each.get("description"), str):
                each = each | {"description": places.of(each["description"], f"what {name} is, a parameter of {what}")}
            named[renamed[name]] = each
        probe["parameters"] = schema | {"properties": named}
        if isinstance(required := schema.get("required"), list):
            probe["parameters"]["required"] = [
                renamed.get(each, each) if isinstance(each, str) else each for each in required
            ]
    return tool | {"function": probe} if tool.get("function") else probe
