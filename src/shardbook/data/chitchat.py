"""ChitChat, the conversations of the embedded default: from the package chitchat-dataset, converted once to JSONL."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from shardbook.cache import convert_once

DATASET, FILE = "chitchat", "messages.jsonl"


def chitchat_file() -> Path:
    """JSONL of ChitChat as `messages`: who speaks first is the user, the other the assistant; monologues drop out."""
    return convert_once(DATASET, "chitchat_dataset", "chitchat-dataset", _convert) / FILE


def _convert(folder: Path, out: Path) -> None:
    conversations = json.loads((folder / "dataset.json").read_text()).values()
    rows = [messages for messages in map(_two_sided, conversations) if messages]
    out.mkdir(parents=True)
    (out / FILE).write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))


def _two_sided(conversation: dict[str, Any]) -> list[dict[str, str]]:
    """Messages of one conversation, neighbouring lines of one speaker joined; empty if only one side speaks."""
    lines = [line for turn in conversation["messages"] for line in turn if line["text"].strip()]
    if len({line["sender"] for line in lines}) != 2:
        return []
    messages = []
    for sender, said in groupby(lines, key=lambda line: line["sender"]):
        role = "user" if sender == lines[0]["sender"] else "assistant"
        messages.append({"role": role, "content": "\n".join(line["text"].strip() for line in said)})
    return messages
