"""What a .wandb file holds: LevelDB's log framing (github.com/google/leveldb, doc/log_format.md) around wandb's own
protobuf records, read with the classes that wandb ships."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

HEADER, BLOCK = 7, 32768  # of the file; of a chunk too: checksum 4, length 2, type 1
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(data: bytes) -> Iterator[bytes]:
    """Yields the whole records of a file's `data`, up to where it was cut off."""
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # the rest of a block too short for a header is padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        if kind not in (WHOLE, FIRST, MIDDLE, LAST) or at + HEADER + length > len(data):
            break
        parts = (b"" if kind in (WHOLE, FIRST) else parts) + data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (WHOLE, LAST):
            yield parts


@dataclass
class Recorded:
    group: str = ""
    job_type: str = ""
    config: dict = field(default_factory=dict)
    rows: list[dict] = field(default_factory=list)


def values(config) -> dict:
    return {item.key: json.loads(item.value_json) for item in config.update if item.key}


def read_wandb(path: Path) -> Recorded:
    found, whole = Recorded(), path.read_bytes()
    assert whole[:4] == b":W&B", whole[:HEADER]
    for data in records(whole):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.group, found.job_type = record.run.run_group, record.run.job_type
            found.config |= values(record.run.config)
        elif kind == "config":
            found.config |= values(record.config)
        elif kind == "history":
            found.rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return found
