"""Reads back a run's .wandb files, whose tail a killed process has not written.

LevelDB's log framing (github.com/google/leveldb, doc/log_format.md) around wandb's own protobuf records, read with the
classes that wandb ships; it has no reader itself.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

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


def steps_in(folder: Path, step_key: str) -> set[int]:
    """Returns the steps, by the metric `step_key`, whose rows the .wandb files of a run directory have."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    found = set[int]()
    for path in folder.glob("wandb/*run-*/*.wandb"):
        for record in map(Record.FromString, records(path.read_bytes())):
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if step_key in values and not any(key.startswith("samples") for key in values):
                found.add(int(values[step_key]))
    return found
