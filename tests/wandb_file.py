"""What a .wandb file holds: LevelDB's log framing (github.com/google/leveldb, doc/log_format.md) around wandb's own
protobuf records, read with the classes that wandb ships."""

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

HEADER, BLOCK = 7, 32768  # of the file; of a chunk too: checksum 4, length 2, type 1
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class Recorded:
    group: str = ""
    job_type: str = ""
    config: dict = field(default_factory=dict)
    rows: list[dict] = field(default_factory=list)
    step_metrics: dict[str, str] = field(default_factory=dict)  # metric or glob -> its axis


def read_wandb(path: Path) -> Recorded:
    found = Recorded()
    for data in records(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.group, found.job_type = record.run.run_group, record.run.job_type
            found.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update if item.key}
        elif kind == "history":
            found.rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
        elif kind == "metric":
            name = record.metric.name or record.metric.glob_name
            found.step_metrics[name] = record.metric.step_metric or found.step_metrics.get(name, "")
    return found


def records(data: bytes):
    assert data[:4] == b":W&B", data[:HEADER]
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # the rest of a block too short for a header is padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        if kind not in (WHOLE, FIRST, MIDDLE, LAST):
            break
        parts = (b"" if kind in (WHOLE, FIRST) else parts) + data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (WHOLE, LAST):
            yield parts
