"""Formats: reads rows of each common format as the messages or text that chat.py encodes. Knows nothing of tokens.

Invariant: nothing of a row is lost in silence: a field in no known place is an error that names it.
"""

import difflib
import json
from typing import Any, NamedTuple

from shardbook.recipe import RecipeError

RawRow = dict[str, Any]
Message = dict[str, Any]
PLAIN = {"role", "content"}
OF_CALL = {"id", "type", "index", "function", "name", "arguments"}
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bing": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_call": "assistant",
} | {role: role for role in ("system", "user", "assistant", "tool")}
OTHER_ROLES = ROLES | dict.fromkeys(("bot", "ai", "asistant", "response"), "assistant")  # guessed at in errors only
FORMATS = {  # with the fields of each
    "messages": ["messages"],
    "conversations": ["conversations"],
    "prompt and completion": ["prompt", "completion"],
    "instruction and output": ["instruction", "output"],
    "text": ["text"],
}
SHAPES = ", ".join(list(FORMATS)[:-1]) + " or text"
USUAL = {  # common other names of fields
    "question": "prompt",
    "query": "prompt",
    "answer": "completion",
    "response": "completion",
    "target": "completion",
    "chat": "messages",
    "dialog": "messages",
    "content": "text",
}


class Text(NamedTuple):
    prompt: str
    completion: str  # the trained text


class Chat(NamedTuple):
    messages: list[Message]  # role and content are strings; without keys that are None
    trained: list[int]  # numbers of the trained answers
    tools: list[Any] | None


def read_row(row: RawRow, where: str, system: str = "", train_on: str = "assistant") -> Text | Chat:
    """Reads a row of any format. `system`: the system message of a conversation without one; `train_on`: as in the
    recipe. Raises RecipeError, which names the row by `where`."""
    first = 0  # the first message that may be trained
    match row:
        case {"messages": list(messages)}:
            pass
        case {"conversations": list(turns)}:
            messages = from_turns(turns, where)
        case {"prompt": list(prompt), "completion": list(completion)}:
            messages, first = prompt + completion, len(prompt)
        case {"prompt": str(prompt), "completion": str(completion)}:
            _read_text(row, "completion", where)
            return Text("", prompt + completion) if train_on == "all" else Text(prompt, completion)
        case {"instruction": str(), "output": str(output)}:
            messages = [*from_instruction(row, where), {"role": "assistant", "content": output}]
        case {"text": str(text)}:
            _read_text(row, "text", where)
            return Text("", text)
        case _:
            raise RecipeError(f"{where}: {_unread(row)}")
    flags: dict[int, bool] = {}
    messages = [_read_message(message, number, where, flags) for number, message in enumerate(messages)]
    given = row.get("system") or ""
    if not isinstance(given, str):
        raise RecipeError(f"{where}: system is {kind_of(given)}, must be text")
    has_system = bool(messages) and messages[0]["role"] in ("system", "developer")
    if has_system and given and given != messages[0]["content"]:
        raise RecipeError(f"{where}: has a system field and another system message; leave one out")
    if not has_system and (given or system):
        messages.insert(0, {"role": "system", "content": given or system})
        first, flags = first + 1, {number + 1: flag for number, flag in flags.items()}
    return Chat(messages, _choose(messages, first, flags, train_on, where), _read_tools(row.get("tools"), where))


def _read_text(row: RawRow, name: str, where: str) -> None:
    if not row[name].strip():
        raise RecipeError(f"{where}: {name} is empty")
    if unused := [key for key in ("system", "tools") if row.get(key)]:
        hint = "; prompt and completion are one by the names instruction and output (data.columns)" * ("prompt" in row)
        reason = f"has {unused[0]} beside {name} that is text; only conversations have {unused[0]}"
        raise RecipeError(f"{where}: {reason}{hint}")


def _choose(messages: list[Message], first: int, flags: dict[int, bool], train_on: str, where: str) -> list[int]:
    """Returns the numbers of the trained answers. Raises RecipeError where there is none."""
    answers = [
        number
        for number, message in enumerate(messages)
        if number >= first
        and message["role"] == "assistant"
        and (message["content"].strip() or len(message) > len(PLAIN))
    ]
    for number, flag in flags.items():
        if flag and messages[number]["role"] != "assistant":
            role = f"is of role {messages[number]['role']}"
            raise RecipeError(f"{where}: message {number} {role} and asks to be trained; only the assistant's can be")
        if not flag and train_on == "all":
            raise RecipeError(
                f"{where}: message {number} asks not to be trained, and data.train_on = 'all' trains every token; "
                "set data.train_on=assistant"
            )
    if train_on == "all":
        return answers
    if not answers:
        reason = f"{where}: no assistant text, so nothing to train on"
        roles = list(dict.fromkeys(message["role"] for message in messages[first:]))
        meant = {role: OTHER_ROLES.get(role.lower(), role) for role in roles}
        hints = "".join(f"; is {role!r} {known}?" for role, known in meant.items() if known != role)
        raise RecipeError(f"{reason}; its roles are {', '.join(roles) or 'none'}{hints}")
    trained = [number for number in answers if flags.get(number, train_on != "last" or number == answers[-1])]
    if not trained:
        raise RecipeError(f"{where}: each answer asks not to be trained, so nothing to train on")
    return trained


def _read_message(message: Any, number: int, where: str, flags: dict[int, bool]) -> Message:
    """Returns a message in the templates' form. The value of its `train` or `weight` goes into `flags`."""
    if not isinstance(message, dict):
        raise RecipeError(f"{where}: message {number} needs a string role and a string content")
    if message.keys() != PLAIN or None in message.values():
        message = without_null(message)
        for name in ("weight", "train"):
            if (flag := message.pop(name, None)) is not None:
                if flag not in (0, 1):
                    raise RecipeError(f"{where}: message {number} has {name} = {flag!r}; must be 0 or 1, false or true")
                if flags.setdefault(number, bool(flag)) != flag:
                    raise RecipeError(f"{where}: message {number} has weight and train, and they differ; leave one out")
        if calls := message.pop("tool_calls", None):
            calls = _json(calls, f"{where}: tool_calls of message {number}")
            if not isinstance(calls, list):
                raise RecipeError(
                    f"{where}: tool_calls of message {number} is {kind_of(calls)}, must be a list of calls"
                )
            message = {"content": ""} | message | {"tool_calls": [_read_call(call, number, where) for call in calls]}
        if "function_call" in message:
            message = {"content": ""} | message
            _read_call(message["function_call"], number, where)
            message["function_call"] = message["function_call"].get("function") or message["function_call"]
        if {"from", "value"} <= message.keys():
            reason = "has from and value; name their field conversations, not messages"
            raise RecipeError(f"{where}: message {number} {reason}")
    if isinstance(message.get("content"), list):
        message = message | {"content": read_content(message["content"], f"{where}: message {number}")}
    if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
        raise RecipeError(f"{where}: message {number} needs a string role and a string content")
    return message


def read_content(parts: list[Any], what: str) -> str:
    """Returns the text of a content that is a list of one part, {"type": "text", "text": ...}."""
    parts = [without_null(part) if isinstance(part, dict) else part for part in parts]
    kinds = [part.get("type") if isinstance(part, dict) else kind_of(part) for part in parts]
    if kinds != ["text"] or not isinstance(text := parts[0].get("text"), str) or len(parts[0]) > 2:
        raise RecipeError(f"{what} has a content of the parts {', '.join(map(str, kinds)) or 'none'}; must be one text")
    return text


def _read_call(call: Any, number: int, where: str) -> dict[str, Any]:
    """Returns a tool call in the one shape that every template reads: arguments as a table, inside `function`."""
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecipeError(f"{where}: a tool call of message {number} needs a name and arguments")
    inside = function.items() if function is call else [*function.items(), *call.items()]
    if unread := [name for name, value in inside if name not in OF_CALL and value not in (None, "", [], {})]:
        extra = f"a tool call of message {number} has {', '.join(unread)}"
        raise RecipeError(f"{where}: {extra}; a call has a name and arguments")
    arguments = _json(function.get("arguments") or {}, f"{where}: arguments of {function['name']} in message {number}")
    tool_call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **tool_call} if call.get("id") is not None else tool_call


def _read_tools(tools: Any, where: str) -> list[Any] | None:
    if not tools:
        return None
    tools = _json(tools, f"{where}: tools") if isinstance(tools, str) else tools
    is_list = isinstance(tools, list)
    if not (
        is_list and all(isinstance(tool, dict) and isinstance(tool.get("function") or tool, dict) for tool in tools)
    ):
        raise RecipeError(f"{where}: tools must be a list of JSON schemas, or that as a JSON string")
    return tools or None


def _json(value: Any, what: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise RecipeError(f"{what} = {value[:60]!r}: is not JSON") from None


def without_null(message: Message) -> Message:
    """Returns a message without its fields of value null, which are as if they were not there. What is inside its
    fields stays: an argument of a call may be null."""
    return {name: value for name, value in message.items() if value is not None}


def without_none(value: Any) -> Any:
    """Returns what a table of columns has, without the keys of value None that it has because other rows have them."""
    if isinstance(value, dict):
        return {key: without_none(inside) for key, inside in value.items() if inside is not None}
    return [without_none(inside) for inside in value] if isinstance(value, list) else value


def from_turns(turns: list[Any], where: str) -> list[Message]:
    """Returns ShareGPT's `from` and `value` as role and content. A function_call that holds JSON becomes tool calls."""
    messages = []
    for number, turn in enumerate(turns):
        turn = without_null(turn) if isinstance(turn, dict) else turn
        fields = set(turn) if isinstance(turn, dict) else set()
        pairs = [pair for pair in (("from", "value"), ("role", "content")) if {*pair} <= fields]
        if not pairs:
            raise RecipeError(f"{where}: message {number} of conversations needs from and value, or role and content")
        if len(pairs) > 1:
            raise RecipeError(f"{where}: message {number} has from and value, and role and content too; leave two out")
        role, value = map(turn.pop, pairs[0])
        if left := [name for name in ("role", "content") if name in turn]:
            both = " and ".join((*pairs[0], *left))
            raise RecipeError(f"{where}: message {number} has {both}; leave {' and '.join(left)} out")
        if not isinstance(role, str) or (role not in ROLES and "from" in pairs[0]):  # a role may be the template's own
            raise RecipeError(f"{where}: message {number} is from {role!r}; must be of {', '.join(ROLES)}")
        message = turn | {"role": ROLES.get(role, role), "content": value}
        if role == "function_call":
            try:
                calls = json.loads(value) if isinstance(value, str) else value
                message |= {"content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
            except ValueError:  # no JSON: it stays text
                pass
        messages.append(message)
    return messages


def from_instruction(row: RawRow, where: str) -> list[Message]:
    """Returns Alpaca's history, instruction and input as messages."""
    messages = []
    history = row.get("history") or []
    if not isinstance(history, list):
        raise RecipeError(f"{where}: history is {kind_of(history)}, must be a list of two texts each")
    for number, turn in enumerate(history):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise RecipeError(f"{where}: history {number} must be two texts, the user's and the answer")
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=True)]
    more = row.get("input") or ""
    if not isinstance(more, str):
        raise RecipeError(f"{where}: input is {kind_of(more)}, must be text")
    return [*messages, {"role": "user", "content": "\n".join(filter(None, (row["instruction"], more)))}]


def _unread(row: RawRow) -> str:
    """Returns the reason why a row has no format: its fields, the nearest format and the fields that this lacks."""
    fields = {name: value for name, value in row.items() if value is not None}
    fields_there = f"has the fields {', '.join(fields) or 'none'}"
    if {"chosen", "rejected"} <= set(fields):
        return (
            f"{fields_there}: a preference, which method = dpo, orpo, simpo and reward train; for sft it needs {SHAPES}"
        )
    known = [name for needed in FORMATS.values() for name in needed]
    meant: dict[str, str] = {}  # field of a format -> the row's
    for name in fields:
        close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75)
        meant.setdefault(name if name in known else USUAL.get(name.lower()) or (close or [name])[0], name)
    best = max(FORMATS, key=lambda form: sum(1 + (name in fields) for name in FORMATS[form] if name in meant))
    if not any(name in meant for name in FORMATS[best]):
        return f"{fields_there}; needs {SHAPES}"
    wrong = [f"{name} is {kind_of(fields[name])}" for name in FORMATS[best] if name in fields]
    lacks = [
        f"lacks {name}" + (f" (is that {meant[name]}?)" if name in meant else "")
        for name in FORMATS[best]
        if name not in fields
    ]
    return f"{fields_there}; nearest to {best}: {', '.join(lacks or wrong)}; needs {SHAPES}"


def kind_of(value: Any) -> str:
    names = {str: "text", list: "a list", dict: "a table", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
