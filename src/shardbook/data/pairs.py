"""Pairs: a preference becomes two rows of prompt and completion, the chosen one first. Knows nothing of tokens."""

from itertools import takewhile
from typing import Any

from shardbook.data.formats import (
    USUAL,
    Message,
    RawRow,
    from_instruction,
    from_turns,
    kind_of,
    read_content,
    without_null,
)
from shardbook.recipe import RecipeError


def split_pair(row: RawRow, where: str) -> list[RawRow]:
    """Returns a preference as two rows of `prompt` and `completion`, the chosen first. `chosen` and `rejected` are text
    after a text `prompt`, or messages; both may repeat the prompt, and their common beginning is then the prompt. As
    messages or text, they may also follow `conversations` or `instruction`. Raises RecipeError."""
    prompt, chosen, rejected = (row.get(key) for key in ("prompt", "chosen", "rejected"))
    if prompt is None and isinstance(row.get("conversations"), list):
        prompt = from_turns(row["conversations"], where)
    elif prompt is None and isinstance(row.get("instruction"), str):
        prompt = from_instruction(row, where)
    chosen, rejected = (_as_messages(side, isinstance(prompt, list)) for side in (chosen, rejected))
    sides: list[Any]
    match prompt, chosen, rejected:
        case str(), str(), str():
            repeated = len(prompt) if chosen.startswith(prompt) and rejected.startswith(prompt) else 0
            sides = [chosen[repeated:], rejected[repeated:]]
        case None | str() | list(), list(), list():
            prompt, sides = _split_messages(prompt, [_plain(chosen, where), _plain(rejected, where)], where)
        case _:
            raise RecipeError(f"{where}: {_no_pair(row)}")
    if sides[0] == sides[1]:
        raise RecipeError(f"{where}: chosen and rejected are the same")
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        if not side:
            raise RecipeError(f"{where}: {name} adds nothing to the prompt")
    more = {key: row[key] for key in ("tools", "system") if row.get(key)}
    return [{"prompt": prompt, "completion": side} | more for side in sides]


def _no_pair(row: RawRow) -> str:
    """Returns the reason why a row is no preference: its fields, and the missing ones or their types."""
    fields = {name: value for name, value in row.items() if value is not None}
    fields_there = f"has the fields {', '.join(fields) or 'none'}"
    needs = "a preference needs prompt, chosen and rejected, as text or as messages"
    if lacks := [name for name in ("chosen", "rejected") if name not in fields]:
        return f"{fields_there}; {needs}; lacks {', '.join(lacks)}"
    kinds = ", ".join(
        f"{name} is {kind_of(fields[name])}" for name in ("prompt", "chosen", "rejected") if name in fields
    )
    if {"prompt", "conversations", "instruction"} & set(fields):
        return f"{fields_there}; {needs}: {kinds}"
    meant = next((name for name in fields if USUAL.get(name.lower()) == "prompt"), "")
    hint = f" (is that {meant}?)" if meant else ": text does not say where an answer begins"
    return f"{fields_there}; {needs}: {kinds}; lacks prompt{hint}"


def _split_messages(prompt: Any, sides: list[list[Message]], where: str) -> tuple[list[Message], list[list[Message]]]:
    """Returns the prompt's messages, and the messages that each side adds to it. Raises RecipeError."""
    shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*sides, strict=False)))
    if isinstance(prompt, str):
        if not shared:
            return [{"role": "user", "content": prompt}], sides
        if not any(str(message.get("content")).strip() == prompt.strip() for message in sides[0][:shared]):
            raise RecipeError(f"{where}: chosen and rejected begin alike, but not with prompt")
    if isinstance(prompt, list):
        prompt = _plain(prompt, where)
        begin = [side[: len(prompt)] == prompt for side in sides]
        if begin[0] != begin[1] and prompt:
            without = "chosen" if begin[1] else "rejected"
            raise RecipeError(f"{where}: {without} does not begin with prompt, the other does")
        if not all(begin):
            return prompt, sides
    return sides[0][:shared], [side[shared:] for side in sides]


def _as_messages(side: Any, is_chat: bool) -> Any:
    """Returns an answer as messages: one message, or text after a prompt of messages. Other values stay as they are."""
    if is_chat and isinstance(side, str):
        return [{"role": "assistant", "content": side}]
    return [side] if isinstance(side, dict) else side


def _plain(messages: list[Any], where: str) -> list[Any]:
    if odd := [message for message in messages if not isinstance(message, dict)]:
        raise RecipeError(f"{where}: a message is {kind_of(odd[0])}, must be a table of role and content")
    turns = bool(messages) and all(message.get("from") for message in messages)
    if turns:
        return from_turns(messages, where)
    plain = [without_null(message) for message in messages]
    return [
        message | {"content": read_content(message["content"], f"{where}: a message")}
        if isinstance(message.get("content"), list)
        else message
        for message in plain
    ]
