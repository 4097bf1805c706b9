"""ChitChat, the embedded default's conversations: from the package chitchat-dataset, converted once to JSONL."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

from shardbook.cache import convert_once
from shardbook.data.formats import RawRow

FILE = "messages.jsonl"


def chitchat_file(name: str) -> Path:
    """Returns the JSONL file of one of DATASETS, which the first call converts."""
    return convert_once(name, "chitchat_dataset", "chitchat-dataset", partial(_convert, DATASETS[name])) / FILE


def _convert(rows_of: Callable[[list[RawRow]], Iterator[RawRow]], folder: Path, out: Path) -> None:
    conversations = json.loads((folder / "dataset.json").read_text()).values()
    rows = [{"messages": messages} for messages in map(_two_sided, conversations) if messages]
    (out / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows_of(rows)))


def _two_sided(conversation: RawRow) -> list[dict[str, str]]:
    """Returns the messages of one conversation, neighboring lines of one speaker joined: the first speaker is the user,
    the other the assistant. Empty unless two speak."""
    lines = [line for turn in conversation["messages"] for line in turn if line["text"].strip()]
    if len({line["sender"] for line in lines}) != 2:
        return []
    messages = []
    for sender, messages_of_sender in groupby(lines, key=lambda line: line["sender"]):
        role = "user" if sender == lines[0]["sender"] else "assistant"
        messages.append({"role": role, "content": "\n".join(line["text"].strip() for line in messages_of_sender)})
    return messages


def _pairs(rows: list[RawRow]) -> Iterator[RawRow]:
    """Yields preferences: each conversation's last answer is chosen over the last answer of the next conversation,
    which was given to somebody else. Nobody judged them: they are for trying things."""
    answered = []
    for row in rows:
        messages = row["messages"]
        last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
        answered.append((messages[:last], messages[last]))
    for (prompt, chosen), (_, rejected) in zip(answered, answered[1:] + answered[:1], strict=True):
        if chosen != rejected:
            yield {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]}


DATASETS: dict[str, Callable[[list[RawRow]], Iterator[RawRow]]] = {"chitchat": iter, "chitchat-pairs": _pairs}
