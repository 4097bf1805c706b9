"""Probe: a conversation of a row's form with another word in each place, to see what a chat template writes.

Invariant: a probe has the roles, fields, kinds of values and emptiness of its row, and no word of it twice. How far it
has the row's own names, `names` says: "apart", each place has a name of its own; "alike", places of one name share a
word, for templates that look a call's tool up; "kept", names and fields are the row's.
"""

import copy
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from shardbook.data.formats import PLAIN, Message

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of a message that hold a thought
CALLS = ("tool_calls", "function_call")
IDS = ("tool_call_id", "id")  # of calls and their results
END_OF_THOUGHT = "</think>"
# a thought is what the answer begins with; its opening may be a part of the generation prompt
THOUGHT = re.compile(r"\s*(?:<think>)?((?:(?!<think>).)*?)</think>(.*)", re.DOTALL)
FIRST_NUMBER = 7_310_000_000  # numbers of a probe are this one and the next ones; fractions have .5
WORD = re.compile(r"zq\d{5}qz|731\d{7}(?:\.5)?")  # nine letters and digits, as ids of calls may have to be
# names of parameters that a template may mistake for the schema's own words: a probe keeps them
SCHEMA_WORDS = {
    "description",
    "type",
    "properties",
    "required",
    "nullable",
    "enum",
    "items",
    "title",
    "default",
    "name",
}
SCHEMAS = ("parameters", "input_schema")


@dataclasses.dataclass
class Probe:
    """A probe, and what its words stand for."""

    names: str
    messages: list[Message] = dataclasses.field(default_factory=list)
    tools: list[Any] | None = None
    words: dict[str, str] = dataclasses.field(default_factory=dict)  # that must be written: word -> what it stands for
    fields: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # that may be: name -> its words
    # names of arguments, and of calls, that other places may have too: name -> what it stands for
    shared: dict[str, str] = dataclasses.field(default_factory=dict)
    called: dict[str, str] = dataclasses.field(default_factory=dict)
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)  # names of tools and parameters -> words
    functions: dict[str, str] = dataclasses.field(default_factory=dict)  # names of calls -> words
    # parameters that keep their names, by the number of their tool; these and arguments that are 0 or false, in words
    kept_parameters: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    changed: list[str] = dataclasses.field(default_factory=list)
    ids: dict[str, str] = dataclasses.field(default_factory=dict)
    count: int = 0

    @property
    def key(self) -> str:
        """The probe as text: the same for all rows of its form."""
        return json.dumps([self.names, self.messages, self.tools], default=str)

    def described(self, place: str) -> str:
        """Returns a place in words: one of `words`, `shared` or `called`, or the number of one of `changed`."""
        if place.isdigit() and int(place) < len(self.changed):
            return self.changed[int(place)]
        return self.words.get(place) or self.shared.get(place) or self.called.get(place, "")

    def next_word(self) -> str:
        self.count += 1
        return f"zq{self.count:05d}qz"

    def hide(self, value: Any, what: str) -> Any:
        """Returns a word, or a number, in place of a value that holds something, which must then be written. Others (a
        blank text, 0, true, false, null) stay."""
        if isinstance(value, str) and value.strip():
            value = self.next_word()
        elif isinstance(value, int | float) and not isinstance(value, bool) and value:
            self.count += 1
            value = FIRST_NUMBER + self.count + (0.5 if isinstance(value, float) else 0)
        else:
            return value
        self.words[str(value)] = what
        return value

    def hide_name(self, name: str, what: str) -> str:
        """Returns a word in place of the name of a tool, a call or a parameter."""
        if not name.strip() or self.names == "kept":
            return name
        word = self.next_word() if self.names == "apart" else self.renamed.get(name) or self.next_word()
        self.renamed[name] = word
        self.words[word] = what
        return word

    def hide_key(self, name: str, what: str) -> str:
        """Returns a word in place of an argument's name."""
        if self.names != "kept" and name.strip() and (self.names == "apart" or name not in self.renamed):
            return self.hide_name(name, what)
        if name.strip():
            self.shared[self.renamed.get(name, name) if self.names == "alike" else name] = what
        return self.renamed[name] if self.names == "alike" and name in self.renamed else name

    def hide_id(self, value: str) -> str:
        """Returns an id of nine letters in place of one; names of tools inside it are those of the probe."""
        if self.names == "kept":
            return value
        for name, word in self.functions.items():
            if name in value:
                return value.replace(name, word)
        return self.ids.setdefault(value, f"id{len(self.ids):05d}di")

    def hide_field(self, name: str, value: Any, is_last: bool, number: int) -> Any:
        """Returns a word in place of a message's other field. It may be left out, but a last answer's thought."""
        if name in IDS and isinstance(value, str) and value.strip():
            return self.hide_id(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and self.names == "apart":
            return type(value)(1)
        if not isinstance(value, str) or not value.strip():
            return value
        if name in THOUGHTS and is_last:
            return self.hide(value, f"{name} in message {number}")
        if self.names != "apart":
            return value
        word = self.next_word()
        self.fields.setdefault(name, []).append(word)
        return word

    def hide_inside(self, value: Any, of: str, path: str = "") -> Any:
        """Returns an argument with words in place of its names, texts and numbers."""
        if isinstance(value, dict):
            table = {}
            for name, each in value.items():
                way = f"{path}.{name}" if path else name
                table[self.hide_key(name, f"the argument {way} {of}")] = self.hide_inside(each, of, way)
            return table
        if isinstance(value, list):
            return [self.hide_inside(each, of, f"{path}[{number}]") for number, each in enumerate(value)]
        what = f"the argument {path} {of}" if path else f"the arguments {of}"
        if isinstance(value, bool | int | float) and not value:
            self.changed.append(what)
        return self.hide(value, what)

    def without_calls(self) -> list[Message]:
        """Returns the messages with no call in any."""
        return [{name: value for name, value in message.items() if name not in CALLS} for message in self.messages]

    def without_arguments(self) -> list[Message]:
        """Returns the messages with no argument in any call."""
        messages = copy.deepcopy(self.messages)
        for message in messages:
            for _, function in calls_of(message):
                if "arguments" in function:
                    function["arguments"] = {} if isinstance(function["arguments"], dict) else ""
        return messages

    def changes(self) -> Iterator[tuple[list[Message], list[Any] | None]]:
        """Yields, for each of `changed`, the messages and the tools without it: an empty text in place of an argument,
        or a tool without a parameter."""
        for number, name in self.kept_parameters:
            tools = copy.deepcopy(self.tools)
            assert tools
            del parameters_of(tools[number].get("function") or tools[number])[name]
            yield self.messages, tools
        for number, message in enumerate(self.messages):
            for at, (_, function) in enumerate(calls_of(message)):
                for path in _falsy(function.get("arguments")):
                    messages = copy.deepcopy(self.messages)
                    inside = calls_of(messages[number])[at][1]["arguments"]
                    for step in path[:-1]:
                        inside = inside[step]
                    inside[path[-1]] = ""
                    yield messages, self.tools


def _falsy(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for step, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _falsy(each, (*path, step))
    elif path and isinstance(value, bool | int | float) and not value:
        yield path


def build_probe(messages: list[Message], tools: list[Any] | None, names: str) -> Probe:
    """Returns the probe of a conversation."""
    probe = Probe(names)
    if tools:
        probe.tools = [_probe_tool(tool, number, probe) for number, tool in enumerate(tools)]
    for number, message in enumerate(messages):
        probe.messages.append(_probe_message(message, number, number == len(messages) - 1, probe))
    return probe


def _probe_message(message: Message, number: int, is_last: bool, probe: Probe) -> Message:
    new: Message = {"role": message["role"], "content": _probe_content(message, number, is_last, probe)}
    if calls := message.get("tool_calls"):
        new["tool_calls"] = [_probe_call(call, number, probe) for call in calls]
    if old := message.get("function_call"):
        new["function_call"] = _probe_function(old, f"function_call {old['name']} in message {number}", probe)
    for name, value in message.items():
        if is_other(name):
            new[name] = probe.hide_field(name, value, is_last and message["role"] == "assistant", number)
    return {name: new[name] for name in message if name in new}


def _probe_content(message: Message, number: int, is_last: bool, probe: Probe) -> str:
    thought, content = split_thought(message)
    if not thought:
        return str(probe.hide(message["content"], describe(number, message)))
    hidden = probe.next_word()
    if is_last:
        probe.words[hidden] = f"the thought of message {number}"
    opening = "<think>" * ("<think>" in message["content"].partition(END_OF_THOUGHT)[0])
    return f"{opening}{hidden}{END_OF_THOUGHT}{probe.hide(content, describe(number, message))}"


def _probe_call(call: dict[str, Any], number: int, probe: Probe) -> dict[str, Any]:
    new = call | {
        "function": _probe_function(call["function"], f"the call of {name_of(call)} in message {number}", probe)
    }
    return new | {"id": probe.hide_id(call["id"])} if isinstance(call.get("id"), str) else new


def _probe_function(function: dict[str, Any], what: str, probe: Probe) -> dict[str, Any]:
    is_shared = probe.names == "kept" or (probe.names == "alike" and function["name"] in probe.renamed)
    new = function | {"name": probe.hide_name(function["name"], what)}
    probe.functions[function["name"]] = new["name"]
    if is_shared:
        probe.called.setdefault(new["name"], what)
    if arguments := arguments_of(function):
        new["arguments"] = probe.hide_inside(arguments, f"in {what}")
    return new


def _probe_tool(tool: dict[str, Any], number: int, probe: Probe) -> dict[str, Any]:
    """Returns a tool with words for its name, description, parameters and their descriptions. What a schema says deeper
    inside is for its template to write or not: types decide how it writes them."""
    function = tool.get("function") or tool
    what, new = f"the tool {name_of(tool)}", dict(function)
    if isinstance(function.get("name"), str):
        new["name"] = probe.hide_name(function["name"], what)
    if isinstance(function.get("description"), str):
        new["description"] = probe.hide(function["description"], f"the description of {what}")
    parameters, renamed = {}, {}
    for name, each in parameters_of(function).items():
        words = f"the parameter {name} of {what}"
        if name in SCHEMA_WORDS:
            probe.kept_parameters.append((number, name))
            probe.changed.append(words)
        renamed[name] = name if name in SCHEMA_WORDS else probe.hide_name(name, words)
        if isinstance(each, dict) and isinstance(each.get("description"), str):
            each = each | {"description": probe.hide(each["description"], f"what {name} is, a parameter of {what}")}
        parameters[renamed[name]] = each
    if parameters:
        key = next(key for key in SCHEMAS if isinstance(function.get(key), dict))
        schema = function[key]
        new[key] = schema | {"properties": parameters} if "properties" in schema else parameters
        if isinstance(required := schema.get("required"), list) and "properties" in schema:
            new[key]["required"] = [renamed.get(each, each) if isinstance(each, str) else each for each in required]
    return tool | {"function": new} if tool.get("function") else new


# ---- what a conversation has


def describe(number: int, message: Message) -> str:
    return f"message {number} ({message['role']})"


def is_other(field: str) -> bool:
    return field not in PLAIN and field not in CALLS


def split_thought(message: Message) -> tuple[str, str]:
    """Returns the thought that an answer's text begins with, empty where it has none, and what follows it."""
    content = message["content"].strip()
    parts = THOUGHT.fullmatch(content) if message["role"] == "assistant" and END_OF_THOUGHT in content else None
    return (parts[1].strip(), parts[2].strip()) if parts else ("", content)


def name_of(tool: dict[str, Any]) -> str:
    return str((tool.get("function") or tool).get("name", ""))


def calls_of(message: Message) -> list[tuple[str, dict[str, Any]]]:
    """Returns the functions that a message calls, after their names in errors. The old form is `function_call`."""
    calls = [(f"the call of {name_of(call)}", call["function"]) for call in message.get("tool_calls", ())]
    old = message.get("function_call")
    return [*calls, (f"function_call {old['name']}", old)] if old else calls


def arguments_of(function: dict[str, Any]) -> Any:
    """Returns the arguments of a call; None where there are none, also in the text that function_call has of them."""
    arguments = function.get("arguments")
    return None if isinstance(arguments, str) and arguments.strip() in ("", "{}") else arguments


def parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool's parameters by name: the properties of its schema, or the tables that it has in place of one."""
    schema: dict[str, Any] = next((function[key] for key in SCHEMAS if isinstance(function.get(key), dict)), {})
    if isinstance(properties := schema.get("properties", schema), dict) and properties:
        is_table = "properties" in schema or all(isinstance(each, dict) for each in properties.values())
        return properties if is_table else {}
    return {}
